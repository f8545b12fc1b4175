// SPDX-License-Identifier: Apache-2.0
// A checkpoint of one mesh and subject goes on in every other
// one: right after loading it holds what was saved, and its steps conform to the single process
// that resumes from it.
#include <ATen/ATen.h>

#include <set>

#include "core/tensor/convert.h"
#include "subjects/checkpoint/checkpoint.h"
#include "suite/testing/checkpoint_cases.h"
#include "suite/testing/every_nth.h"
#include "suite/testing/nd_cases.h"

namespace isoshard {
namespace {

Case tp2_dp2(Dtype dtype = Dtype::kFloat32) {
  Case item = four_head_case({.dp = 2, .tp = 2}, dtype);
  const Case usual = long_case("autotp", {.dp = 2, .tp = 2}, dtype);
  item.steps = kSteps;
  item.settings = usual.settings;
  item.settings.zero_stage = 1;
  return item;
}

Case on(Case item, std::string subject, const Degrees& degrees,
        const std::function<void(Case&)>& change = {}) {
  item.subject = std::move(subject);
  item.degrees = degrees;
  item.settings.zero_stage = 0;
  if (change) change(item);
  return item;
}

struct Target {
  std::string name;
  std::function<Case(const Case& source)> of;
};

void PrintTo(const Target& target, std::ostream* out) {
  *out << target.name;
}

std::vector<Target> targets() {
  const auto zero2 = [](Case& c) { c.settings.zero_stage = 2; };
  const auto distributed = [](Case& c) {
    c.settings.sequence_parallel = c.settings.distributed_optimizer = true;
    c.settings.make_vocab_size_divisible_by = 8;
  };
  const auto stages = [](Case& c) {
    c.micro_batches = 2;
    c.seq_length = 24;
  };
  const auto zero_bubble = [=](Case& c) {
    stages(c);
    c.settings.nd.pipeline_schedule = "InterleavedZeroBubble";
    c.settings.nd.dp_replicate = 2;
  };
  return {{"autotp_tp1", [](const Case& c) { return on(c, "autotp", {}); }},
          {"autotp_tp4", [](const Case& c) { return on(c, "autotp", {.tp = 4}); }},
          {"ddp_dp3", [](const Case& c) { return on(c, "ddp", {.dp = 3}); }},
          {"autotp_dp3_z2", [=](const Case& c) { return on(c, "autotp", {.dp = 3}, zero2); }},
          {"autotp_tp2_dp3_z2",
           [=](const Case& c) { return on(c, "autotp", {.dp = 3, .tp = 2}, zero2); }},
          {"fsdp_tp_tp2_dp3", [](const Case& c) { return on(c, "fsdp_tp", {.dp = 3, .tp = 2}); }},
          {"fsdp_tp_tp2_dp2", [](const Case& c) { return on(c, "fsdp_tp", {.dp = 2, .tp = 2}); }},
          {"megatron_tp2_dp2", [](const Case& c) { return on(c, "megatron", {.dp = 2, .tp = 2}); }},
          {"megatron_tp2_dp3_sp_dopt",
           [=](const Case& c) { return on(c, "megatron", {.dp = 3, .tp = 2}, distributed); }},
          {"nd_pp2_cp2_dp2",
           [=](const Case& c) { return on(c, "nd", {.pp = 2, .dp = 2, .cp = 2}, stages); }},
          {"nd_pp2_tp2_rep2",
           [=](const Case& c) { return on(c, "nd", {.pp = 2, .dp = 2, .tp = 2}, zero_bubble); }}};
}

/// How many tensors of state behind a step were compared; each must be the other run's bit by bit,
/// put together.
int compared_states(const Trace& saved, const Trace& loaded, int step) {
  std::set<RecordKey> keys;  // stages of a pipeline have their own
  for (const RankTrace& rank : loaded.ranks) {
    for (const Record& record : rank.records) {
      const RecordKind kind = record.key.kind;
      if (record.key.step == step && (kind == RecordKind::kParam || kind == RecordKind::kOptimizer))
        keys.insert(record.key);
    }
  }
  for (const RecordKey& key : keys) {
    const at::Tensor expected = tensor_of(saved.assemble(key)),
                     actual = tensor_of(loaded.assemble(key));
    EXPECT_EQ(expected.scalar_type(), actual.scalar_type()) << describe(key);
    EXPECT_TRUE(at::equal(expected, actual)) << describe(key);
  }
  return static_cast<int>(keys.size());
}

/// What it loads is what was saved, in more than `least` tensors, and the steps that follow
/// conform.
void expect_goes_on_from(const Trace& saved, const Case& item, int least) {
  const Trace state = run_alone(item, Keep::kEverything);

  EXPECT_GT(compared_states(saved, state, kStepsSaved - 1), least);
  const Reference& reference = reference_of(item);
  EXPECT_THAT(run_case(item, reference), conforms_to(reference, policy_of(item)));
}

class CheckpointOtherLayout : public ::testing::TestWithParam<Target> {
 protected:
  struct Saved {
    TestFolder folder;
    Case source;
    Trace run;
  };
  static std::map<Dtype, Saved>& all_saved() {
    static std::map<Dtype, Saved> all;
    return all;
  }
  static void TearDownTestSuite() { all_saved().clear(); }
  static const Saved& saved(Dtype dtype) {
    Saved& one = all_saved()[dtype];
    if (one.run.ranks.empty()) {
      one.source = tp2_dp2(dtype);
      one.run = run_alone(saved_to(one.source, one.folder.path()), Keep::kEverything);
    }
    return one;
  }
  static void expect_holds_what_was_saved() {
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
      const Saved& from = saved(dtype);
      ASSERT_EQ(from.run.ranks.size(), 4U);
      const Case item = resumed_case(GetParam().of(from.source), from.folder.path());

      const int num_states = dtype == Dtype::kFloat32 ? 3 : 4;  // moments and parameter; master
      expect_goes_on_from(from.run, item, num_states * 20);
    }
  }
};
class CheckpointOtherLayoutWide : public CheckpointOtherLayout {};
const auto name_of_target = [](const auto& test) { return test.param.name; };
INSTANTIATE_TEST_SUITE_P(Targets, CheckpointOtherLayout,
                         ::testing::ValuesIn(every_nth(2, targets())), name_of_target);
INSTANTIATE_TEST_SUITE_P(Targets, CheckpointOtherLayoutWide,
                         ::testing::ValuesIn(all_but_every_nth(2, targets())), name_of_target);

TEST_P(CheckpointOtherLayout, HoldsWhatWasSavedAndConforms) {
  expect_holds_what_was_saved();
}
TEST_P(CheckpointOtherLayoutWide, HoldsWhatWasSavedAndConforms) {
  expect_holds_what_was_saved();
}

// Megatron's fused, sequence-parallel, bucket-cut state goes back to plain replicas.
TEST(CheckpointOtherLayout, OfMegatronIsReadByDdp) {
  const TestFolder folder;
  Case source = on(tp2_dp2(Dtype::kBFloat16), "megatron", {.dp = 2, .tp = 2});
  source.settings.sequence_parallel = source.settings.distributed_optimizer = true;
  const Trace run = run_alone(saved_to(source, folder.path()), Keep::kEverything);
  Case target = on(source, "ddp", {.dp = 2});
  target.settings.sequence_parallel = target.settings.distributed_optimizer = false;
  const Case item = resumed_case(target, folder.path());

  expect_goes_on_from(run, item, 80);
}

TEST(CheckpointOtherLayout, OfMomentumAndATiedHeadOnAnOddVocabulary) {
  const TestFolder folder;
  Case source = with_tied_head(with_vocabulary(tp2_dp2(), 97));
  source.settings.optimizer = verify_settings().optimizer;
  source.settings.make_vocab_size_divisible_by = 16;
  const Trace run = run_alone(saved_to(source, folder.path()), Keep::kEverything);
  const Case item = resumed_case(on(source, "fsdp_tp", {.dp = 3},
                                    [](Case& c) { c.settings.make_vocab_size_divisible_by = 0; }),
                                 folder.path());

  expect_goes_on_from(run, item, 40);
}

// fp32 masters become fp32 parameters.
TEST(CheckpointOtherLayout, OfMastersFeedsParametersOfTheirDtype) {
  const TestFolder folder;
  const Trace run =
      run_alone(saved_to(tp2_dp2(Dtype::kBFloat16), folder.path()), Keep::kEverything);
  Case target = on(tp2_dp2(), "autotp", {.dp = 2, .tp = 2});
  const Case item = resumed_case(target, folder.path());

  const Trace state = run_alone(item, Keep::kEverything);

  int compared = 0;
  for (const Record& record : state.ranks.front().records) {
    if (record.key.step != kStepsSaved - 1 || record.key.kind != RecordKind::kParam) continue;
    const RecordKey master{kStepsSaved - 1, RecordKind::kOptimizer, record.key.name + ".master", 0};
    EXPECT_TRUE(at::equal(tensor_of(run.assemble(master)), tensor_of(state.assemble(record.key))))
        << describe(record.key);
    ++compared;
  }
  EXPECT_GT(compared, 20);
}

// The masks of the resumed run are those of the checkpoint's seed, whatever the case's own seed is.
TEST(CheckpointOtherLayout, CarriesTheRandomStreams) {
  const TestFolder folder;
  const Case source = long_case("autotp", {.dp = 2, .tp = 2}, Dtype::kFloat32, "gpt2");
  const Trace run = run_alone(saved_to(source, folder.path()), Keep::kEverything);
  Case target = on(source, "megatron", {.dp = 2, .tp = 3});
  target.seed = source.seed + 1;
  const Case item = resumed_case(target, folder.path());

  const Trace resumed = run_alone(item, Keep::kEverything);

  int compared = 0;
  for (const Record& record : resumed.ranks.front().records) {
    if (record.key.kind != RecordKind::kMask) continue;
    EXPECT_TRUE(
        at::equal(tensor_of(run.assemble(record.key)), tensor_of(resumed.assemble(record.key))))
        << describe(record.key);
    ++compared;
  }
  EXPECT_GT(compared, 20);
}

// Stages on a V, context and replicas go back to one process, and to replicas of the whole model.
TEST(CheckpointOtherLayout, OfAPipelineIsReadByReplicas) {
  const TestFolder folder;
  Case source = in_pipeline(long_case("nd", {.pp = 2, .dp = 2, .cp = 2}), 2, "ZBVZeroBubble");
  source.seq_length = 24;
  source.settings.nd.dp_replicate = 2;
  const Trace run = run_alone(saved_to(source, folder.path()), Keep::kEverything);
  ASSERT_EQ(run.ranks.size(), 8U);
  for (const Degrees& degrees : {Degrees{.dp = 2}, Degrees{}}) {
    Case target = on(source, "ddp", degrees);
    target.settings.nd = {};

    expect_goes_on_from(run, resumed_case(target, folder.path()), 3 * 20);
  }
}

class CheckpointSeed : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    Subjects, CheckpointSeed,
    ::testing::Values(long_case("ddp", {.dp = 3}),
                      long_case("autotp", {.dp = 3, .tp = 2}, Dtype::kBFloat16),
                      long_case("fsdp_tp", {.dp = 3, .tp = 2}),
                      long_case("megatron", {.dp = 2, .tp = 2}, Dtype::kBFloat16),
                      in_pipeline(long_case("nd", {.pp = 2, .dp = 3}))),
    case_name);

// Written by one process before its first step. The run from it is the run that draws the same
// weights.
TEST_P(CheckpointSeed, OfOneProcessFeedsEverySubject) {
  const TestFolder folder;
  run_alone(with(saved_to(GetParam(), folder.path(), 0), [](Case& c) {
    c.subject = "autotp";
    c.degrees = {};
    c.settings.nd = {};
    c.steps = 1;
    c.settings.schedule = {};
  }));
  const Case item = resumed_case(GetParam(), folder.path());
  ASSERT_EQ(Checkpoint::open(folder.path()).world_size(), 1);
  ASSERT_EQ(item.first_step(), 0);

  const Trace seeded = run_alone(item);

  const RunEquality equality = equality_of(run_alone(GetParam()), seeded);
  EXPECT_EQ(equality.difference, "");
  EXPECT_GT(equality.tensors, 600);
}

}  // namespace
}  // namespace isoshard
