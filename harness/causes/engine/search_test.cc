// SPDX-License-Identifier: Apache-2.0
/// Claims about the search for what was done to a tensor.
#include "harness/causes/engine/search.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "harness/causes/view/values.h"

namespace isoshard::detail {
namespace {

constexpr double kRelative = 1e-6;

/// Ranks that hold copies of a tensor, one of them or all changed.
class Copies {
 public:
  Copies(Shape shape, int ranks, unsigned seed = 1) : shape_(std::move(shape)) {
    std::mt19937_64 engine(seed);
    std::normal_distribution<double> normal;
    for (std::int64_t i = 0; i < numel_of(shape_); ++i) right_.push_back(normal(engine));
    seen_.assign(static_cast<std::size_t>(ranks), right_);
  }
  /// Changes the elements from `first` to `last` of a rank.
  void change(int rank, std::int64_t first, std::int64_t last,
              const std::function<double(double, std::int64_t)>& act) {
    for (std::int64_t i = first; i <= last; ++i) {
      double& element = seen_[static_cast<std::size_t>(rank)][static_cast<std::size_t>(i)];
      element = act(element, i);
    }
  }
  /// Makes an element another one on all ranks, where it is right.
  void set(std::size_t element, double value) {
    right_[element] = value;
    for (std::vector<double>& seen : seen_) seen[element] = value;
  }
  [[nodiscard]] std::optional<Hypothesis> best(std::span<const double> base = {}) const {
    return best_hypothesis(boxes(base), kRelative);
  }
  [[nodiscard]] std::optional<WrongPart> wrong() const { return wrong_part(boxes({}), kRelative); }
  [[nodiscard]] const std::vector<double>& right() const { return right_; }
  [[nodiscard]] std::vector<double>& of(int rank) { return seen_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] std::int64_t count() const { return std::ssize(right_); }

 private:
  [[nodiscard]] std::vector<ComparedBox> boxes(std::span<const double> base) const {
    std::vector<ComparedBox> boxes;
    for (const std::vector<double>& seen : seen_) boxes.push_back({shape_, seen, right_, base});
    return boxes;
  }

  Shape shape_;
  std::vector<double> right_;
  std::vector<std::vector<double>> seen_;
};

TEST(CauseSearch, FindsNothingWhereNothingIsOff) {
  EXPECT_FALSE(Copies({4, 8}, 2).best().has_value());
}

TEST(CauseSearch, NamesTheFactorOfAllElementsOnTheRanksThatHaveIt) {
  Copies copies({4, 8}, 3);
  copies.change(1, 0, copies.count() - 1, [](double x, std::int64_t) { return 1.01 * x; });

  const auto best = copies.best();

  ASSERT_TRUE(best.has_value());
  EXPECT_EQ(best->change, Change::kScale);
  EXPECT_NEAR(best->number, 1.01, 1e-9);
  EXPECT_TRUE(best->is_whole);
  EXPECT_EQ(best->boxes, (std::vector<std::size_t>{1}));
}

// A part may end with an element whose change hides in noise on one rank, and not on another.
TEST(CauseSearch, NamesOnePartIfOneOfItsRanksHidesTheEnd) {
  Copies copies({8, 8}, 2);
  copies.set(17, 7 * kRelative);
  for (const int rank : {0, 1})
    copies.change(rank, 17, 39, [](double x, std::int64_t) { return 1.5 * x; });
  copies.of(1)[17] += kRelative;

  const auto best = copies.best();

  ASSERT_TRUE(best.has_value());
  EXPECT_EQ(best->change, Change::kScale);
  EXPECT_EQ(best->where, (std::vector<Extent>{{-1, 17, 39}, {-1, 17, 39}}));
}

TEST(CauseSearch, NamesAllRanksThatHaveTheFactor) {
  Copies copies({4, 8}, 2);
  for (const int rank : {0, 1})
    copies.change(rank, 0, copies.count() - 1, [](double x, std::int64_t) { return 3 * x; });

  const auto best = copies.best();

  ASSERT_TRUE(best.has_value());
  EXPECT_NEAR(best->number, 3, 1e-9);
  EXPECT_EQ(best->boxes, (std::vector<std::size_t>{0, 1}));
}

TEST(CauseSearch, NamesARunOfElementsWithTheirOffset) {
  Copies copies({6, 8}, 2);
  copies.change(0, 11, 22, [](double x, std::int64_t) { return x + 0.25; });

  const auto best = copies.best();

  ASSERT_TRUE(best.has_value());
  EXPECT_EQ(best->change, Change::kOffset);
  EXPECT_NEAR(best->number, 0.25, 1e-9);
  EXPECT_FALSE(best->is_whole);
  EXPECT_EQ(best->where, (std::vector<Extent>{{-1, 11, 22}}));
}

TEST(CauseSearch, NamesColumnsThatAreZero) {
  Copies copies({16, 8}, 1);
  copies.change(0, 0, copies.count() - 1,
                [](double x, std::int64_t i) { return i % 8 >= 2 && i % 8 <= 4 ? 0 : x; });

  const auto best = copies.best();

  ASSERT_TRUE(best.has_value());
  EXPECT_EQ(best->change, Change::kZero);
  EXPECT_EQ(best->where, (std::vector<Extent>{{1, 2, 4}}));
}

TEST(CauseSearch, DoesNotCallAVerySmallFactorZero) {
  Copies copies({4, 8}, 1);
  copies.change(0, 0, copies.count() - 1, [](double x, std::int64_t) { return 1e-7 * x; });

  const auto best = copies.best();

  ASSERT_TRUE(best.has_value());
  EXPECT_EQ(best->change, Change::kScale);
}

TEST(CauseSearch, NamesTheShiftOfAPart) {
  Copies copies({6, 8}, 1);
  const std::vector<double> right = copies.right();
  copies.change(0, 12, 23, [&](double, std::int64_t i) {
    return right[static_cast<std::size_t>(i == 12 ? 23 : i - 1)];
  });

  const auto best = copies.best();

  ASSERT_TRUE(best.has_value());
  EXPECT_EQ(best->change, Change::kShift);
  EXPECT_EQ(best->number, 1);
  EXPECT_EQ(best->where, (std::vector<Extent>{{-1, 12, 23}}));
}

TEST(CauseSearch, SeesAFactorOfWhatAStepAdds) {
  Copies copies({6, 8}, 1);
  const std::vector<double> right = copies.right();
  std::vector<double> before;
  for (std::int64_t i = 0; i < copies.count(); ++i)
    before.push_back(right[static_cast<std::size_t>(i)] + std::sin(static_cast<double>(i)));
  copies.change(0, 0, copies.count() - 1, [&](double x, std::int64_t i) {
    const double base = before[static_cast<std::size_t>(i)];
    return base + 0.5 * (x - base);
  });

  const auto best = copies.best(before);

  ASSERT_TRUE(best.has_value());
  EXPECT_EQ(best->change, Change::kScale);
  EXPECT_NEAR(best->number, 0.5, 1e-9);
}

TEST(CauseSearch, NamesRowsThatAreRounded) {
  Copies copies({6, 8}, 1);
  copies.change(0, 16, 31, [](double x, std::int64_t) { return rounded_to(x, 8); });

  const auto best = copies.best();

  ASSERT_TRUE(best.has_value());
  EXPECT_EQ(best->change, Change::kRound);
  EXPECT_EQ(best->number, 8);
}

TEST(CauseSearch, SaysWhereElementsAreWrongWhateverWasDoneToThem) {
  const auto noisy = [](double x, std::int64_t i) { return x + std::cos(static_cast<double>(i)); };
  Copies run({6, 8}, 2), columns({6, 8}, 1), scattered({6, 8}, 1), most({6, 8}, 1);
  run.change(1, 11, 20, noisy);
  columns.change(0, 0, 47, [&](double x, std::int64_t i) { return i % 8 == 3 ? noisy(x, i) : x; });
  scattered.change(0, 0, 0, noisy);
  scattered.change(0, 23, 23, noisy);
  most.change(0, 0, 30, noisy);

  const auto part = run.wrong(), column = columns.wrong();
  ASSERT_TRUE(part.has_value());
  EXPECT_EQ(part->boxes, (std::vector<std::size_t>{1}));
  EXPECT_EQ(part->where, (std::vector<Extent>{{-1, 11, 20}}));
  EXPECT_EQ(part->most, 10);
  ASSERT_TRUE(column.has_value());
  EXPECT_EQ(column->where, (std::vector<Extent>{{1, 3, 3}}));
  Copies noise({6, 8}, 1);
  noise.change(0, 0, 47, [](double x, std::int64_t i) { return x * (1 + (i == 9 ? 1e-5 : 3e-6)); });
  EXPECT_FALSE(scattered.wrong().has_value());
  EXPECT_FALSE(noise.wrong().has_value()) << "one is a little farther off than others";
  EXPECT_FALSE(most.wrong().has_value());
  EXPECT_FALSE(Copies({6, 8}, 2).wrong().has_value());
}

// One number fits any element, and says nothing of it.
TEST(CauseSearch, OneElementHasNoFactor) {
  Copies copies({6, 8}, 1);
  copies.change(0, 17, 17, [](double x, std::int64_t) { return 1.5 * x; });

  EXPECT_FALSE(copies.best().has_value());
}

TEST(CauseSearch, NoiseHasNoCause) {
  std::mt19937_64 engine(7);
  std::uniform_real_distribution<double> uniform(-1, 1);
  int found = 0;
  for (unsigned trial = 0; trial < 500; ++trial) {
    Copies copies({6, 8}, 2, trial);
    const double size = std::pow(10.0, -1 - static_cast<int>(trial % 5));
    const std::int64_t first = trial % 3 == 0 ? 0 : 13, last = trial % 3 == 1 ? 13 : 30;
    for (const int rank : trial % 2 == 0 ? std::vector{0} : std::vector{0, 1})
      copies.change(rank, first, last,
                    [&](double x, std::int64_t) { return x + size * uniform(engine); });
    found += copies.best().has_value() ? 1 : 0;
  }
  EXPECT_EQ(found, 0);
}

}  // namespace
}  // namespace isoshard::detail
