// SPDX-License-Identifier: Apache-2.0
// Steps in fp16 and under autocast, and what autocast rounds.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "fixtures/inputs/inputs.h"
#include "harness/fault/collective_fault.h"
#include "subjects/model/ops/autocast.h"
#include "suite/testing/step_cases.h"

namespace isoshard {
namespace {

enum class Precision : std::uint8_t { kFp16, kAutocast, kAutocastFp16 };

Case in(Precision precision, Case item) {
  if (precision == Precision::kFp16) item.dtype = Dtype::kFloat16;
  if (precision == Precision::kAutocast) item.settings.autocast = Dtype::kBFloat16;
  if (precision == Precision::kAutocastFp16) item.settings.autocast = Dtype::kFloat16;
  return item;
}

Case with_smoothing(Case item) {
  item.settings.label_smoothing = 0.1;
  item.data.unequal_labels = true;
  item.micro_batches = 2;
  return item;
}

std::vector<Case> precision_cases() {
  std::vector<Case> cases;
  for (const Precision precision : {Precision::kFp16, Precision::kAutocast}) {
    const auto add = [&](Case item) { cases.push_back(in(precision, std::move(item))); };
    for (const char* const model_type : {"qwen2", "qwen3", "llama", "gpt2"}) {
      add(step_case("ddp", {.dp = 3}, Dtype::kFloat32, model_type));
      add(step_case("autotp", {.dp = 3, .tp = 2}, Dtype::kFloat32, model_type));
    }
    add(step_case("autotp", {.dp = 2, .tp = 3}));
    add(step_case("ddp", {}));
    Case odd = step_case("autotp", {.dp = 2, .tp = 3});
    odd.batch_size = 1;
    odd.seq_length = 13;
    odd.data.unequal_labels = true;
    add(odd);
    add(with_smoothing(step_case("ddp", {.dp = 2})));
    Case split = with_smoothing(with_tied_head(step_case("autotp", {.dp = 2, .tp = 3})));
    split.settings.make_vocab_size_divisible_by = 8;
    split.config.vocab_size = 97;
    split.model_name += "_v97";
    add(split);
    Case sdpa = step_case("autotp", {.dp = 2, .tp = 2});
    sdpa.attention = AttentionImpl::kSdpa;
    add(sdpa);
  }
  cases.push_back(in(Precision::kAutocastFp16, step_case("autotp", {.dp = 3, .tp = 2})));
  Case adamw = in(Precision::kAutocast, step_case("autotp", {.dp = 2, .tp = 2}));
  adamw.settings.optimizer = OptimizerSettings{};
  adamw.steps = 2;
  cases.push_back(adamw);
  return cases;
}

class PrecisionStep : public ::testing::TestWithParam<Case> {};

TEST_P(PrecisionStep, MatchesSingleProcess) {
  expect_matches_single_process(GetParam());
}

INSTANTIATE_TEST_SUITE_P(Cases, PrecisionStep, ::testing::ValuesIn(precision_cases()), case_name);

// No false alarm, whatever the weights and ids.
class PrecisionSeeds : public ::testing::TestWithParam<int> {};

TEST_P(PrecisionSeeds, RaiseNoFalseAlarm) {
  for (const Precision precision : {Precision::kFp16, Precision::kAutocast}) {
    Case split = with_smoothing(step_case("autotp", {.dp = 2, .tp = 2}, Dtype::kFloat32, "llama"));
    split.settings.make_vocab_size_divisible_by = 64;
    for (Case item : {step_case("ddp", {.dp = 3}),
                      step_case("autotp", {.dp = 2, .tp = 3}, Dtype::kFloat32, "qwen3"), split}) {
      item = in(precision, item);
      item.seed = static_cast<std::uint64_t>(GetParam());
      const Reference reference = make_reference(item);

      EXPECT_THAT(run_case(item, reference), conforms_to(reference, policy_of(item)))
          << item.slug();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(OneToTwelve, PrecisionSeeds, ::testing::Range(1, 13));

// Tolerances of coarse dtypes still see a sum that one layer lacks.
TEST(PrecisionFaults, OfOneLayerDiverge) {
  for (const Precision precision :
       {Precision::kFp16, Precision::kAutocast, Precision::kAutocastFp16}) {
    const Case item = in(precision, step_case("autotp", {.dp = 2, .tp = 3}));
    const Reference& reference = reference_of(item);
    RunOptions skipped;
    const FaultProbe probe;
    skipped.decorate = [&](std::unique_ptr<Communicator> inner, int) {
      const auto fault = skip_segments([](const CallInfo& info, const Segment* segment) {
        return info.purpose == Purpose::kColumnParallelBackward && segment != nullptr &&
               segment->name.starts_with("model.layers.1.mlp.");
      });
      return decorate_with_fault(std::move(inner), fault, probe);
    };

    EXPECT_THAT(run_case(item, reference, skipped),
                ::testing::Not(conforms_to(reference, policy_of(item))))
        << item.slug();
    EXPECT_GT(probe.count(), 0);
  }
}

TEST(PrecisionForward, OfAutocastKeepsParametersGradientsAndOptimizerInFp32) {
  Case item = in(Precision::kAutocast, step_case("autotp", {.dp = 2, .tp = 2}));
  item.settings.optimizer = OptimizerSettings{};

  const Trace trace = run_case(item, reference_of(item));

  int counted = 0;
  for (const Record& record : trace.ranks.at(0).records) {
    const RecordKind kind = record.key.kind;
    if (kind != RecordKind::kParam && kind != RecordKind::kGrad && kind != RecordKind::kOptimizer)
      continue;
    EXPECT_EQ(record.dtype, Dtype::kFloat32) << describe(record.key);
    ++counted;
  }
  EXPECT_GT(counted, 100);
  EXPECT_EQ(record_of(trace, 0, {0, RecordKind::kActivation, "lm_head", 0}).dtype,
            Dtype::kBFloat16);
  EXPECT_EQ(record_of(trace, 0, {0, RecordKind::kActivation, "model.norm", 0}).dtype,
            Dtype::kFloat32);
}

// The rotary decoder with every cast of autocast written out: what goes into a matrix product is
// rounded, nothing else is.
class ExplicitCasts {
 public:
  ExplicitCasts(const ModelConfig& config, const Parameters& parameters, std::string kept_wide)
      : config_(config), parameters_(parameters), kept_wide_(std::move(kept_wide)) {}

  at::Tensor logits(const at::Tensor& ids_BS) const {
    at::Tensor x = at::embedding(of("model.embed_tokens.weight"), ids_BS);
    for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) {
      const std::string name = "model.layers." + std::to_string(layer);
      x = x + attention(name + ".self_attn", rms(name + ".input_layernorm", x));
      const at::Tensor in = rms(name + ".post_attention_layernorm", x);
      x = x + linear(name + ".mlp.down_proj", at::silu(linear(name + ".mlp.gate_proj", in)) *
                                                  linear(name + ".mlp.up_proj", in));
    }
    return linear("lm_head", rms("model.norm", x));
  }

 private:
  const at::Tensor& of(const std::string& name) const { return parameters_.find(name)->second; }

  at::Tensor rms(const std::string& module, const at::Tensor& x) const {
    return of(module + ".weight") * (x * at::rsqrt(x.pow(2).mean(-1, true) + config_.norm_eps));
  }
  at::Tensor linear(const std::string& module, const at::Tensor& x) const {
    const at::ScalarType dtype =
        module.ends_with(kept_wide_) && !kept_wide_.empty() ? at::kFloat : at::kBFloat16;
    std::optional<at::Tensor> bias;
    if (const auto found = parameters_.find(module + ".bias"); found != parameters_.end())
      bias = found->second.to(dtype);
    return at::linear(x.to(dtype), of(module + ".weight").to(dtype), bias);
  }
  at::Tensor heads(const std::string& module, const at::Tensor& x) const {
    return linear(module, x).unflatten(-1, {-1, config_.head_dim}).transpose(1, 2);
  }
  at::Tensor rotated(const at::Tensor& x) const {
    const std::int64_t length = x.size(2), half = config_.head_dim / 2;
    const at::Tensor exponents = at::arange(0, config_.head_dim, 2, at::kLong).to(at::kFloat) /
                                 static_cast<double>(config_.head_dim);
    const at::Tensor frequencies = at::pow(config_.rope.theta, exponents).reciprocal();
    const at::Tensor angles = at::arange(length, at::kFloat).unsqueeze(1) *
                              at::cat({frequencies, frequencies}).unsqueeze(0);
    const at::Tensor turned = at::cat({x.slice(-1, half).neg(), x.slice(-1, 0, half)}, -1);
    return x * angles.cos() + turned * angles.sin();  // bf16 x fp32: fp32
  }
  at::Tensor attention(const std::string& module, const at::Tensor& x) const {
    const at::Tensor q = rotated(heads(module + ".q_proj", x)).to(at::kBFloat16);
    const at::Tensor k = rotated(heads(module + ".k_proj", x)).to(at::kBFloat16),
                     v = heads(module + ".v_proj", x);
    const std::int64_t groups = q.size(1) / k.size(1), length = q.size(2);
    const auto repeated = [&](const at::Tensor& t) { return t.repeat_interleave(groups, 1); };
    const at::Tensor mask =
        at::full({length, length}, std::numeric_limits<float>::lowest()).triu(1);
    const double scaling = std::pow(static_cast<double>(config_.head_dim), -0.5);
    // scaled in bf16, masked in fp32
    const at::Tensor scores = at::matmul(q, repeated(k).transpose(2, 3)) * scaling + mask;
    const at::Tensor out = at::matmul(at::softmax(scores, -1).to(at::kBFloat16), repeated(v));
    return linear(module + ".o_proj", out.transpose(1, 2).flatten(2));
  }

  const ModelConfig& config_;
  const Parameters& parameters_;
  std::string kept_wide_;
};

TEST(PrecisionForward, OfAutocastIsThatOfExplicitCasts) {
  Case item = step_case("autotp", {.tp = 2});
  item = with_heads(item, 6, 2);
  const auto model = make_model(item.config, AttentionImpl::kEager);
  Parameters parameters;
  for (const ParameterSpec& spec : model->parameters()) {
    parameters[spec.name] = case_weights(item)->read(spec, Shape(spec.shape.size(), 0), spec.shape);
  }
  const at::Tensor ids_BS = CaseData(item).global_batches(0).at(0).input_ids_BS;
  at::Tensor actual;
  {
    const AutocastScope autocast(at::kCPU, at::kBFloat16);
    actual = model->forward(ids_BS, parameters, Strategy(), nullptr);
  }

  EXPECT_EQ(actual.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::equal(ExplicitCasts(item.config, parameters, "").logits(ids_BS), actual));
  // One layer that is not rounded, and one that is rounded twice, are told apart.
  EXPECT_FALSE(at::equal(
      ExplicitCasts(item.config, parameters, "layers.1.self_attn.o_proj").logits(ids_BS), actual));
  EXPECT_FALSE(
      at::equal(model->forward(ids_BS, parameters, Strategy(), nullptr).to(at::kBFloat16), actual));
}

// Under autocast an ulp of an fp32 weight is rounded away; responses move weights by an ulp of what
// they are rounded to.
TEST(PrecisionForward, OfAutocastMovesWhenWeightsMoveByAnUlpOfBf16) {
  const Case item = in(Precision::kAutocast, step_case("ddp", {.dp = 2}));
  Case wide = item;
  wide.settings.autocast.reset();

  const RecordKey logits{0, RecordKind::kActivation, "lm_head", 0};
  const double response = reference_of(item).response(logits)->relative_error;

  EXPECT_GT(response, 0x1p-9);
  EXPECT_LT(response, 0x1p-4);
  EXPECT_LT(reference_of(wide).response(logits)->relative_error, 1e-5);
}

}  // namespace
}  // namespace isoshard
