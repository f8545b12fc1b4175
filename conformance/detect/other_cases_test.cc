// SPDX-License-Identifier: Apache-2.0
/// Faults on other cases than their smallest ones: one that does nothing there does not count as
/// fired, and one that does is alarmed where it acts first, with its cause.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "fixtures/cases/world_size.h"
#include "harness/judge/judge.h"
#include "suite/faults/catalogue.h"
#include "suite/faults/fault.h"
#include "suite/record/expected_calls.h"
#include "suite/reference/reference.h"

namespace isoshard {
namespace {

struct Outcome {
  Verdict verdict;
  std::int64_t fired = 0;
};

Outcome outcome_of(const Fault& fault, const Case& item) {
  const FaultProbe probe;
  const Reference& reference = reference_of(item);
  // A call of another group that gives the same values is no fault but for those of calls.
  const bool shows_in_calls = fault.expected->stage == Stage::kCollectives;
  Verdict verdict =
      judge(reference, run_case(item, reference, with_fault({}, fault, item, probe)),
            shows_in_calls ? with_collectives(policy_of(item), item) : policy_of(item));
  return {std::move(verdict), probe.count()};
}

/// The fault's smallest case on `subject`, changed.
Case changed_case(std::string_view id, std::string_view subject,
                  const std::function<void(Case&)>& change) {
  Case item = find_fault(id).smallest_case();
  item.subject = subject;
  change(item);
  return item;
}

/// The odd shapes of a user's own models: 3 layers, heads and widths that are no powers of 2, a
/// tied head of an odd vocabulary.
void make_odd(Case& item) {
  item.config.hidden_size = 40;
  item.config.num_heads = 4;
  item.config.num_kv_heads = 2;
  item.config.head_dim = 10;
  item.config.intermediate_size = 44;
  item.config.num_layers = 3;
  item.config.vocab_size = 89;
  item.config.tie_word_embeddings = true;
  item.model_name += "_odd";
}

using Change = std::function<void(Case&)>;

Change zero(int stage, int micro_batches) {
  return [=](Case& item) {
    item.settings.zero_stage = stage;
    item.micro_batches = micro_batches;
  };
}

Change on_mesh(
    const Degrees& degrees, const Change& then = [](Case&) {}) {
  return [=](Case& item) {
    item.degrees = degrees;
    then(item);
  };
}

Change odd(const Change& then) {
  return [=](Case& item) {
    make_odd(item);
    then(item);
  };
}

/// The layers of a Llama with a bias each.
Change biased(const Change& then) {
  return [=](Case& item) {
    const TrainSettings settings = item.settings;
    item = fault_case("llama", item.subject, {});
    item.settings = settings;
    item.config.qkv_bias = item.config.attention_out_bias = item.config.mlp_bias = true;
    item.model_name += "_biased";
    then(item);
  };
}

Change of_type(std::string_view model_type, const Degrees& degrees) {
  return [=](Case& item) {
    const TrainSettings settings = item.settings;
    item = fault_case(model_type, item.subject, degrees);
    item.settings = settings;
  };
}

Change clipped_after(const Change& change) {
  return [=](Case& item) {
    change(item);
    item = clipped(item);
  };
}

struct Elsewhere {
  std::string name;  ///< of the test
  std::string fault, subject;
  std::function<void(Case&)> change;
  std::string tensor = {};  ///< of the first finding
  ExpectedCause cause = {};
};
std::ostream& operator<<(std::ostream& out, const Elsewhere& elsewhere) {
  return out << elsewhere.name;
}

// What a fault needs is missing: the run does not diverge, and nobody may take that for a fault
// that was not seen. A run without steps is vacuous.
class IdleFault : public ::testing::TestWithParam<Elsewhere> {};

TEST_P(IdleFault, DoesNotCountAsFired) {
  const Case item = changed_case(GetParam().fault, GetParam().subject, GetParam().change);

  const Outcome outcome = outcome_of(find_fault(GetParam().fault), item);

  EXPECT_EQ(outcome.verdict.mesh.world_size(), item.world_size());
  EXPECT_TRUE(outcome.verdict.status == Status::kConforms ||
              outcome.verdict.rule.id == RuleId::kNothingMoved)
      << outcome.verdict.reason;
  EXPECT_EQ(outcome.fired, 0);
}

std::vector<Elsewhere> idle_faults() {
  // every update rounds away
  const auto tiny_rate = [](Case& item) { item.settings.optimizer.learning_rate = 1e-30; };
  return {
      {"AveragedOverTpOfOne", "averaged_over_tp_too", "autotp", on_mesh({.dp = 2})},
      {"OneMicroBatch", "micro_batch_average_missing", "autotp",
       [](Case& item) { item.micro_batches = 1; }},
      {"EqualTokenCounts", "mean_of_rank_means", "ddp",
       [](Case& item) { item.data.unequal_labels = false; }},
      {"OneBucket", "bucket_refilled_before_reduce_ends", "ddp",
       [](Case& item) { item.settings.bucket_bytes = 25 << 20; }},
      {"NothingToAverageOver", "last_micro_batch_not_averaged", "autotp", on_mesh({.tp = 2})},
      {"VocabularyWithoutPadding", "padded_vocab_in_softmax", "autotp",
       [](Case& item) {
         item.settings.make_vocab_size_divisible_by = 1;
         item.config.vocab_size = 96;
       }},
      {"NormOverTpOfOne", "clip_norm_rank0_only", "autotp", on_mesh({.dp = 2})},
      {"RowBiasOverTpOfOne", "row_bias_grad_times_tp", "megatron", on_mesh({.dp = 2})},
      {"EmptyOptimizerSteps", "optimizer_holds_old_params", "ddp", tiny_rate},
      {"SameParametersPublished", "params_published_late", "autotp", tiny_rate},
      {"MasksOfOneStream", "rng_of_one_rank_restored_everywhere", "megatron",
       [](Case& item) {
         item.degrees.dp = 1;
         item.settings.sequence_parallel = false;
         item.config.attention_dropout = 0;
       }},
      {"ClippingThatRoundsAway", "clip_applied_on_tp_rank0_only", "autotp", tiny_rate},
  };
}
INSTANTIATE_TEST_SUITE_P(Cases, IdleFault, ::testing::ValuesIn(idle_faults()),
                         [](const auto& test) { return test.param.name; });

class FaultElsewhere : public ::testing::TestWithParam<Elsewhere> {};

TEST_P(FaultElsewhere, IsAlarmedAtTheFirstTensorWithItsCause) {
  const Case item = changed_case(GetParam().fault, GetParam().subject, GetParam().change);

  const Outcome outcome = outcome_of(find_fault(GetParam().fault), item);

  ASSERT_GT(outcome.fired, 0);
  ASSERT_EQ(outcome.verdict.mesh.world_size(), item.world_size());
  ASSERT_EQ(outcome.verdict.status, Status::kDiverges) << outcome.verdict.reason;
  const Finding& first = outcome.verdict.findings.front();
  EXPECT_EQ(first.stage, find_fault(GetParam().fault).expected->stage) << first.what;
  EXPECT_EQ(final_of(first.key).name, GetParam().tensor) << first.what;
  EXPECT_EQ(mismatch(GetParam().cause, first.cause), "") << first.what << "\n" << first.evidence;
  for (const Finding& finding : outcome.verdict.findings)
    EXPECT_NE(finding.cause.id, CauseId::kMeanOfRankMeans) << finding.what << ": counts are equal";
}

std::vector<Elsewhere> faults_elsewhere() {
  return {
      {"FadingSumOfZero2",
       "scaled_at_each_accumulation",
       "autotp",
       zero(2, 4),
       "model.embed_tokens.weight",
       {CauseId::kMicroBatchWeights,
        {{"weights", std::vector{0.00390625, 0.015625, 0.0625, 0.25}}, {"micro_batches", 4}}}},
      {"LastMicroBatchOfZero2",
       "last_micro_batch_not_averaged",
       "autotp",
       zero(2, 4),
       "model.embed_tokens.weight",
       {CauseId::kMicroBatchRankLocal, {{"local", std::vector{3}}, {"last", 3}, {"axis", "dp"}}}},
      {"LastMicroBatchOfOddZero1",
       "last_micro_batch_not_averaged",
       "autotp",
       odd(on_mesh({.dp = 2, .tp = 2}, zero(1, 3))),
       "model.embed_tokens.weight",
       {CauseId::kMicroBatchRankLocal, {{"local", std::vector{2}}, {"last", 2}, {"axis", "dp"}}}},
      {"LastMicroBatchOfOddZero2",
       "last_micro_batch_not_averaged",
       "autotp",
       odd(on_mesh({.dp = 2, .tp = 2}, zero(2, 3))),
       "model.embed_tokens.weight",
       {CauseId::kMicroBatchRankLocal, {{"local", std::vector{2}}, {"last", 2}, {"axis", "dp"}}}},
      {"GateAndUpOfOddLlama",
       "gate_up_cut_as_one_block",
       "megatron",
       odd(on_mesh({.dp = 2, .tp = 2}, zero(0, 1))),
       "model.layers.0.mlp.gate_proj.weight",
       {CauseId::kCutAsOneWithOther,
        {{"axis", "tp"},
         {"coordinate", 1},
         {"first", 0},
         {"last", 21},
         {"holder", "model.layers.0.mlp.up_proj.weight"}}}},
      {"GateAndUpOfQwen3OnThree",
       "gate_up_cut_as_one_block",
       "megatron",
       of_type("qwen3", {.dp = 2, .tp = 3}),
       "model.layers.0.mlp.gate_proj.weight",
       {CauseId::kCutAsOneWithOther,
        {{"axis", "tp"},
         {"coordinate", 1},
         {"first", 64},
         {"last", 95},
         {"holder", "model.layers.0.mlp.gate_proj.weight"},
         {"other", "model.layers.0.mlp.up_proj.weight"}}}},
      {"SectionsOfGpt2",
       "gate_up_cut_as_one_block",
       "autotp",
       of_type("gpt2", {.dp = 3, .tp = 2}),
       "transformer.h.0.attn.c_attn.weight",
       {CauseId::kCutAsOneBlock}},
      {"FusedGpt2FromRank0",
       "fused_shards_all_from_rank0",
       "autotp",
       of_type("gpt2", {.dp = 2, .tp = 3}),
       "transformer.h.0.attn.c_attn.weight",
       {CauseId::kShardsOfOtherRank,
        {{"axis", "tp"}, {"coordinate", 0}, {"ranks", std::vector{1, 2, 4, 5}}}}},
      {"FusedQwen3FromRank0",
       "fused_shards_all_from_rank0",
       "megatron",
       of_type("qwen3", {.dp = 2, .tp = 3}),
       "model.layers.0.self_attn.q_proj.weight",
       {CauseId::kShardsOfOtherRank,
        {{"axis", "tp"}, {"coordinate", 0}, {"ranks", std::vector{1, 2, 4, 5}}}}},
      {"FusedMegatronGptFromRank0",
       "fused_shards_all_from_rank0",
       "megatron",
       of_type("megatron_gpt", {.dp = 2, .tp = 3}),
       "decoder.layers.0.self_attention.linear_qkv.weight",
       {CauseId::kShardsOfOtherRank,
        {{"axis", "tp"}, {"coordinate", 0}, {"ranks", std::vector{1, 2, 4, 5}}}}},
      {"AverageMissingInZero2",
       "micro_batch_average_missing",
       "autotp",
       zero(2, 4),
       "model.embed_tokens.weight",
       {CauseId::kScaleOfFormula, {{"scale", 4}, {"formula", "micro-batches"}}}},
      {"BucketOfZero1",
       "bucket_sized_param_not_reduced",
       "autotp",
       odd(on_mesh({.dp = 3}, zero(1, 1))),
       "model.layers.0.self_attn.q_proj.weight",
       {CauseId::kPiecesRankLocal, {{"axis", "dp"}}}},
      {"BucketOfZero2OverTp",
       "bucket_sized_param_not_reduced",
       "autotp",
       odd(on_mesh({.dp = 3, .tp = 2}, zero(2, 1))),
       "model.layers.0.self_attn.q_proj.weight",
       {CauseId::kPiecesRankLocal, {{"axis", "dp"}}}},
      {"RowBiasOfBiasedLlamaInZero2",
       "row_bias_grad_times_tp",
       "autotp",
       biased(on_mesh({.dp = 2, .tp = 3}, zero(2, 1))),
       "model.layers.0.self_attn.o_proj.bias",
       {CauseId::kScaleOfFormula, {{"scale", 3}, {"formula", "tp"}}}},
      {"RowBiasPartialOfBiasedLlama",
       "sp_row_bias_grad_partial",
       "megatron",
       biased(on_mesh({.dp = 2, .tp = 3}, zero(0, 1))),
       "model.layers.0.self_attn.o_proj.bias",
       {CauseId::kRankLocalPartial, {{"axis", "tp"}, {"copies", 3}}}},
      {"FinalNormOfGpt2",
       "sp_final_norm_grad_partial",
       "megatron",
       of_type("gpt2", {.dp = 2, .tp = 3}),
       "transformer.ln_f.weight",
       {CauseId::kRankLocalPartial, {{"axis", "tp"}, {"copies", 3}}}},
      {"LayerNormsOfGpt2",
       "sp_layer_norm_grads_partial",
       "megatron",
       of_type("gpt2", {.dp = 3, .tp = 2}),
       "transformer.h.0.ln_1.weight",
       {CauseId::kRankLocalPartial, {{"axis", "tp"}}}},
      {"FinalNormOfMegatronGpt",
       "sp_final_norm_grad_partial",
       "megatron",
       of_type("megatron_gpt", {.dp = 3, .tp = 2}),
       "decoder.final_layernorm.weight",
       {CauseId::kRankLocalPartial, {{"axis", "tp"}, {"copies", 2}}}},
      {"PaddingOfAnOddVocabulary",
       "padded_vocab_in_softmax",
       "megatron",
       [=](Case& item) {
         item.degrees.tp = 3;
         item.degrees.dp = 2;
         item.config.vocab_size = 73;
         item.config.initializer_range = 0.05;
         item.model_name += "_v73";
       },
       "loss_per_dp_rank",
       {CauseId::kPaddingInSoftmax, {{"columns", 119}, {"padded", 192}, {"width", 73}}}},
      {"OneMicroBatchOfATiedModel",
       "grads_zeroed_each_micro_batch",
       "autotp",
       odd(on_mesh({.dp = 2, .tp = 2}, zero(0, 3))),
       "model.embed_tokens.weight",
       {CauseId::kMicroBatchMissing, {{"present", std::vector{2}}, {"last", 2}}}},
      {"OneMicroBatchOfATiedSplitModel",
       "grads_zeroed_each_micro_batch",
       "megatron",
       odd(on_mesh({.dp = 2, .tp = 2}, zero(0, 3))),
       "model.embed_tokens.weight",
       {CauseId::kMicroBatchMissing, {{"present", std::vector{2}}, {"last", 2}}}},
      {"OneMicroBatchOfATiedShardedModel",
       "grads_zeroed_each_micro_batch",
       "fsdp_tp",
       odd(on_mesh({.dp = 2, .tp = 2}, zero(0, 3))),
       "model.embed_tokens.weight",
       {CauseId::kMicroBatchMissing, {{"present", std::vector{2}}, {"last", 2}}}},
      {"NoSumOverDpInZero2",
       "dp_sum_missing",
       "autotp",
       odd(on_mesh({.dp = 3, .tp = 2}, zero(2, 1))),
       "model.embed_tokens.weight",
       {CauseId::kPiecesRankLocal, {{"axis", "dp"}}}},
      {"ReplicatedOfFusedGpt2",
       "replicated_counted_tp_times",
       "megatron",
       clipped_after(of_type("gpt2", {.dp = 2, .tp = 3})),
       "grad_norm",
       {CauseId::kReplicatedCountedOften, {{"degree", 3}, {"axis", "tp"}}}},
      {"ReplicatedOfZero2",
       "replicated_counted_tp_times",
       "autotp",
       clipped_after(odd(on_mesh({.dp = 3, .tp = 2}, zero(2, 1)))),
       "grad_norm",
       {CauseId::kReplicatedCountedOften, {{"degree", 2}, {"axis", "tp"}}}},
      {"NormOfTpRank0InZero1",
       "clip_norm_rank0_only",
       "autotp",
       clipped_after(odd(on_mesh({.dp = 3, .tp = 2}, zero(1, 1)))),
       "grad_norm",
       {CauseId::kNormOfOneRank, {{"axis", "tp"}, {"coordinate", 0}}}},
      {"NormOfTpRank0InZero2",
       "clip_norm_rank0_only",
       "autotp",
       clipped_after(odd(on_mesh({.dp = 3, .tp = 2}, zero(2, 1)))),
       "grad_norm",
       {CauseId::kNormOfOneRank, {{"axis", "tp"}, {"coordinate", 0}}}},
      {"OwnShardOverTp",
       "clip_norm_of_own_shard",
       "autotp",
       zero(0, 1),
       "grad_norm",
       {CauseId::kNormOfOneRank, {{"axis", "tp"}, {"coordinate", 0}}}},
      {"OwnShardOverDp",
       "clip_norm_of_own_shard",
       "autotp",
       zero(1, 1),
       "grad_norm",
       {CauseId::kSquaresNotSummed, {{"axis", "dp"}}}},
      {"MomentsOfOtherPieces",
       "optimizer_state_swapped_on_load",
       "autotp",
       on_mesh({.dp = 2, .tp = 3}, zero(2, 1)),
       "model.layers.0.mlp.gate_proj.weight.exp_avg",
       {CauseId::kOptimizerStatesSwapped,
        {{"state", "moments"},
         {"module", "mlp.gate_proj"},
         {"other", "mlp.up_proj"},
         {"parameters_are_right", 1}}}},
  };
}
INSTANTIATE_TEST_SUITE_P(Cases, FaultElsewhere, ::testing::ValuesIn(faults_elsewhere()),
                         [](const auto& test) { return test.param.name; });

// A run that conforms with a fault that fired would say that the fault was missed: on whatever
// mesh, subject and model.
class FiredFault : public ::testing::TestWithParam<std::string> {};

TEST_P(FiredFault, IsAlarmedOnEveryMesh) {
  const Fault& fault = find_fault(GetParam());
  struct Mesh {
    Degrees degrees;
    int micro_batches, zero_stage;
  };
  int runs = 0;

  for (const std::string& subject : fault.subjects) {
    for (const Mesh& mesh : {Mesh{{.dp = 2}, 1, 1}, Mesh{{.tp = 2}, 2, 0},
                             Mesh{{.dp = 2, .tp = 2}, 3, 2}, Mesh{{.dp = 3}, 2, 1}}) {
      if (subject == "ddp" && mesh.degrees.tp > 1) continue;
      const Degrees own_mesh = fault.smallest_case().degrees;
      if (own_mesh.pp * own_mesh.cp * mesh.degrees.dp * mesh.degrees.tp > kMaxWorldSize) continue;
      const Case item = changed_case(GetParam(), subject, [&](Case& c) {
        c.degrees.dp = mesh.degrees.dp;
        c.degrees.tp = mesh.degrees.tp;
        const int stages = c.degrees.pp * c.settings.nd.stages_per_rank;
        c.micro_batches = std::max(mesh.micro_batches, stages > 1 ? 4 : 1);
        const int own = c.settings.zero_stage;
        c.settings.zero_stage = subject != "autotp" ? 0 : own == 0 ? mesh.zero_stage : own;
        if (mesh.degrees.tp == 1 || subject != "megatron") c.settings.sequence_parallel = false;
      });
      const Outcome outcome = outcome_of(fault, item);
      EXPECT_EQ(outcome.fired > 0, outcome.verdict.status == Status::kDiverges)
          << item.slug() << ": fired " << outcome.fired << " times";
      ++runs;
    }
  }

  EXPECT_GE(runs, 2);
}

std::vector<std::string> all_faults() {
  std::vector<std::string> ids;
  for (const Fault& fault : fault_catalogue()) ids.push_back(fault.id);
  return ids;
}
INSTANTIATE_TEST_SUITE_P(Catalogue, FiredFault, ::testing::ValuesIn(all_faults()),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace isoshard
