// SPDX-License-Identifier: Apache-2.0
/// Claims about names of records: what they say, and that nothing of them is lost.
#include "core/observe/record_name.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "core/observe/layer_name.h"

namespace isoshard {
namespace {

struct NameCase {
  RecordKind kind;
  std::string name;
  RecordName parsed;
};

const std::vector<NameCase>& name_cases() {
  using enum NameRole;
  static const std::vector<NameCase> cases{
      {RecordKind::kParam, "model.norm.weight", {"model.norm.weight"}},
      {RecordKind::kParam, "model.norm.weight.read", {"model.norm.weight", kReadAgain}},
      {RecordKind::kGrad, "w", {"w"}},
      {RecordKind::kGrad, "w.clipped", {"w", kClipped}},
      {RecordKind::kGrad, "w.micro_batch", {"w", kMicroBatch}},
      {RecordKind::kActivation, "m.mlp", {"m.mlp"}},
      {RecordKind::kActivation, "m.mlp.partial", {"m.mlp", kSummand}},
      {RecordKind::kActivation, "m.mlp.recomputed", {"m.mlp", kRecomputed}},
      {RecordKind::kActivationGrad, "m.mlp.partial", {"m.mlp", kSummand}},
      {RecordKind::kMask, "m.drop", {"m.drop"}},
      {RecordKind::kMask, "m.drop.recomputed", {"m.drop", kRecomputed}},
      {RecordKind::kOptimizer, "w.exp_avg", {"w", kState, "exp_avg"}},
      {RecordKind::kOptimizer, "m.w.step", {"m.w", kState, "step"}},
      {RecordKind::kOptimizer, "w.master", {"w", kMaster, "master"}},
      {RecordKind::kDataId, "input_ids", {"input_ids"}},
      {RecordKind::kDataId, "next_sample_ids", {"sample_ids", kNext}},
      {RecordKind::kScalar, "learning_rate", {"", kLearningRate}},
      {RecordKind::kScalar, "loss_scale", {"", kLossScale}},
      {RecordKind::kScalar, "grad_norm", {"", kGradNorm}},
      {RecordKind::kScalar, "found_inf", {"", kFoundInf}},
      {RecordKind::kScalar, "optimizer_steps", {"", kOptimizerSteps}},
      {RecordKind::kScalar, "rng_state", {"", kRngState}},
      {RecordKind::kScalar, "loss", {"", kLoss}},
      {RecordKind::kScalar, "loss_backward", {"", kLossBackward}},
      {RecordKind::kScalar, "loss_per_dp_rank", {"", kLossPerDpRank}},
      {RecordKind::kScalar, "loss.aux", {"loss.aux", kOtherLoss}},
      {RecordKind::kScalar, "collectives.dp.rank3", {"dp.rank3", kCollectives}},
      {RecordKind::kScalar, "accuracy", {"accuracy"}},
      // Names that could be read in two ways: the kind decides, then the suffix.
      {RecordKind::kParam, "net.read", {"net", kReadAgain}},
      {RecordKind::kParam, "net.read.read", {"net.read", kReadAgain}},
      {RecordKind::kGrad, "net.read", {"net.read"}},
      {RecordKind::kGrad, "net.read.clipped", {"net.read", kClipped}},
      {RecordKind::kOptimizer, "net.read.exp_avg", {"net.read", kState, "exp_avg"}},
      {RecordKind::kParam, "net.clipped", {"net.clipped"}},
      {RecordKind::kGrad, "net.clipped", {"net", kClipped}},
      {RecordKind::kGrad, "net.clipped.micro_batch", {"net.clipped", kMicroBatch}},
      {RecordKind::kGrad, "net.micro_batch.clipped", {"net.micro_batch", kClipped}},
      {RecordKind::kActivation, "net.partial", {"net", kSummand}},
      {RecordKind::kActivation, "net.partial.up", {"net.partial.up"}},
      {RecordKind::kActivation, "net.partial.recomputed", {"net.partial", kRecomputed}},
      {RecordKind::kActivation, "net.recomputed.partial", {"net.recomputed", kSummand}},
      {RecordKind::kActivationGrad, "net.recomputed", {"net.recomputed"}},
      {RecordKind::kMask, "net.partial", {"net.partial"}},
      {RecordKind::kParam, "net.partial.weight", {"net.partial.weight"}},
      {RecordKind::kParam, "net.master", {"net.master"}},
      {RecordKind::kOptimizer, "net.master.master", {"net.master", kMaster, "master"}},
      {RecordKind::kOptimizer, "step", {"step", kPlain, "step"}},
      {RecordKind::kOptimizer, "w.", {"w", kState, ""}},
      {RecordKind::kOptimizer, ".master", {"", kMaster, "master"}},
      {RecordKind::kActivation, "grad_norm", {"grad_norm"}},
      {RecordKind::kScalar, "grad_norm.read", {"grad_norm.read"}},
      {RecordKind::kScalar, "loss_scales", {"loss_scales", kOtherLoss}},
      {RecordKind::kScalar, "collectives", {"collectives"}},
      {RecordKind::kGrad, ".clipped", {"", kClipped}},
      {RecordKind::kGrad, "clipped", {"clipped"}},
      {RecordKind::kDataId, "next_", {"", kNext}},
      {RecordKind::kScalar, "", {""}},
      {RecordKind::kParam, "", {""}}};
  return cases;
}

constexpr std::array kKinds{RecordKind::kParam,      RecordKind::kGrad,
                            RecordKind::kActivation, RecordKind::kActivationGrad,
                            RecordKind::kOptimizer,  RecordKind::kScalar,
                            RecordKind::kDataId,     RecordKind::kMask};

TEST(RecordNames, SayWhatARecordHoldsOfWhat) {
  for (const NameCase& item : name_cases()) {
    const RecordName parsed = parse_record_name(item.kind, item.name);
    EXPECT_TRUE(parsed == item.parsed)
        << name_of(item.kind) << " " << item.name << ": " << parsed.base << ", role "
        << static_cast<int>(parsed.role) << ", " << parsed.state;
  }
}

TEST(RecordNames, ComeBackWhole) {
  for (const NameCase& item : name_cases()) {
    for (const RecordKind kind : kKinds)  // under every kind
      EXPECT_EQ(to_string(parse_record_name(kind, item.name)), item.name) << name_of(kind);
  }
}

TEST(RecordNames, ARoleAddsOneSuffixThatIsTakenOffAgain) {
  const std::string clipped = to_string({"net.read", NameRole::kClipped});

  EXPECT_EQ(clipped, "net.read.clipped");
  EXPECT_EQ(parse_record_name(RecordKind::kGrad, clipped).base, "net.read");
  EXPECT_EQ(to_string({"w", NameRole::kState, "exp_avg_sq"}), "w.exp_avg_sq");
  EXPECT_EQ(to_string({{}, NameRole::kFoundInf}), "found_inf");
}

TEST(RecordNames, OfLossesBeginWithLoss) {
  const auto is_loss_called = [](const std::string& name) {
    return is_named_loss(parse_record_name(RecordKind::kScalar, name).role);
  };
  for (const char* const name :
       {"loss", "loss_scale", "loss_backward", "loss_per_dp_rank", "loss_of_router"})
    EXPECT_TRUE(is_loss_called(name)) << name;
  for (const char* const name : {"grad_norm", "aux_loss", "collectives.dp.rank0", "los", ""})
    EXPECT_FALSE(is_loss_called(name)) << name;
}

TEST(LayersInNames, AreTheFirstNumberBetweenDots) {
  struct LayerCase {
    std::string_view name, layer, within;
  };
  constexpr std::array kCases{
      LayerCase{"model.layers.12.mlp.up_proj", "model.layers.12", "mlp.up_proj"},
      LayerCase{"model.layers.12", "model.layers.12", ""},
      LayerCase{"transformer.h.0.attn", "transformer.h.0", "attn"},
      LayerCase{"decoder.layers.3.mlp.linear_fc1.weight", "decoder.layers.3",
                "mlp.linear_fc1.weight"},
      LayerCase{"lm_head.weight", "", ""},
      LayerCase{"0.weight", "0", "weight"},
      LayerCase{"a.3.experts.5.w", "a.3", "experts.5.w"},
      LayerCase{"model.norm2.weight", "", ""},
      LayerCase{"model.embed_tokens", "", ""},
      LayerCase{"a..1.w", "a..1", "w"},
      LayerCase{"a.123456789.w", "", ""},
      LayerCase{"", "", ""}};
  for (const LayerCase& item : kCases) {
    EXPECT_EQ(layer_of(item.name), item.layer) << item.name;
    EXPECT_EQ(within_layer(item.name), item.within) << item.name;
  }
  EXPECT_EQ(layer_in("model.layers.12.mlp")->number, 12);
  EXPECT_EQ(layer_in("model.layers.12.mlp")->begin, 13U);
}

}  // namespace
}  // namespace isoshard
