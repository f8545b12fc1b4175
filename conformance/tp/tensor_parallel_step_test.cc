// SPDX-License-Identifier: Apache-2.0
// A training step on a dp x tp mesh is the single process's step.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "core/tensor/convert.h"
#include "harness/fault/collective_fault.h"
#include "harness/judge/judge.h"
#include "harness/testing/is_cause.h"
#include "harness/testing/run_world.h"
#include "harness/verdict/verdict.h"
#include "suite/record/batches.h"
#include "suite/record/call_counts.h"
#include "suite/record/make_subject.h"
#include "suite/testing/every_nth.h"
#include "suite/testing/step_cases.h"

namespace isoshard {
namespace {

constexpr Degrees kMeshes[] = {
    {.dp = 2}, {.tp = 2}, {.dp = 2, .tp = 2}, {.dp = 3, .tp = 2}, {.dp = 2, .tp = 3}};

std::vector<Case> step_cases() {
  std::vector<Case> cases;
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16}) {
    for (const Degrees& mesh : kMeshes) cases.push_back(step_case("autotp", mesh, dtype));
  }
  Case unequal = step_case("autotp", {.dp = 3, .tp = 2});
  unequal.data.unequal_labels = true;
  cases.push_back(unequal);
  unequal.settings.loss_mean = LossMean::kLocal;
  cases.push_back(unequal);
  Case odd = step_case("autotp", {.dp = 2, .tp = 3});
  odd.batch_size = 1;
  odd.seq_length = 13;
  cases.push_back(odd);
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16}) {
    Case accumulated = step_case("autotp", {.dp = 2, .tp = 3}, dtype);
    accumulated.micro_batches = 2;
    accumulated.data.unequal_labels = true;
    accumulated.settings.loss_mean =
        dtype == Dtype::kFloat32 ? LossMean::kLocal : LossMean::kGlobal;
    cases.push_back(accumulated);
  }
  Case adamw = step_case("autotp", {.dp = 2, .tp = 2});
  adamw.settings.optimizer = OptimizerSettings{};
  adamw.steps = 2;
  cases.push_back(adamw);
  Case sdpa = step_case("autotp", {.dp = 2, .tp = 3}, Dtype::kBFloat16);
  sdpa.attention = AttentionImpl::kSdpa;
  cases.push_back(sdpa);
  return cases;
}

std::vector<Case> tied_cases() {
  std::vector<Case> cases;
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16}) {
    for (const Degrees& mesh : {Degrees{.tp = 2}, {.dp = 3, .tp = 2}, {.dp = 2, .tp = 3}})
      cases.push_back(with_tied_head(step_case("autotp", mesh, dtype)));
  }
  return cases;
}

// tp above the number of kv heads: 8 heads on 2 at tp 4, 6 heads on 1 at tp 2 and 3.
std::vector<Case> kv_replica_cases() {
  std::vector<Case> cases;
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16}) {
    cases.push_back(with_heads(step_case("autotp", {.tp = 4}, dtype), 8, 2));
    cases.push_back(with_heads(step_case("autotp", {.dp = 2, .tp = 4}, dtype), 8, 2));
    cases.push_back(with_heads(step_case("autotp", {.dp = 3, .tp = 2}, dtype), 6, 1));
    cases.push_back(with_heads(step_case("autotp", {.dp = 2, .tp = 3}, dtype), 6, 1));
  }
  Case odd = with_heads(step_case("autotp", {.dp = 3, .tp = 2}), 6, 1);
  odd.batch_size = 1;
  odd.seq_length = 13;
  odd.micro_batches = 2;
  odd.data.unequal_labels = true;
  cases.push_back(odd);
  Case adamw = with_heads(step_case("autotp", {.tp = 4}), 8, 2);
  adamw.settings.optimizer = OptimizerSettings{};
  adamw.steps = 2;
  cases.push_back(adamw);
  return cases;
}

// q and k norms; fused, transposed and biased layers with learned positions; biases on every
// row-parallel layer.
std::vector<Case> architecture_cases() {
  std::vector<Case> cases;
  for (const char* const model_type : {"qwen3", "gpt2", "megatron_gpt"}) {
    for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16}) {
      for (const Degrees& mesh :
           {Degrees{.tp = 2}, {.dp = 2, .tp = 2}, {.dp = 3, .tp = 2}, {.dp = 2, .tp = 3}}) {
        cases.push_back(step_case("autotp", mesh, dtype, model_type));
      }
    }
  }
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16}) {
    cases.push_back(with_biases(step_case("autotp", {.dp = 2, .tp = 3}, dtype, "llama")));
    cases.push_back(with_biases(step_case("autotp", {.dp = 3, .tp = 2}, dtype, "qwen3")));
  }
  // kv heads on several ranks, each with its part of the norm's gradient.
  cases.push_back(
      with_heads(step_case("autotp", {.dp = 2, .tp = 4}, Dtype::kFloat32, "qwen3"), 8, 2));
  cases.push_back(
      with_heads(step_case("autotp", {.dp = 2, .tp = 3}, Dtype::kFloat64, "qwen3"), 6, 1));
  for (const char* const model_type : {"qwen3", "gpt2"}) {
    Case odd = step_case("autotp", {.dp = 2, .tp = 3}, Dtype::kFloat32, model_type);
    odd.batch_size = 1;
    odd.seq_length = 13;
    odd.micro_batches = 2;
    odd.data.unequal_labels = true;
    cases.push_back(odd);
  }
  return cases;
}

class TensorParallelStep : public ::testing::TestWithParam<Case> {};

TEST_P(TensorParallelStep, MatchesSingleProcess) {
  expect_matches_single_process(GetParam());
}

// The other cases of the same kinds.
class TensorParallelStepWide : public ::testing::TestWithParam<Case> {};
TEST_P(TensorParallelStepWide, MatchesSingleProcess) {
  expect_matches_single_process(GetParam());
}

std::vector<Case> all_cases() {
  std::vector<Case> all = step_cases();
  for (const auto& more : {tied_cases(), architecture_cases(), kv_replica_cases()})
    all.insert(all.end(), more.begin(), more.end());
  return all;
}
INSTANTIATE_TEST_SUITE_P(Cases, TensorParallelStep, ::testing::ValuesIn(every_nth(3, all_cases())),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Cases, TensorParallelStepWide,
                         ::testing::ValuesIn(all_but_every_nth(3, all_cases())), case_name);

TEST(TensorParallelRanks, HoldOnlyTheirShare) {
  const Case item = step_case("autotp", {.dp = 2, .tp = 3});

  const Trace trace = run_case(item, reference_of(item));

  for (int rank = 0; rank < 6; ++rank) {
    EXPECT_EQ(
        record_of(trace, rank, {0, RecordKind::kParam, "model.layers.0.mlp.up_proj.weight", 0})
            .local_shape,
        (Shape{32, 48}));
    EXPECT_EQ(
        record_of(trace, rank, {0, RecordKind::kParam, "model.layers.0.mlp.down_proj.weight", 0})
            .local_shape,
        (Shape{48, 32}));
    EXPECT_EQ(
        record_of(trace, rank, {0, RecordKind::kParam, "model.layers.0.self_attn.q_proj.bias", 0})
            .local_shape,
        (Shape{16}));
    EXPECT_EQ(record_of(trace, rank, {0, RecordKind::kParam, "model.norm.weight", 0}).local_shape,
              (Shape{48}));
  }
}

TEST(TensorParallelRanks, OfADpCoordinateSeeTheSameSamples) {
  const Case item = step_case("autotp", {.dp = 2, .tp = 3});
  RunOptions options;
  options.keep = Keep::kEverything;

  const Trace trace = run_case(item, reference_of(item), options);

  for (int rank = 0; rank < 6; ++rank) {
    const at::Tensor ids = tensor_of(trace.ranks[static_cast<std::size_t>(rank)].tensor(
        record_of(trace, rank, {0, RecordKind::kDataId, "sample_ids", 0})));
    EXPECT_EQ(ids[0].item<std::int64_t>(), 2 * (rank / 3)) << "rank " << rank;
  }
}

TEST(TensorParallelRanks, OfAWorldOfOneGiveTheBitsOfTheReference) {
  for (const char* const type : {"qwen2", "gpt2", "megatron_gpt"}) {
    for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16}) {
      const Case item = step_case("autotp", {}, dtype, type);
      const Reference& reference = reference_of(item);

      const Trace trace = run_case(item, reference);

      ASSERT_EQ(trace.ranks.size(), 1U);
      EXPECT_TRUE(is_bit_equal(reference, trace)) << item.slug();
    }
  }
}

TEST(TensorParallelRanks, HoldEqualCopiesOfAKvHead) {
  const Case item = with_heads(step_case("autotp", {.tp = 4}), 8, 2);

  const Trace trace = run_case(item, reference_of(item));

  for (const int call : {0, 1}) {
    const RecordKey key{0, RecordKind::kParam, "model.layers.1.self_attn.k_proj.weight", call};
    std::vector<std::uint64_t> digests;
    for (int rank = 0; rank < 4; ++rank) {
      const Record& record = record_of(trace, rank, key);
      EXPECT_EQ(record.local_shape, (Shape{8, 48}));
      EXPECT_EQ(record.layout.global_shape, (Shape{16, 48}));
      digests.push_back(record.parts.at(0).digest);
    }
    EXPECT_EQ(digests[0], digests[1]);
    EXPECT_EQ(digests[2], digests[3]);
    EXPECT_NE(digests[0], digests[2]);
  }
}

// Each holder of a kv head gives a part of its gradient: without some, MatchesSingleProcess must
// fail.
TEST(TensorParallelRanks, ThatLoseTheirShareOfAKeyGradientDiverge) {
  const Case item = with_heads(step_case("autotp", {.tp = 4}), 8, 2);
  const Reference& reference = reference_of(item);
  RunOptions options;
  options.mutation = [](int rank) {
    return [rank](const Site& site, at::Tensor value) {
      const bool is_copy = site.kind == RecordKind::kActivationGrad &&
                           site.name.ends_with("k_rope") && rank % 2 == 1;
      return is_copy ? at::zeros_like(value) : value;
    };
  };

  EXPECT_THAT(run_case(item, reference, options),
              ::testing::Not(conforms_to(reference, policy_of(item))));
}

// A norm over heads is whole on every rank, but a rank's gradient of it holds its own heads only.
TEST(TensorParallelRanks, ThatKeepTheirOwnNormGradientDiverge) {
  const Case item = step_case("autotp", {.dp = 3, .tp = 2}, Dtype::kFloat32, "qwen3");
  const Reference& reference = reference_of(item);
  RunOptions options;
  options.decorate = [](std::unique_ptr<Communicator> inner, int) {
    const auto lost = skip_segments([](const CallInfo& info, const Segment* segment) {
      return info.purpose == Purpose::kGradReduce && info.axis == Axis::kTp && segment != nullptr &&
             segment->param_class == ParamClass::kQkNorm;
    });
    return decorate_with_fault(std::move(inner), lost, FaultProbe());
  };

  const Verdict verdict = judge(reference, run_case(item, reference, options), policy_of(item));

  ASSERT_EQ(verdict.status, Status::kDiverges);
  EXPECT_EQ(verdict.findings.front().stage, Stage::kParameterGrad);
  EXPECT_THAT(verdict.findings.front().key.name,
              ::testing::AnyOf(::testing::HasSubstr("q_norm"), ::testing::HasSubstr("k_norm")));
  EXPECT_THAT(verdict.findings.front().cause,
              IsCause(CauseId::kRankLocalPartial, {{"axis", "tp"}}));
}

// The summands are recorded when asked for, change no bit, and a bias in each of them is seen.
TEST(TensorParallelRanks, RecordTheirSummandsOfRowParallelLayers) {
  Case item = step_case("autotp", {.dp = 2, .tp = 3}, Dtype::kFloat32, "gpt2");
  const Reference& reference = reference_of(item);
  const std::string point = "transformer.h.0.attn.c_proj";
  const auto digest = [](const Trace& trace, const std::string& name) {
    return record_of(trace, 1, {0, RecordKind::kActivation, name, 0}).parts.at(0).digest;
  };
  const Trace silent = run_case(item, reference);
  item.settings.record_partials = true;
  RunOptions kept;
  kept.keep = Keep::kEverything;

  const Trace trace = run_case(item, reference, kept);

  EXPECT_THAT(trace, conforms_to(reference, policy_of(item)));
  EXPECT_EQ(silent.ranks.at(1).find({0, RecordKind::kActivation, point + ".partial", 0}), nullptr);
  EXPECT_EQ(digest(trace, point), digest(silent, point));
  EXPECT_EQ(digest(trace, "lm_head"), digest(silent, "lm_head"));
  // The summands of all ranks and the bias are the output.
  const at::Tensor sum =
      tensor_of(trace.assemble({0, RecordKind::kActivation, point + ".partial", 0}))
          .to(at::kDouble);
  const at::Tensor bias =
      tensor_of(trace.assemble({0, RecordKind::kParam, point + ".bias", 0})).to(at::kDouble);
  const at::Tensor whole =
      tensor_of(trace.assemble({0, RecordKind::kActivation, point, 0})).to(at::kDouble);
  EXPECT_LT((sum + bias - whole).abs().max().item<double>(), 1e-6);
}

TEST(TensorParallelRanks, ThatEachAddTheRowBiasDiverge) {
  Case item = step_case("autotp", {.dp = 2, .tp = 3}, Dtype::kFloat32, "gpt2");
  item.settings.record_partials = true;
  const Reference& reference = reference_of(item);
  RunOptions options;
  options.mutation = [](int rank) -> TapMutation {
    return [rank](const Site& site, at::Tensor value) {
      const bool hit = site.kind == RecordKind::kActivation &&
                       site.name == "transformer.h.0.attn.c_proj.partial" && rank % 3 != 0;
      return hit ? value + 0.1 : value;
    };
  };

  const Verdict verdict = judge(reference, run_case(item, reference, options), policy_of(item));

  ASSERT_EQ(verdict.status, Status::kDiverges);
  EXPECT_EQ(verdict.findings.front().key.name, "transformer.h.0.attn.c_proj");
}

TEST(TensorParallelRanks, NeedADegreeThatDividesTheModel) {
  using ::testing::AllOf;
  using ::testing::HasSubstr;
  using ::testing::ThrowsMessage;
  const Case item = step_case("autotp", {.tp = 4});

  EXPECT_THAT([&] { (void)run_case(item, Reference()); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("tp 4"), HasSubstr("6 attention heads"),
                                              HasSubstr("6 kv heads"))));
}

// A weight that fuses q, k and v by kv group cannot give a part of a group, so no kv head can be
// copied out of it.
TEST(TensorParallelRanks, CannotShareAKvGroupOfAFusedWeight) {
  using ::testing::AllOf;
  using ::testing::HasSubstr;
  using ::testing::ThrowsMessage;
  const Case item =
      with_heads(step_case("autotp", {.tp = 4}, Dtype::kFloat32, "megatron_gpt"), 8, 2);

  EXPECT_THAT([&] { (void)run_case(item, Reference()); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("tp 4"), HasSubstr("2 units of 48 rows"),
                                              HasSubstr("linear_qkv.weight"))));
}

// Ranks numbered with tp as the slow axis; no arithmetic is declared for that.
TEST(TensorParallelRanks, MayBeNumberedWithTpAsTheSlowAxis) {
  Case item = step_case("autotp", {.dp = 2, .tp = 3});
  item.mesh_order = {Axis::kTp, Axis::kDp};

  const Trace trace = run_case(item, reference_of(item));

  EXPECT_THAT(trace, conforms_to(reference_of(item), policy_of(item)));
  const RecordKey key{0, RecordKind::kParam, "model.layers.0.mlp.up_proj.weight", 0};
  EXPECT_EQ(record_of(trace, 0, key).parts.at(0).box, record_of(trace, 1, key).parts.at(0).box);
  EXPECT_NE(record_of(trace, 0, key).parts.at(0).box, record_of(trace, 2, key).parts.at(0).box);
  EXPECT_THAT([&] { (void)numerics_of(item); },
              ::testing::ThrowsMessage<UsageError>(::testing::HasSubstr("slow axis")));
}

TEST(TensorParallelCollectives, OfCopiedKvHeadsAreOneMoreGradientReductionOverTp) {
  const Case item = with_heads(step_case("autotp", {.tp = 4}), 8, 2);

  const auto calls = run_world(4, [item](Rank& rank) {
    EXPECT_EQ(rank.size(), 4);
    const auto counts = std::make_shared<CallCounts>();
    CountedRank counted(rank, counts);
    const std::unique_ptr<Subject> subject = make_subject(item, counted, nullptr);
    subject->setup();
    subject->train_step(batches_of(item, CaseData(item), rank.rank(), 0));
    return std::vector<std::int64_t>{
        (*counts)[{CollectiveOp::kAllReduce, Purpose::kGradReduce, Axis::kTp}],
        (*counts)[{CollectiveOp::kAllReduce, Purpose::kGradReduce, Axis::kDp}],
        count_of(*counts, Purpose::kColumnParallelBackward)};
  });

  EXPECT_THAT(calls, ::testing::Each(::testing::ElementsAre(1, 1, 10)));
}

TEST(TensorParallelCollectives, AreOnePerLayerAndDirection) {
  const Case item = step_case("autotp", {.dp = 2, .tp = 3});

  const auto calls = run_world(6, [item](Rank& rank) {
    EXPECT_EQ(rank.size(), 6);
    const auto counts = std::make_shared<CallCounts>();
    CountedRank counted(rank, counts);
    const std::unique_ptr<Subject> subject = make_subject(item, counted, nullptr);
    subject->setup();
    subject->train_step(batches_of(item, CaseData(item), rank.rank(), 0));
    return std::vector<std::int64_t>{
        count_of(*counts, Purpose::kRowParallelForward),
        count_of(*counts, Purpose::kColumnParallelBackward),
        count_of(*counts, Purpose::kClipNorm),
        count_of(*counts, Purpose::kGradReduce),
        (*counts)[{CollectiveOp::kAllReduce, Purpose::kGradReduce, Axis::kDp}],
        count_of(*counts, Purpose::kTokenCount)};
  });

  // 2 layers: o_proj and down_proj forward; q, k, v, gate and up backward.
  ASSERT_EQ(calls.size(), 6U);
  EXPECT_THAT(calls, ::testing::Each(::testing::ElementsAre(4, 10, 1, 1, 1, 1)));
}

}  // namespace
}  // namespace isoshard
