// SPDX-License-Identifier: Apache-2.0
/// The matchers: judge() and a byte-wise comparison.
#include "harness/testing/matchers.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <utility>

#include "harness/judge/judge.h"
#include "harness/report/text/verdict_text.h"

namespace isoshard {
namespace {

class ConformsTo final : public testing::MatcherInterface<const Trace&> {
 public:
  ConformsTo(Reference reference, JudgeOptions options)
      : reference_(std::move(reference)), options_(options) {}

  bool MatchAndExplain(const Trace& actual, testing::MatchResultListener* listener) const override {
    const Verdict verdict = judge(reference_, actual, options_);
    if (verdict.status == Status::kConforms) return true;
    *listener << "\n" << render(verdict);
    return false;
  }
  void DescribeTo(std::ostream* out) const override {
    *out << "conforms to the reference of " << reference_.trace().case_slug;
  }
  void DescribeNegationTo(std::ostream* out) const override {
    *out << "does not conform to the reference of " << reference_.trace().case_slug;
  }

 private:
  Reference reference_;
  JudgeOptions options_;
};

/// The coordinates of a flat index.
std::string place_of(std::int64_t index, at::IntArrayRef sizes) {
  std::vector<std::int64_t> coordinates(sizes.size());
  for (std::size_t d = sizes.size(); d-- > 0;) {
    coordinates[d] = index % sizes[d];
    index /= sizes[d];
  }
  return fmt::format("[{}]", fmt::join(coordinates, ", "));
}

class BitEqualTo final : public testing::MatcherInterface<const at::Tensor&> {
 public:
  explicit BitEqualTo(at::Tensor expected) : expected_(expected.detach().contiguous()) {}

  bool MatchAndExplain(const at::Tensor& actual,
                       testing::MatchResultListener* listener) const override {
    if (!actual.defined()) {
      *listener << "is undefined";
      return false;
    }
    if (actual.sizes() != expected_.sizes() || actual.scalar_type() != expected_.scalar_type()) {
      *listener << fmt::format("has shape [{}] and dtype {} instead of [{}] and {}",
                               fmt::join(actual.sizes(), ", "), at::toString(actual.scalar_type()),
                               fmt::join(expected_.sizes(), ", "),
                               at::toString(expected_.scalar_type()));
      return false;
    }
    const at::Tensor packed = actual.detach().contiguous();
    const auto* a = static_cast<const std::byte*>(packed.const_data_ptr());
    const auto* e = static_cast<const std::byte*>(expected_.const_data_ptr());
    const auto size = static_cast<std::int64_t>(packed.element_size());
    std::int64_t first = -1, unequal = 0;
    for (std::int64_t i = 0; i < packed.numel(); ++i) {
      if (std::memcmp(a + i * size, e + i * size, static_cast<std::size_t>(size)) == 0) continue;
      if (unequal++ == 0) first = i;
    }
    if (unequal == 0) return true;
    *listener << fmt::format("differs in {} of {} elements, first at {}: {:.9g} instead of {:.9g}",
                             unequal, packed.numel(), place_of(first, packed.sizes()),
                             packed.reshape({-1})[first].to(at::kDouble).item<double>(),
                             expected_.reshape({-1})[first].to(at::kDouble).item<double>());
    return false;
  }
  void DescribeTo(std::ostream* out) const override {
    *out << fmt::format("is bit-equal to a tensor of shape [{}]",
                        fmt::join(expected_.sizes(), ", "));
  }
  void DescribeNegationTo(std::ostream* out) const override {
    *out << fmt::format("is not bit-equal to a tensor of shape [{}]",
                        fmt::join(expected_.sizes(), ", "));
  }

 private:
  at::Tensor expected_;
};

}  // namespace

testing::Matcher<const Trace&> conforms_to(Reference reference, JudgeOptions options) {
  return testing::MakeMatcher(new ConformsTo(std::move(reference), options));
}

testing::Matcher<const at::Tensor&> bit_equal_to(at::Tensor expected) {
  return testing::MakeMatcher(new BitEqualTo(std::move(expected)));
}

}  // namespace isoshard
