// SPDX-License-Identifier: Apache-2.0
// The single-process run keeps every record, repeats bit for bit, and knows how far it moves.
#include "suite/reference/reference.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "core/base/error.h"
#include "core/tensor/convert.h"
#include "fixtures/cases/presets.h"
#include "harness/run/record.h"
#include "harness/verdict/equal_runs.h"
#include "harness/world/forked/forked_world.h"
#include "suite/reference/plain_run.h"
#include "suite/reference/warm_up_training.h"

namespace isoshard {
namespace {

Case two_ranks() {
  Case c = tiny_fault_case();
  c.degrees.dp = 2;
  return c;
}

Case step_of_gpt2() {
  Case c = tiny_fault_case("gpt2");
  c.degrees.dp = 3;
  c.dtype = Dtype::kBFloat16;
  c.seq_length = 16;
  c.batch_size = 12;
  return c;
}

TEST(SingleProcessReference, RecordsEveryKindOfTensorOfTheGlobalBatch) {
  const Reference reference = make_reference(two_ranks(), {.responses = 0});

  EXPECT_EQ(tensor_of(reference.tensor({0, RecordKind::kDataId, "sample_ids", 0})).size(0), 4);
  EXPECT_EQ(tensor_of(reference.tensor({0, RecordKind::kScalar, "loss_per_dp_rank", 0})).size(0),
            2);
  for (const RecordKey& key :
       {RecordKey{0, RecordKind::kParam, "model.norm.weight", 0},
        RecordKey{0, RecordKind::kParam, "model.norm.weight", 1},
        RecordKey{0, RecordKind::kGrad, "model.norm.weight", 0},
        RecordKey{0, RecordKind::kOptimizer, "model.norm.weight.momentum_buffer", 0},
        RecordKey{0, RecordKind::kActivation, "model.layers.1.mlp.down_proj", 0},
        RecordKey{0, RecordKind::kActivationGrad, "model.layers.1.mlp.down_proj", 0},
        RecordKey{0, RecordKind::kScalar, "grad_norm", 0},
        RecordKey{0, RecordKind::kScalar, "loss", 0}}) {
    EXPECT_NE(reference.find(key), nullptr) << describe(key);
  }
}

TEST(SingleProcessReference, RepeatsBitForBit) {
  const Reference first = make_reference(two_ranks(), {.responses = 0});
  const Reference second = make_reference(two_ranks(), {.responses = 0});

  const auto& records = first.trace().ranks.at(0).records;
  ASSERT_GT(records.size(), 100U);
  for (const Record& record : records)
    EXPECT_TRUE(
        at::equal(tensor_of(first.tensor(record.key)), tensor_of(second.tensor(record.key))))
        << describe(record.key);
}

// What worlds inherit from the controller makes them faster, and nothing else; and they can still
// be forked.
TEST(SingleProcessReference, IsTheSameAfterTheControllerTrainedAStep) {
  Case c = two_ranks();
  c.dtype = Dtype::kBFloat16;
  const Reference cold = make_reference(c, {.responses = 0});

  warm_up_training({c});
  const RunEquality equality =
      equality_of(cold.trace(), make_reference(c, {.responses = 0}).trace());

  EXPECT_TRUE(equality.holds()) << equality.difference;
  EXPECT_GT(equality.tensors, 100);
}

TEST(SingleProcessReference, RespondsToOneUlpEverywhereButInItsData) {
  const Reference reference = make_reference(two_ranks(), {.responses = 3});

  EXPECT_EQ(reference.response_runs(), 3);
  const Response* logits = reference.response({0, RecordKind::kActivation, "lm_head", 0});
  ASSERT_NE(logits, nullptr);
  EXPECT_GT(logits->relative_error, 1e-9);
  EXPECT_LT(logits->relative_error, 1e-4);
  const Response* ids = reference.response({0, RecordKind::kDataId, "input_ids", 0});
  EXPECT_TRUE(ids == nullptr || ids->absolute_norm == 0);
}

TEST(SingleProcessReference, ResponsesMayBeAddedLaterAndAreTheSame) {
  Case c = two_ranks();
  // masks depend on the responses that a run sees
  c.settings.optimizer.kind = OptimizerSettings::Kind::kAdamW;
  const Reference at_once = make_reference(c);
  Reference one_by_one = make_reference(c, {.responses = 1});
  EXPECT_EQ(one_by_one.response_runs(), 1);

  add_responses(c, one_by_one, 3);

  EXPECT_EQ(one_by_one.response_runs(), 3);
  ASSERT_GT(at_once.responses().size(), 100U);
  for (const auto& [key, response] : at_once.responses()) {
    ASSERT_NE(one_by_one.response(key), nullptr) << describe(key);
    EXPECT_EQ(one_by_one.response(key)->absolute_norm, response.absolute_norm) << describe(key);
    EXPECT_EQ(one_by_one.response(key)->relative_error, response.relative_error) << describe(key);
  }
}

/// How far a variant of the unsharded run is from it.
std::map<RecordKey, Response> movement(const Case& c,
                                       const std::function<PlainRun(const CaseData&)>& variant) {
  Reference reference = make_reference(c, {.responses = 0});
  const CaseData data(c);
  RunSpec spec = plain_spec(c, variant(data));
  spec.name = c.reference_slug() + "_variant";
  reference.add_variant(
      record(forked_launcher(), spec,
             {.reference = &reference, .keep = Keep::kNothing, .purpose = RunPurpose::kResponse}));
  EXPECT_EQ(reference.response_runs(), 0);
  return reference.responses();
}

Case uneven_ranks(Dtype dtype) {
  Case c = tiny_fault_case();
  c.degrees.dp = 3;
  c.micro_batches = 2;
  c.dtype = dtype;
  c.data.unequal_labels = true;
  return c;
}

// What they differ by is rounding: in fp64 next to nothing, in fp32 something. A wrong variant
// would widen every tolerance.
TEST(PlainRunVariants, ComputeTheStepOfTheUnshardedProcess) {
  const auto regrouped = [](const Case& c, const CaseData& data) {
    return regrouped_run(c, data, case_weights(c));
  };
  const auto scaled = [](const Case& c, const CaseData& data) {
    return scaled_run(c, data, case_weights(c));
  };
  const auto pieces = [](const Case& c, const CaseData& data) {
    return pieces_run(c, data, case_weights(c));
  };
  for (const LossMean mean : {LossMean::kGlobal, LossMean::kLocal, LossMean::kSum}) {
    for (const std::function<PlainRun(const Case&, const CaseData&)>& variant :
         {std::function<PlainRun(const Case&, const CaseData&)>(regrouped), {scaled}, {pieces}}) {
      const auto of = [&](Case c) {
        c.settings.loss_mean = mean;
        return movement(c, [&](const CaseData& data) { return variant(c, data); });
      };
      int gradients = 0, activation_gradients = 0;
      for (const auto& [key, response] : of(uneven_ranks(Dtype::kFloat64))) {
        EXPECT_LT(response.relative_error, 1e-11) << describe(key);
        gradients += key.kind == RecordKind::kGrad ? 1 : 0;
        activation_gradients += key.kind == RecordKind::kActivationGrad ? 1 : 0;
      }
      EXPECT_GT(gradients, 20);
      EXPECT_GT(activation_gradients, 20);
      double largest = 0;
      for (const auto& [key, response] : of(uneven_ranks(Dtype::kFloat32)))
        largest = std::max(largest, response.relative_error);
      EXPECT_GT(largest, 1e-9) << "the variant is the same run";
    }
  }
}

// The gradient at the input of a head is a sum over the vocabulary. A library may add it in one
// accumulator for one token, and in many for four: a cp rank with fewer tokens has the larger
// error.
TEST(PlainRunVariants, ShowWhatProductsOfFewerTokensLose) {
  Case c = tiny_fault_case();
  c.dtype = Dtype::kFloat32;
  c.degrees = {};
  c.batch_size = 1;
  c.seq_length = 4;
  c.config.vocab_size = 8192;
  at::manual_seed(5);
  at::Tensor logits = at::softmax(at::randn({4, c.config.vocab_size}), 1);
  for (std::int64_t token = 0; token < 4; ++token) logits[token][token * 1999] -= 1;
  const at::Tensor weight = at::randn({c.config.vocab_size, c.config.hidden_size});
  std::vector<at::Tensor> of_tokens;
  for (const at::Tensor& token : logits.split(1)) of_tokens.push_back(token.matmul(weight));
  const at::Tensor together = logits.matmul(weight);
  const double apart = ((at::cat(of_tokens) - together).norm() / together.norm()).item<double>();

  const Reference with_variants = make_reference(c);

  const Response* const response =
      with_variants.response({0, RecordKind::kActivationGrad, "model.norm", 0});
  ASSERT_NE(response, nullptr);
  EXPECT_EQ(response->runs, 4);
  EXPECT_GT(response->relative_error, apart / 4);
}

// torch's norm adds the squares of a whole gradient in fp32, and those of a rank's third of it.
TEST(PlainRunVariants, ShowWhatLongNormsLose) {
  Case c = tiny_fault_case();
  c.dtype = Dtype::kFloat32;
  c.degrees = {.dp = 3};
  c.config.vocab_size = 40960;
  c.settings.max_grad_norm = 0.1;
  const auto moved = [&](ClipNorm norm) {
    c.settings.clip_norm = norm;
    const Reference reference = make_reference(c);
    return reference.response({0, RecordKind::kScalar, "grad_norm", 0})->relative_error;
  };

  const double of_sums_in_fp32 = moved(ClipNorm::kTorch);

  EXPECT_GT(of_sums_in_fp32, 1e-6);
  EXPECT_LT(moved(ClipNorm::kExact), of_sums_in_fp32 / 4);
}

// 600 addends of one bias in bf16: one call loses more than three calls of 200.
TEST(PlainRunVariants, ShowWhatSumsInSixteenBitsLose) {
  Case c = step_of_gpt2();
  const RecordKey bias{0, RecordKind::kGrad, "transformer.h.0.ln_1.bias", 0};
  const double perturbed = make_reference(c, {.responses = 1}).response(bias)->relative_error;

  const Reference with_variants = make_reference(c);

  EXPECT_GT(with_variants.response(bias)->relative_error, perturbed);
  EXPECT_EQ(with_variants.response_runs(), 3);
  EXPECT_EQ(with_variants.response(bias)->runs, 5);
}

// What is added up between micro-batches has the same sums.
TEST(PlainRunVariants, ShowWhatSumsBetweenMicroBatchesLose) {
  Case c = step_of_gpt2();
  c.micro_batches = 2;
  const RecordKey bias{0, RecordKind::kGrad, "transformer.h.0.ln_1.bias.micro_batch", 0};
  const double perturbed = make_reference(c, {.responses = 1}).response(bias)->relative_error;

  const Reference with_variants = make_reference(c);

  EXPECT_GT(with_variants.response(bias)->relative_error, perturbed);
  EXPECT_EQ(with_variants.response(bias)->runs, 5);
}

TEST(SingleProcessReference, IsSharedByCasesThatDifferInTpOnly) {
  Case a = two_ranks();
  Case b = two_ranks();
  b.subject = "autotp";
  b.degrees.tp = 3;

  EXPECT_EQ(&reference_of(a).trace(), &reference_of(b).trace());
}

TEST(SingleProcessReference, ImpossibleCasesAreFoundBeforeAnyRankStarts) {
  Case c = two_ranks();
  c.data.kind = DataSource::Kind::kText;  // bytes up to 122, vocabulary 96

  EXPECT_THROW((void)make_reference(c), UsageError);
}

}  // namespace
}  // namespace isoshard
