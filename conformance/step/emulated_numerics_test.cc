// SPDX-License-Identifier: Apache-2.0
// Numerics are held to the plain reference, so that numerics and a subject that are wrong alike
// cannot agree; and their parts.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/mesh/degrees.h"
#include "suite/emulation/emulated_reduction.h"
#include "suite/emulation/emulated_world.h"
#include "suite/testing/emulated_cases.h"

namespace isoshard {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

std::vector<Case> plain_cases() {
  std::vector<Case> cases;
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16}) {
    cases.push_back(step_case("ddp", {.dp = 3}, dtype));
    cases.push_back(step_case("autotp", {.dp = 2, .tp = 3}, dtype));
    cases.push_back(four_head_case({.dp = 3, .tp = 4}, dtype));
    cases.push_back(copied_heads_case({.dp = 3, .tp = 2}, 6, 1, dtype));
  }
  for (const char* type : {"qwen3", "llama", "gpt2"})
    cases.push_back(step_case("autotp", {.dp = 3, .tp = 2}, Dtype::kFloat32, type));
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
    cases.push_back(
        smoothed(split(with_vocabulary(step_case("autotp", {.dp = 2, .tp = 3}, dtype), 97), 8)));
  }
  const auto under_autocast = [](Dtype dtype, Case item) {
    item.settings.autocast = dtype;
    return item;
  };
  cases.push_back(under_autocast(
      Dtype::kBFloat16,
      with_biases(step_case("autotp", {.dp = 2, .tp = 3}, Dtype::kFloat32, "llama"))));
  cases.push_back(under_autocast(
      Dtype::kBFloat16,
      smoothed(split(with_vocabulary(step_case("autotp", {.dp = 3, .tp = 2}), 97), 8))));
  cases.push_back(under_autocast(Dtype::kFloat16, step_case("autotp", {.dp = 3, .tp = 2})));
  Case adamw = step_case("autotp", {.dp = 3, .tp = 2});
  adamw.settings.optimizer = OptimizerSettings{};
  adamw.steps = 2;
  adamw.data.unequal_labels = true;
  cases.push_back(adamw);
  return cases;
}

class EmulatedNumerics : public ::testing::TestWithParam<Case> {};

TEST_P(EmulatedNumerics, ConformsToThePlainReference) {
  const Case& item = GetParam();
  const Reference& plain = reference_of(item);

  const Trace emulated = emulate(item, numerics_of(item), {&plain});

  EXPECT_THAT(emulated, conforms_to(plain, policy_of(item)));
}

INSTANTIATE_TEST_SUITE_P(Cases, EmulatedNumerics, ::testing::ValuesIn(plain_cases()), case_name);

TEST(DeclaredNumerics, ThatSumsInsteadOfAveragingDivergesFromThePlainReference) {
  const Case item = step_case("ddp", {.dp = 3});
  const Reference& plain = reference_of(item);
  NumericsSpec wrong = numerics_of(item);
  wrong.data.parameter_gradient.reduction = Reduction::kSum;

  const Trace emulated = emulate(item, wrong, {&plain});

  EXPECT_THAT(emulated, Not(conforms_to(plain, policy_of(item))));
}

TEST(DeclaredNumerics, SaysWhatIsCutAndInWhichOrderGradientsMeet) {
  const Case item = step_case("autotp", {.dp = 2, .tp = 3});

  const NumericsSpec numerics = numerics_of(item);

  EXPECT_EQ(numerics.tensor.regions.size(), 14U);
  EXPECT_EQ(numerics.tensor.regions.at("model.layers.1.mlp.down_proj"), Region::kRow);
  ASSERT_EQ(numerics.tensor.shared_inputs.size(), 4U);
  EXPECT_THAT(numerics.tensor.shared_inputs[0].modules,
              ElementsAre("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj",
                          "model.layers.0.self_attn.v_proj"));
  EXPECT_THAT(numerics.tensor.shared_inputs[0].adds, ElementsAre(2, 1, 0));
  EXPECT_TRUE(numerics.tensor.holder_sums.empty());
}

TEST(DeclaredNumerics, SaysWhichRanksHoldAKvHeadAndWhatIsSummedOverThem) {
  const NumericsSpec numerics = numerics_of(copied_heads_case({.tp = 4}, 8, 2));

  const ParameterCut& cut = numerics.tensor.cuts.at("model.layers.1.self_attn.v_proj.bias");
  EXPECT_EQ(cut.by_rank, (std::vector<std::vector<Range>>{{{0, 8}}, {{0, 8}}, {{8, 8}}, {{8, 8}}}));
  ASSERT_EQ(numerics.tensor.holder_sums.size(), 1U);
  EXPECT_EQ(numerics.tensor.holder_sums[0].size(), 8U);
  EXPECT_THAT(numerics.tensor.copies.part_of_rank, ElementsAre(0, 0, 1, 1));
}

TEST(DeclaredNumerics, IsRefusedWhereItDoesNotFitTheCase) {
  const Case item = step_case("autotp", {.dp = 2, .tp = 3});
  Case silent = item;
  silent.subject = "reference";
  const Case whole = split(step_case("ddp", {.dp = 2}), 64);
  NumericsSpec ungrouped = numerics_of(item);
  ungrouped.tensor.shared_inputs.clear();
  NumericsSpec unreduced = numerics_of(item);
  unreduced.data.buckets.parameters.pop_back();

  EXPECT_THAT([&] { (void)numerics_of(silent); },
              ThrowsMessage<UsageError>(HasSubstr("reference publishes no arithmetic")));
  EXPECT_THAT([&] { (void)numerics_of(whole); },
              ThrowsMessage<UsageError>(HasSubstr("multiples of 64")));
  EXPECT_THAT([&] { (void)emulate(item, numerics_of(step_case("autotp", {.dp = 3, .tp = 2}))); },
              ThrowsMessage<UsageError>(HasSubstr("dp 3 x tp 2")));
  EXPECT_THAT([&] { (void)emulate(item, ungrouped); },
              ThrowsMessage<InfrastructureError>(HasSubstr("q_proj")));
  EXPECT_THAT([&] { (void)emulate(item, unreduced); },
              ThrowsMessage<InfrastructureError>(HasSubstr("reduces no gradient of")));
}

TEST(DeclaredNumerics, WithoutAReductionGivesNoReference) {
  const Case item = step_case("autotp", {.tp = 2});
  NumericsSpec local = numerics_of(item);
  local.tensor.row_output.is_made = false;

  EXPECT_THAT([&] { (void)make_emulated_reference(item, local); },
              ThrowsMessage<InfrastructureError>(
                  HasSubstr("different copies of forward at model.layers.0.self_attn.o_proj")));
}

// Independence is the point: the emulator may share the model and the numerics with the subject,
// and the reader of checkpoints (the file format; it cuts what it reads by its own slicing), and
// nothing else.
TEST(DeclaredNumerics, IsCarriedOutWithoutCodeOfTheSubjects) {
  const std::vector<std::string> of_subjects = {"subjects/parallel/", "subjects/train/",
                                                "subjects/checkpoint/", "core/comm/"};
  std::set<std::string> shared;
  for (const char* const header :
       {"parallel/numerics_spec.h", "parallel/tensor_numerics.h", "parallel/vocabulary_numerics.h",
        "parallel/reduction_point.h", "parallel/context_numerics.h", "checkpoint/checkpoint.h"}) {
    shared.insert(fmt::format("#include \"subjects/{}\"", header));
  }
  int files = 0, num_shared = 0;
  for (const auto& entry : std::filesystem::directory_iterator(ISOSHARD_EMULATOR_DIR)) {
    if (!entry.path().filename().string().starts_with("emulated")) continue;
    ++files;
    std::ifstream in(entry.path());
    for (std::string line; std::getline(in, line);) {
      const bool of_subject = std::ranges::any_of(of_subjects, [&](const std::string& folder) {
        return line.starts_with("#include \"" + folder);
      });
      num_shared += shared.contains(line) ? 1 : 0;
      EXPECT_TRUE(!of_subject || shared.contains(line)) << entry.path().filename() << ": " << line;
    }
  }
  EXPECT_GE(files, 9);
  EXPECT_GE(num_shared, 9) << "the folders have other names now";
}

at::Tensor row(std::initializer_list<double> values, at::ScalarType type) {
  return at::tensor(at::ArrayRef<double>(values), at::kDouble).to(type);
}

TEST(EmulatedReduction, AddsInRankOrderUnlessThePointSaysOtherwise) {
  const std::vector<at::Tensor> parts = {row({1e8}, at::kFloat), row({1}, at::kFloat),
                                         row({-1e8}, at::kFloat)};
  ReductionPoint other;
  other.addends = {0, 2, 1};

  EXPECT_EQ(emulated_reduction(parts, {}).item<float>(), 0.0F);
  EXPECT_EQ(emulated_reduction(parts, other).item<float>(), 1.0F);
}

TEST(EmulatedReduction, RoundsSixteenBitSumsOnceUnlessThePointSaysOtherwise) {
  const std::vector<at::Tensor> parts = {row({256}, at::kBFloat16), row({1}, at::kBFloat16),
                                         row({1}, at::kBFloat16)};
  ReductionPoint every;
  every.rounds_every_add = true;

  EXPECT_EQ(emulated_reduction(parts, {}).item<double>(), 258);
  EXPECT_EQ(emulated_reduction(parts, every).item<double>(), 256);
}

TEST(EmulatedReduction, AddsInThePointsDtypeAndReturnsTheTensors) {
  const std::vector<at::Tensor> parts = {row({256}, at::kFloat), row({1}, at::kFloat)};
  ReductionPoint narrow;
  narrow.dtype = Dtype::kBFloat16;

  const at::Tensor sum = emulated_reduction(parts, narrow);

  EXPECT_EQ(sum.scalar_type(), at::kFloat);
  EXPECT_EQ(sum.item<float>(), 256.0F);
}

TEST(EmulatedReduction, TakesTheLargestInEveryOrder) {
  const double none = -std::numeric_limits<double>::infinity();
  const std::vector<at::Tensor> parts = {row({1, none, 5, none}, at::kFloat),
                                         row({3, none, 4, none}, at::kFloat),
                                         row({2, -7, 6, none}, at::kFloat)};
  for (const ReductionOrder order :
       {ReductionOrder::kOrdered, ReductionOrder::kRing, ReductionOrder::kTree}) {
    ReductionPoint largest;
    largest.reduction = Reduction::kMax;
    largest.order = order;

    const at::Tensor result = emulated_reduction(parts, largest);

    EXPECT_THAT(result, bit_equal_to(row({3, -7, 6, none}, at::kFloat)));
  }
}

TEST(EmulatedReduction, AveragesByDividingTheSum) {
  ReductionPoint average;
  average.reduction = Reduction::kAvg;
  const std::vector<at::Tensor> parts = {row({1, 2}, at::kDouble), row({2, 4}, at::kDouble),
                                         row({6, 0}, at::kDouble)};

  EXPECT_THAT(emulated_reduction(parts, average), bit_equal_to(row({3, 2}, at::kDouble)));
}

// Values chosen so that each order gives another sum: 2^-8 vanishes beside 1 in bf16 unless it
// meets its like first.
TEST(EmulatedReduction, FollowsRingAndTreeAsDocumented) {
  const double tiny = 0x1p-8;
  const std::vector<at::Tensor> parts = {row({1, 1, 1}, at::kBFloat16),
                                         row({tiny, tiny, tiny}, at::kBFloat16),
                                         row({tiny, tiny, tiny}, at::kBFloat16)};
  ReductionPoint ring, tree;
  ring.order = ReductionOrder::kRing;
  tree.order = ReductionOrder::kTree;

  // Ring: chunk 0 adds ranks 1, 2, 0; chunk 1 adds 2, 0, 1; chunk 2 adds 0, 1, 2. Tree: (0 + 1) +
  // 2.
  EXPECT_THAT(emulated_reduction(parts, ring),
              bit_equal_to(row({1 + 2 * tiny, 1, 1}, at::kBFloat16)));
  EXPECT_THAT(emulated_reduction(parts, tree), bit_equal_to(row({1, 1, 1}, at::kBFloat16)));
  EXPECT_THAT(emulated_reduction(parts, {}),
              bit_equal_to(row({1 + 2 * tiny, 1 + 2 * tiny, 1 + 2 * tiny}, at::kBFloat16)));
}

TEST(EmulatedReduction, RefusesWhatHasNoMeaning) {
  const std::vector<at::Tensor> unequal = {row({1}, at::kFloat), row({1, 2}, at::kFloat)};
  const std::vector<at::Tensor> equal = {row({1}, at::kFloat), row({2}, at::kFloat)};
  ReductionPoint twice, native;
  twice.addends = {0, 0};
  native.order = ReductionOrder::kNative;

  EXPECT_THROW((void)emulated_reduction(unequal, {}), ShapeError);
  EXPECT_THROW((void)emulated_reduction(equal, twice), UsageError);
  EXPECT_THROW((void)emulated_reduction(equal, native), UsageError);
}

TEST(EmulatedReduction, ThatMeetsAtDifferentPointsFailsOnAllRanks) {
  EmulatedWorld world(mesh_of({.tp = 3}));
  const at::Tensor one = row({1}, at::kFloat);

  EXPECT_THAT(
      [&] {
        world.run(1, [&](int rank) {
          (void)world.reduce_over(Axis::kTp, rank, rank == 2 ? "other" : "same", one, {});
        });
      },
      ThrowsMessage<ShapeError>(AllOf(HasSubstr("same"), HasSubstr("other"))));
}

}  // namespace
}  // namespace isoshard
