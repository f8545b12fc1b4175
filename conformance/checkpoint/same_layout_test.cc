// SPDX-License-Identifier: Apache-2.0
// A run that is saved and resumed on the same mesh is the run
// that was never interrupted, bit by bit.
#include "suite/testing/checkpoint_cases.h"
#include "suite/testing/every_nth.h"
#include "suite/testing/nd_cases.h"

namespace isoshard {
namespace {

Case zero(Case item, int stage) {
  item.settings.zero_stage = stage;
  return item;
}

Case megatron_case(Dtype dtype, bool distributed, std::string_view model_type = "qwen2") {
  Case item = long_case("megatron", {.dp = 3, .tp = 2}, dtype, model_type);
  item.settings.sequence_parallel = true;
  item.settings.distributed_optimizer = distributed;
  item.settings.make_vocab_size_divisible_by = 8;
  return item;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
    all.push_back(long_case("ddp", {.dp = 3}, dtype, "gpt2"));
    for (const int stage : {0, 1, 2})
      all.push_back(zero(long_case("autotp", {.dp = 3, .tp = 2}, dtype), stage));
    all.push_back(long_case("fsdp_tp", {.dp = 3, .tp = 2}, dtype));
    all.push_back(megatron_case(dtype, false));
    all.push_back(megatron_case(dtype, true, "megatron_gpt"));
  }
  // one embedding on two of three stages, with dropout; stages on a V, keys in a ring
  all.push_back(in_pipeline(long_case("nd", {.pp = 3, .dp = 2}, Dtype::kFloat32, "gpt2")));
  all.push_back(with(in_ring(in_pipeline(long_case("nd", {.pp = 2, .cp = 2}, Dtype::kBFloat16), 2,
                                         "ZBVZeroBubble")),
                     [](Case& c) { c.seq_length = 24; }));
  // momentum, and a head that is the embedding
  all.push_back(with(long_case("autotp", {.dp = 2}), [](Case& c) {
    c = with_tied_head(c);
    c.settings.optimizer = verify_settings().optimizer;
  }));
  all.push_back(with(long_case("autotp", {.dp = 2, .tp = 2}),
                     [](Case& c) {  // state in bf16, as the parameters
                       c.dtype = Dtype::kBFloat16;
                       c.settings.zero_stage = 1;
                     }));
  all.push_back(with(long_case("fsdp_tp", {.dp = 2, .tp = 2}), [](Case& c) {
    c.mesh_order = {Axis::kTp, Axis::kDp};
  }));
  // a loss scale that has shrunk, and one step towards its next growth
  all.push_back(with(long_case("autotp", {.dp = 2, .tp = 2}), [](Case& c) {
    c.dtype = Dtype::kFloat16;
    c.settings.master_dtype = Dtype::kFloat32;
    c.settings.loss_scale = {LossScaleSettings::Kind::kDynamic, 0x1p45, 2, 0x1p-40, 2};
  }));
  all.push_back(with(long_case("autotp", {.dp = 2, .tp = 2}),
                     [](Case& c) { c = split(with_vocabulary(c, 97), 32); }));
  return all;
}

class CheckpointSameLayout : public ::testing::TestWithParam<Case> {};
class CheckpointSameLayoutWide : public CheckpointSameLayout {};
INSTANTIATE_TEST_SUITE_P(Subjects, CheckpointSameLayout, ::testing::ValuesIn(every_nth(2, cases())),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Subjects, CheckpointSameLayoutWide,
                         ::testing::ValuesIn(all_but_every_nth(2, cases())), case_name);

// Parameters, masters, moments, losses, norms, rates, masks, sample ids, gradients, activations:
// every record of every rank.
void expect_goes_on_bit_by_bit(const Case& whole) {
  const TestFolder folder;
  const Trace uninterrupted = run_alone(saved_to(whole, folder.path()));
  const Case item = resumed_case(whole, folder.path());
  ASSERT_EQ(item.first_step(), kStepsSaved);

  const Trace resumed = run_alone(item);

  ASSERT_EQ(static_cast<int>(resumed.ranks.size()), item.world_size());
  const RunEquality equality = equality_of(from_step(uninterrupted, kStepsSaved), resumed);
  EXPECT_EQ(equality.difference, "");
  EXPECT_GT(equality.tensors, 300);
}

TEST_P(CheckpointSameLayout, GoesOnBitByBitInNewProcesses) {
  expect_goes_on_bit_by_bit(GetParam());
}
TEST_P(CheckpointSameLayoutWide, GoesOnBitByBitInNewProcesses) {
  expect_goes_on_bit_by_bit(GetParam());
}

// The plain reference resumes, too; its own world has one rank.
TEST(CheckpointSameLayout, OfTheReferenceGoesOnBitByBit) {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
    const TestFolder folder;
    Case item = long_case("ddp", {}, dtype, "gpt2");
    const Reference whole = make_reference(item, {.responses = 0});
    run_alone(saved_to(item, folder.path()));

    const Reference resumed = make_reference(resumed_case(item, folder.path()), {.responses = 0});

    const RunEquality equality =
        equality_of(from_step(whole.trace(), kStepsSaved), resumed.trace());
    EXPECT_EQ(equality.difference, "");
    EXPECT_GT(equality.tensors, 300);
  }
}

TEST(CheckpointSameLayout, WithoutTheOptimizersStateIsAnotherRun) {
  const TestFolder folder;
  const Case start = long_case("autotp", {.dp = 2, .tp = 2});
  const Trace uninterrupted = run_alone(saved_to(start, folder.path()));
  RunOptions forgetful = keeping(Keep::kNothing);
  forgetful.edits.parts = [](TrainerParts& parts, Mesh&) {
    struct Forgets final : CheckpointIo {
      void read(const Checkpoint&, std::string_view, const Layout&, const Mesh&,
                at::Tensor) const override {}
    };
    parts.checkpoint_io = std::make_unique<Forgets>();
  };

  const Trace resumed = run_case(resumed_case(start, folder.path()), Reference(), forgetful);

  EXPECT_THAT(equality_of(from_step(uninterrupted, kStepsSaved), resumed).difference,
              ::testing::HasSubstr("exp_avg"));
}

// Equal runs write equal files, and a run may be saved and resumed time and again.
TEST(CheckpointSameLayout, OfEqualRunsHaveEqualBytes) {
  const TestFolder first, second;
  const Case item = long_case("autotp", {.dp = 2, .tp = 2});

  run_alone(saved_to(item, first.path()));
  run_alone(saved_to(item, second.path()));

  EXPECT_EQ(first.num_entries(), 3);  // two tp ranks hold all; dp rank 1 has copies
  for (const auto& entry : std::filesystem::directory_iterator(first.path())) {
    EXPECT_EQ(content_of(entry.path()), content_of(second / entry.path().filename()))
        << entry.path();
  }
}

class CheckpointEmulated : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    Subjects, CheckpointEmulated,
    ::testing::Values(zero(long_case("autotp", {.dp = 3, .tp = 2}, Dtype::kBFloat16), 2),
                      long_case("fsdp_tp", {.dp = 3, .tp = 2}),
                      megatron_case(Dtype::kBFloat16, true, "megatron_gpt")),
    case_name);

// The emulated reference reads the checkpoint by its own slicing.
TEST_P(CheckpointEmulated, ResumesToTheBitsOfTheSubject) {
  const TestFolder folder;
  run_alone(saved_to(GetParam(), folder.path()));
  const Case item = resumed_case(GetParam(), folder.path());
  const Trace emulated = emulate(item, numerics_of(item));

  const Trace actual = run_alone(item);

  ASSERT_EQ(static_cast<int>(actual.ranks.size()), item.degrees.dp * item.degrees.tp);
  EXPECT_EQ(first_difference(emulated, actual), "");
}

}  // namespace
}  // namespace isoshard
