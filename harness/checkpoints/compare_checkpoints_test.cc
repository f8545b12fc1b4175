// SPDX-License-Identifier: Apache-2.0
/// Claims about comparing checkpoints: equal ones conform whatever their files, and each kind of
/// difference is found by name.
#include "harness/checkpoints/compare_checkpoints.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "core/base/error.h"
#include "core/base/float_bits.h"
#include "harness/checkpoints/checkpoint_files_for_tests.h"
#include "harness/checkpoints/rounded.h"
#include "harness/testing/is_cause.h"
#include "harness/testing/said_matchers.h"
#include "harness/testing/test_folder.h"

namespace isoshard {
namespace {

using namespace checkpoint_tests;
using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using testing::StartsWith;
using testing::ThrowsMessage;

constexpr const char* kQ = "model.layers.0.self_attn.q_proj.weight";
constexpr const char* kK = "model.layers.0.self_attn.k_proj.weight";

class CheckpointPair : public testing::Test {
 protected:
  /// The verdict on the model after `edit`, against the model.
  Verdict judged(const std::function<void(Tensors&)>& edit, const CheckpointRules& rules = {}) {
    Tensors tensors = model();
    save(folder_ / "a/model.safetensors", tensors);
    edit(tensors);
    save(folder_ / "b/model.safetensors", tensors);
    return compare_checkpoints(folder_ / "a", folder_ / "b", rules);
  }
  TestFolder folder_;
};
using CompareCheckpoints = CheckpointPair;
using TiedEmbeddings = CheckpointPair;

void nothing(Tensors& /*tensors*/) {}

void drop(Tensors& tensors, const std::string& name) {
  std::erase_if(tensors, [&](const auto& entry) { return entry.first == name; });
}

TEST_F(CompareCheckpoints, EqualOnesConformExactly) {
  const Verdict verdict = judged(nothing);

  EXPECT_EQ(verdict.status, Status::kConforms);
  EXPECT_EQ(verdict.strength, Strength::kExact);
  EXPECT_EQ(verdict.compared, 8);
  EXPECT_THAT(verdict.notes, IsEmpty());
}

TEST_F(CompareCheckpoints, ShardedFilesEqualOneFile) {
  save(folder_ / "a/model.safetensors", model());
  save_sharded(folder_ / "b", model(), 3);

  const Verdict verdict = compare_checkpoints(folder_ / "a", folder_ / "b");

  EXPECT_EQ(verdict.status, Status::kConforms);
  EXPECT_EQ(verdict.compared, 8);
}

TEST_F(CompareCheckpoints, OneChangedElementIsFoundWithItsPlaceAndValues) {
  const Verdict verdict = judged([](Tensors& t) { value(at(t, kQ), 6) += std::ldexp(1.0F, -20); });

  EXPECT_EQ(verdict.status, Status::kDiverges);
  ASSERT_THAT(verdict.findings, SizeIs(1));
  EXPECT_EQ(verdict.findings[0].key.name, kQ);
  EXPECT_THAT(verdict.findings[0],
              FindingIs(FindingId::kDiffers,
                        {{"unequal", 1}, {"elements", 16}, {"index", std::vector{1, 2}}}));
}

TEST_F(CompareCheckpoints, FindingsAreOfStoredTensorsAndNotOfRanksInSteps) {
  const Verdict verdict = judged([](Tensors& t) {
    for (const char* const name : {kQ, kK})
      for (std::size_t i = 0; i < 16; ++i) value(at(t, name), i) *= 2;
  });

  ASSERT_THAT(verdict.findings, SizeIs(2));
  const Finding& first = verdict.findings[0];
  const std::string place = std::string("weight ") + kK;
  EXPECT_THAT(first.what, StartsWith(place + ": "));
  EXPECT_THAT(first.diagnosis, StartsWith(place + ": "));
  EXPECT_EQ(find_value(first.measured, "rank"), nullptr);
  EXPECT_NE(find_value(first.measured, "index"), nullptr);
  EXPECT_THAT(first.cause, IsCause(CauseId::kScale, {{"scale", 2}, {"same", 2}, {"same_of", 6}}));
  EXPECT_THAT(first.ranks, IsEmpty());
}

TEST_F(CompareCheckpoints, OneChangedElementOfOptimizerStateIsFound) {
  const Verdict verdict =
      judged([](Tensors& t) { value(at(t, "model.norm.weight.exp_avg"), 3) = 7; });

  EXPECT_EQ(verdict.status, Status::kDiverges);
  EXPECT_EQ(verdict.findings.at(0).key.name, "model.norm.weight.exp_avg");
}

TEST_F(CompareCheckpoints, AnotherStepIsFound) {
  const Verdict verdict = judged([](Tensors& t) { value(at(t, "model.norm.weight.step"), 0) = 3; });

  EXPECT_EQ(verdict.status, Status::kDiverges);
  EXPECT_EQ(verdict.findings.at(0).key.name, "model.norm.weight.step");
}

TEST_F(CompareCheckpoints, ATransposedMatrixIsNamedSo) {
  const Verdict verdict = judged([](Tensors& t) {
    const Tensor before = at(t, kQ);
    for (std::size_t i = 0; i < 16; ++i)
      std::memcpy(&value(at(t, kQ), i % 4 * 4 + i / 4), before.bytes.data() + i * 4, 4);
  });

  EXPECT_EQ(verdict.status, Status::kDiverges);
  EXPECT_THAT(verdict.findings.at(0).cause, IsCause(CauseId::kTransposed));
}

TEST_F(CompareCheckpoints, ExchangedHalvesOfAFusedMatrixAreNamedSo) {
  const Verdict verdict = judged([](Tensors& t) {
    std::vector<std::byte>& bytes = at(t, "model.layers.0.mlp.gate_up_proj.weight").bytes;
    std::rotate(bytes.begin(), bytes.begin() + 48, bytes.end());
  });

  EXPECT_EQ(verdict.status, Status::kDiverges);
  EXPECT_THAT(verdict.findings.at(0).cause,
              IsCause(CauseId::kHalvesExchanged, {{"order", std::vector{1, 0}}}));
}

TEST_F(CompareCheckpoints, ExchangedRowsAreNamedAsPermuted) {
  const Verdict verdict = judged([](Tensors& t) {
    std::vector<std::byte>& bytes = at(t, kQ).bytes;
    std::swap_ranges(bytes.begin(), bytes.begin() + 16, bytes.begin() + 32);
  });

  EXPECT_EQ(verdict.status, Status::kDiverges);
  EXPECT_THAT(
      verdict.findings.at(0).cause,
      IsCause(CauseId::kPartsInOtherOrder, {{"parts", 4}, {"order", std::vector{2, 1, 0, 3}}}));
}

TEST_F(CompareCheckpoints, AFactorIsNamed) {
  const Verdict verdict = judged([](Tensors& t) {
    for (std::size_t i = 0; i < 16; ++i) value(at(t, kQ), i) *= 2;
  });

  EXPECT_EQ(verdict.status, Status::kDiverges);
  EXPECT_THAT(verdict.findings.at(0).cause, IsCause(CauseId::kScale, {{"scale", 2}}));
}

TEST_F(CompareCheckpoints, ATransposedMatrixOfAnotherShapeIsNamedSo) {
  const Verdict verdict = judged([](Tensors& t) {
    Tensor& gate = at(t, "model.layers.0.mlp.gate_up_proj.weight");
    const Tensor before = gate;
    gate.shape = {4, 6};
    for (std::size_t i = 0; i < 24; ++i)
      std::memcpy(&value(gate, i % 4 * 6 + i / 4), before.bytes.data() + i * 4, 4);
  });

  EXPECT_EQ(verdict.status, Status::kDiverges);
  EXPECT_THAT(verdict.findings.at(0).cause, IsCause(CauseId::kTransposed));
}

TEST_F(CompareCheckpoints, ACopyOfAnotherTensorIsNamedSo) {
  const Verdict verdict = judged([](Tensors& t) { at(t, kQ) = at(t, kK); });

  EXPECT_EQ(verdict.status, Status::kDiverges);
  EXPECT_THAT(verdict.findings.at(0).cause, IsCause(CauseId::kEqualsOtherTensor, {{"tensor", kK}}));
}

TEST_F(CompareCheckpoints, ExchangedTensorsAreNamedSo) {
  const Verdict verdict = judged([](Tensors& t) { std::swap(at(t, kQ), at(t, kK)); });

  EXPECT_EQ(verdict.status, Status::kDiverges);
  ASSERT_THAT(verdict.findings, SizeIs(2));
  EXPECT_THAT(verdict.findings[0].cause,
              IsCause(CauseId::kTensorsExchanged, {{"first", kK}, {"second", kQ}}));
}

TEST_F(CompareCheckpoints, AMissingTensorIsFound) {
  const Verdict verdict = judged([](Tensors& t) { drop(t, kK); });

  EXPECT_EQ(verdict.status, Status::kDiverges);
  EXPECT_THAT(verdict.missing, ElementsAre(std::string("weight ") + kK));
  EXPECT_EQ(verdict.findings.at(0).key.name, kK);
  EXPECT_THAT(verdict.findings[0], FindingIs(FindingId::kNotInCheckpoint));
}

TEST_F(CompareCheckpoints, AnExtraTensorIsFound) {
  const Verdict verdict =
      judged([](Tensors& t) { t.emplace_back("model.extra.weight", numbered({3}, 9)); });

  EXPECT_EQ(verdict.status, Status::kDiverges);
  EXPECT_THAT(verdict.extra, ElementsAre("weight model.extra.weight"));
}

TEST_F(CompareCheckpoints, MissingAndExtraTensorsMayBeAllowedByName) {
  const CheckpointRules rules{.not_recorded = {"param/*.k_proj.weight", "param/model.extra.*"}};

  const Verdict verdict = judged(
      [](Tensors& t) {
        drop(t, kK);
        t.emplace_back("model.extra.weight", numbered({3}, 9));
      },
      rules);

  EXPECT_EQ(verdict.status, Status::kConforms);
  EXPECT_THAT(verdict.not_recorded, ElementsAre(std::string("weight ") + kK));
  EXPECT_THAT(verdict.notes, ElementsAre(HasSubstr("model.extra.weight")));
}

TEST_F(CompareCheckpoints, IsNotExactWhereTensorsAreLeftOut) {
  save(folder_ / "b/extra.safetensors", model());

  const Verdict beside = judged(nothing);
  std::filesystem::remove(folder_ / "b/extra.safetensors");
  const CheckpointRules rules{.not_recorded = {std::string("param/") + kQ}};
  const Verdict allowed = judged([](Tensors& tensors) { drop(tensors, kQ); }, rules);

  for (const Verdict& verdict : {beside, allowed}) {
    EXPECT_EQ(verdict.status, Status::kConforms);
    EXPECT_EQ(verdict.strength, Strength::kWithinTolerance);
  }
}

TEST_F(CompareCheckpoints, AnotherShapeIsFoundThoughTheBytesAreEqual) {
  const Verdict verdict = judged([](Tensors& t) { at(t, kQ).shape = {2, 8}; });

  EXPECT_EQ(verdict.status, Status::kDiverges);
  EXPECT_THAT(verdict.findings.at(0), FindingIs(FindingId::kOtherShape));
}

TEST_F(CompareCheckpoints, ToleranceCountsForWeightsAndState) {
  const auto scale_all = [](Tensors& t) {
    for (auto& [name, tensor] : t) {
      for (std::size_t i = 0; i < tensor.bytes.size() / 4; ++i) value(tensor, i) *= 1.0001F;
    }
  };

  EXPECT_EQ(judged(scale_all).status, Status::kDiverges);
  const Verdict verdict = judged(scale_all, {.rtol = 1e-3});
  EXPECT_EQ(verdict.status, Status::kConforms);
  EXPECT_EQ(verdict.strength, Strength::kWithinTolerance);
  EXPECT_EQ(judged(scale_all, {.rtol = 1e-5}).status, Status::kDiverges);
}

void round_to_bf16(Tensors& t, const std::string& name) {
  Tensor& tensor = at(t, name);
  const HostTensor coarse =
      rounded(HostTensor{tensor.dtype, tensor.shape, tensor.bytes}, Dtype::kBFloat16);
  const std::vector<std::byte> bytes(coarse.bytes.begin(), coarse.bytes.end());
  tensor.dtype = Dtype::kBFloat16;
  tensor.bytes = bytes;
}

TEST_F(CompareCheckpoints, AnotherDtypeIsFoundUnlessItMayBeRounded) {
  const auto edit = [](Tensors& t) {
    value(at(t, kQ), 0) = 9;
    round_to_bf16(t, kQ);
  };
  const Verdict refused = judged([&](Tensors& t) { round_to_bf16(t, kQ); });
  const Verdict allowed =
      judged([&](Tensors& t) { round_to_bf16(t, kQ); }, {.rounds_to_coarser = true});
  const Verdict wrong = judged(edit, {.rounds_to_coarser = true});

  EXPECT_EQ(refused.status, Status::kDiverges);
  EXPECT_EQ(refused.findings.at(0).key.name, kQ);
  EXPECT_THAT(refused.findings[0], FindingIs(FindingId::kStoredInOtherDtype));
  EXPECT_EQ(allowed.status, Status::kConforms);
  EXPECT_EQ(allowed.strength, Strength::kWithinTolerance);
  EXPECT_THAT(allowed.notes, ElementsAre(HasSubstr("1 tensors were rounded")));
  EXPECT_EQ(wrong.status, Status::kDiverges);
  EXPECT_EQ(wrong.findings.at(0).key.name, kQ);
}

TEST_F(CompareCheckpoints, RenamingFitsNames) {
  const auto prefix = [](Tensors& t) {
    for (auto& [name, tensor] : t) name = "module." + name;
  };

  EXPECT_EQ(judged(prefix).status, Status::kDiverges);
  EXPECT_EQ(judged(prefix, {.renamings = {{"module.*", "*"}}}).status, Status::kConforms);
}

TEST_F(CompareCheckpoints, RenamingToATakenNameIsRefused) {
  const CheckpointRules rules{.renamings = {{kQ, kK}}};

  EXPECT_THAT([&] { (void)judged(nothing, rules); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("--rename"), HasSubstr(kK))));
}

TEST_F(CompareCheckpoints, SignsOfZerosAreNoted) {
  save(folder_ / "a.safetensors", {{"w", floats({2}, {0.0F, 1})}});
  save(folder_ / "b.safetensors", {{"w", floats({2}, {-0.0F, 1})}});

  const Verdict verdict = compare_checkpoints(folder_ / "a.safetensors", folder_ / "b.safetensors");

  EXPECT_EQ(verdict.status, Status::kConforms);
  EXPECT_THAT(verdict.notes, ElementsAre(HasSubstr("signs of zeros")));
}

TEST_F(CompareCheckpoints, ANaNOnOneSideDiverges) {
  const Verdict verdict = judged([](Tensors& t) { value(at(t, kQ), 6) = NAN; }, {.rtol = 0.5});

  EXPECT_EQ(verdict.status, Status::kDiverges);
}

TEST_F(CompareCheckpoints, ZerosOnBothSidesShowNothing) {
  save(folder_ / "a.safetensors", {{"w", floats({2}, {0, 0})}});
  save(folder_ / "b.safetensors", {{"w", floats({2}, {0, 0})}});

  EXPECT_EQ(compare_checkpoints(folder_ / "a.safetensors", folder_ / "b.safetensors").status,
            Status::kVacuous);
}

TEST_F(CompareCheckpoints, ACheckpointIsNotComparedWithItself) {
  save(folder_ / "a/model.safetensors", model());

  EXPECT_THAT([&] { (void)compare_checkpoints(folder_ / "a", folder_ / "a/"); },
              ThrowsMessage<UsageError>(HasSubstr("needs two checkpoints")));
}

TEST_F(TiedEmbeddings, TheInputEmbeddingStandsForTheOutputIfTheConfigSaysSo) {
  write_text(folder_ / "b/config.json", R"({"tie_word_embeddings": true})");

  const Verdict verdict = judged([](Tensors& t) { drop(t, "lm_head.weight"); });

  // a's own output embedding is another one
  EXPECT_EQ(verdict.status, Status::kDiverges);
  EXPECT_EQ(verdict.findings.at(0).key.name, "lm_head.weight");

  Tensors tied = model();
  at(tied, "lm_head.weight") = at(tied, "model.embed_tokens.weight");
  save(folder_ / "a/model.safetensors", tied);
  const Verdict right = compare_checkpoints(folder_ / "a", folder_ / "b");
  EXPECT_EQ(right.status, Status::kConforms);
  EXPECT_EQ(right.compared, 8);
  EXPECT_THAT(right.notes, ElementsAre(AllOf(HasSubstr("has no lm_head.weight"),
                                             HasSubstr("config.json ties it"))));
}

TEST_F(TiedEmbeddings, WithoutAWordOfTheConfigTheOutputIsMissing) {
  const Verdict verdict = judged([](Tensors& t) { drop(t, "lm_head.weight"); });

  EXPECT_EQ(verdict.status, Status::kDiverges);
  EXPECT_THAT(verdict.missing, ElementsAre("weight lm_head.weight"));
  EXPECT_THAT(verdict.notes, ElementsAre(HasSubstr("must say \"tie_word_embeddings\": true")));
}

TEST_F(TiedEmbeddings, AConfigThatSaysNoTiesNothing) {
  write_text(folder_ / "b/config.json", R"({"tie_word_embeddings": false})");

  const Verdict verdict = judged([](Tensors& t) { drop(t, "lm_head.weight"); });

  EXPECT_EQ(verdict.status, Status::kDiverges);
  EXPECT_THAT(verdict.missing, Contains("weight lm_head.weight"));
}

TEST(Renamings, AreReadFromText) {
  const std::vector<Renaming> rules = parse_renamings("module.*=*,a=b");

  ASSERT_THAT(rules, SizeIs(2));
  EXPECT_EQ(rules[0].from, "module.*");
  EXPECT_EQ(rules[1].to, "b");
  for (const char* wrong : {"a", "=a", "a=", "a*=b", "a*b*=*"})
    EXPECT_THAT([&] { (void)parse_renamings(wrong); }, ThrowsMessage<UsageError>(HasSubstr(wrong)))
        << wrong;
}

TEST(RoundedTensors, AreToNearestAndTiesToEven) {
  const Tensor tensor = floats({3}, {1 + 0x1p-8F, 1 + 0x1p-8F + 0x1p-20F, -3});

  const HostTensor got =
      rounded(HostTensor{tensor.dtype, tensor.shape, tensor.bytes}, Dtype::kBFloat16);

  const auto* const bits = reinterpret_cast<const std::uint16_t*>(got.bytes.data());
  EXPECT_EQ(bf16_to_float(bits[0]), 1);
  EXPECT_EQ(bf16_to_float(bits[1]), 1 + 0x1p-7F);
  EXPECT_EQ(bf16_to_float(bits[2]), -3);
  EXPECT_TRUE(can_round(Dtype::kFloat64, Dtype::kFloat16));
  EXPECT_FALSE(can_round(Dtype::kFloat16, Dtype::kBFloat16));
  EXPECT_FALSE(can_round(Dtype::kInt64, Dtype::kFloat32));
}

}  // namespace
}  // namespace isoshard
