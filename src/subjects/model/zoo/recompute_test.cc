// SPDX-License-Identifier: Apache-2.0
// Recomputed layers: the same bits, nothing kept in between, the second pass told from the first.
#include "subjects/model/zoo/recompute.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "subjects/model/config/builtin.h"
#include "subjects/model/ops/autocast.h"
#include "subjects/model/weights.h"
#include "subjects/model/zoo/registry.h"

namespace isoshard {
namespace {

class Passes final : public Sink {
 public:
  void begin_step(int /*step*/) override {}
  [[nodiscard]] at::Tensor on_activation(const Site& site, at::Tensor value) override {
    if (site.recomputed) {
      EXPECT_TRUE(at::equal(first.at(site.name), value.detach())) << site.name;
      ++num_second;
    } else {
      EXPECT_TRUE(first.emplace(site.name, value.detach().clone()).second) << site.name;
    }
    return value;
  }
  [[nodiscard]] at::Tensor on_activation_grad(const Site& site, at::Tensor gradient) override {
    EXPECT_TRUE(gradients.emplace(site.name, gradient.clone()).second) << site.name << " twice";
    return gradient;
  }
  void on_record(const Site& site, const at::Tensor& value) override {
    masks[site.recomputed ? 1 : 0][site.name] = value;
  }

  std::map<std::string, at::Tensor> first, gradients, masks[2];
  int num_second = 0;
};

struct Setting {
  std::string type;
  at::ScalarType dtype;
  double dropout = 0;
  bool autocast = false;
};

struct Outcome {
  at::Tensor logits;
  std::map<std::string, at::Tensor> gradients;
};

Outcome run(const Setting& setting, bool recompute, Passes& passes) {
  ModelConfig config = builtin_config(setting.type == "qwen2"     ? "tiny"
                                      : setting.type == "lattice" ? "lattice"
                                                                  : "tiny-" + setting.type);
  if (setting.dropout > 0) set_dropout(config, setting.dropout);
  const auto model = make_model(config, AttentionImpl::kEager);
  const InitialWeights weights(11, 0.2, /*generic=*/true);
  Parameters parameters;
  for (const ParameterSpec& spec : model->parameters()) {
    parameters.emplace(spec.name, weights.read(spec, Shape(spec.shape.size(), 0), spec.shape)
                                      .to(setting.dtype)
                                      .requires_grad_(true));
  }
  const RngStreams streams(5);
  TrainingPass pass;
  pass.streams = &streams;
  pass.mesh = MeshShape({{Axis::kDp, 1}});
  pass.recompute_every = recompute ? 1 : 0;
  const Strategy strategy;
  Outcome outcome;
  // the second adds to the first one's gradients
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
    pass.first_sample = 2 * micro_batch;
    passes = Passes();
    {
      std::optional<AutocastScope> autocast;
      if (setting.autocast) autocast.emplace(at::kCPU, at::kBFloat16);
      const at::Tensor ids =
          (at::arange(14, at::kLong) * 7 + micro_batch).remainder(config.vocab_size).view({2, 7});
      outcome.logits = model->forward(ids, parameters, strategy, &passes, pass);
    }
    // The lattice model's gradients are exact with a linear loss only, and its embedding's come
    // from several layers.
    const at::Tensor wide = outcome.logits.to(at::kDouble);
    (setting.type == "lattice" ? wide : at::sin(wide)).sum().backward();
  }
  for (const auto& [name, parameter] : parameters) outcome.gradients[name] = parameter.grad();
  return outcome;
}

class Recomputation : public testing::TestWithParam<Setting> {};

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const char* type : {"qwen2", "qwen3", "llama", "gpt2", "megatron_gpt"}) {
      all.push_back({type, dtype});
      all.push_back({type, dtype, 0.2});
    }
    all.push_back({"lattice", dtype});
  }
  for (const char* type : {"qwen2", "gpt2", "megatron_gpt"})
    all.push_back({type, at::kFloat, 0.2, true});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Models, Recomputation, testing::ValuesIn(settings()),
                         [](const auto& tested) {
                           const Setting& s = tested.param;
                           return s.type + (s.dtype == at::kFloat ? "_fp32" : "_bf16") +
                                  (s.dropout > 0 ? "_drop" : "") + (s.autocast ? "_autocast" : "");
                         });

TEST_P(Recomputation, ValueAndGradientsHaveTheBitsThatTheyHaveWithout) {
  Passes kept, repeated;

  const Outcome without = run(GetParam(), false, kept), with = run(GetParam(), true, repeated);

  EXPECT_TRUE(at::equal(without.logits, with.logits));
  for (const auto& [name, gradient] : without.gradients) {
    ASSERT_EQ(gradient.defined(), with.gradients.at(name).defined()) << name;
    if (!gradient.defined()) continue;
    EXPECT_TRUE(at::equal(gradient, with.gradients.at(name))) << name;
  }
  ASSERT_EQ(kept.first.size(), repeated.first.size());
  ASSERT_EQ(kept.gradients.size(), repeated.gradients.size());
  for (const auto& [name, value] : kept.first)
    EXPECT_TRUE(at::equal(value, repeated.first.at(name))) << name;
  for (const auto& [name, gradient] : kept.gradients)
    EXPECT_TRUE(at::equal(gradient, repeated.gradients.at(name))) << name;
  EXPECT_EQ(kept.num_second, 0);
  EXPECT_GE(repeated.num_second, 2 * 8) << "no layer was run again";
}

TEST_P(Recomputation, TheSecondPassDrawsTheMasksOfTheFirst) {
  Passes passes;

  static_cast<void>(run(GetParam(), true, passes));

  EXPECT_EQ(passes.masks[0].empty(), GetParam().dropout == 0);
  std::size_t outside_layers = 0;
  for (const auto& [name, mask] : passes.masks[0]) {
    const bool in_layer =
        name.find(".layers.") != std::string::npos || name.find(".h.") != std::string::npos;
    if (!in_layer) {
      ++outside_layers;
    } else {
      EXPECT_TRUE(at::equal(mask, passes.masks[1].at(name))) << name;
    }
  }
  EXPECT_EQ(passes.masks[1].size() + outside_layers, passes.masks[0].size());
}

// A layer that remembers its own activation: without a graph nothing holds it once the layer has
// returned.
TEST(RecomputedLayer, KeepsItsInputOnly) {
  const Parameters none;
  const Strategy strategy;
  for (const bool recompute : {false, true}) {
    TrainingPass training;
    training.recompute_every = recompute ? 1 : 0;
    const ForwardPass pass(none, strategy, nullptr, training);
    std::vector<c10::weak_intrusive_ptr<at::TensorImpl>> inner;
    const at::Tensor x = at::ones({3}).requires_grad_(true);

    const at::Tensor y =
        pass.layer(0, {x * 1}, [&](const ForwardPass&, std::span<const at::Tensor> inputs) {
          const at::Tensor middle = inputs[0].sin();
          inner.emplace_back(middle.getIntrusivePtr());
          return middle.sin();
        });
    ASSERT_EQ(inner.size(), 1U);
    EXPECT_EQ(inner[0].expired(), recompute);
    y.sum().backward();

    EXPECT_EQ(inner.size(), recompute ? 2U : 1U);
    EXPECT_TRUE(at::equal(x.grad(), at::ones({3}).sin().cos() * at::ones({3}).cos()));
  }
}

}  // namespace
}  // namespace isoshard
