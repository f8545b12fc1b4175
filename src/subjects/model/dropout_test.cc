// SPDX-License-Identifier: Apache-2.0
// Where each architecture drops, by how much, and that an evaluation does not.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "subjects/model/config/builtin.h"
#include "subjects/model/weights.h"
#include "subjects/model/zoo/blocks.h"
#include "subjects/model/zoo/registry.h"

namespace isoshard {
namespace {

using testing::ElementsAreArray;
using testing::HasSubstr;

class Masks final : public Sink {
 public:
  void begin_step(int /*step*/) override {}
  [[nodiscard]] at::Tensor on_activation(const Site& site, at::Tensor value) override {
    values.insert_or_assign(site.name, value.detach());
    return value;
  }
  [[nodiscard]] at::Tensor on_activation_grad(const Site& /*site*/, at::Tensor gradient) override {
    return gradient;
  }
  void on_record(const Site& site, const at::Tensor& value) override {
    ASSERT_EQ(site.kind, RecordKind::kMask);
    ASSERT_TRUE(masks.emplace(site.name, value).second) << site.name << " twice";
  }

  std::map<std::string, at::Tensor> values, masks;
};

Parameters weights_of(const Model& model) {
  const InitialWeights weights(11, 0.2, /*generic=*/true);
  Parameters parameters;
  for (const ParameterSpec& spec : model.parameters()) {
    parameters.emplace(spec.name, weights.read(spec, Shape(spec.shape.size(), 0), spec.shape));
  }
  return parameters;
}

const at::Tensor& ids() {
  static const at::Tensor ids_23 = (at::arange(6, at::kLong) * 37 % 96).view({2, 3});
  return ids_23;
}

TrainingPass training_pass(const RngStreams& streams) {
  TrainingPass pass;
  pass.streams = &streams;
  pass.mesh = MeshShape({{Axis::kDp, 1}});
  return pass;
}

std::vector<std::string> expected_sites(const std::string& type) {
  if (type == "gpt2") {
    return {"transformer.drop",
            "transformer.h.0.attn.attn_dropout",
            "transformer.h.0.attn.resid_dropout",
            "transformer.h.0.mlp.dropout",
            "transformer.h.1.attn.attn_dropout",
            "transformer.h.1.attn.resid_dropout",
            "transformer.h.1.mlp.dropout"};
  }
  if (type == "megatron_gpt") {
    return {"decoder.layers.0.mlp_bda",
            "decoder.layers.0.self_attention.core_attention.attention_dropout",
            "decoder.layers.0.self_attn_bda",
            "decoder.layers.1.mlp_bda",
            "decoder.layers.1.self_attention.core_attention.attention_dropout",
            "decoder.layers.1.self_attn_bda",
            "embedding.embedding_dropout"};
  }
  return {"model.layers.0.self_attn.attention_dropout",
          "model.layers.1.self_attn.attention_dropout"};
}

TEST(DropoutSites, EachArchitectureDropsWhereItsOriginalDoes) {
  const RngStreams streams(1);
  for (const std::string type : {"qwen2", "qwen3", "llama", "gpt2", "megatron_gpt"}) {
    ModelConfig config = builtin_config(type == "qwen2" ? "tiny" : "tiny-" + type);
    set_dropout(config, 0.25);
    const auto model = make_model(config, AttentionImpl::kEager);
    Masks sink;

    static_cast<void>(
        model->forward(ids(), weights_of(*model), Strategy(), &sink, training_pass(streams)));

    std::vector<std::string> names;
    for (const auto& [name, mask] : sink.masks) {
      names.push_back(name);
      EXPECT_EQ(mask.scalar_type(), at::kBool);
      EXPECT_EQ(mask.sizes(), name.find("att") != std::string::npos &&
                                      name.find("resid") == std::string::npos &&
                                      !name.ends_with("_bda")
                                  ? at::IntArrayRef({2, 6, 3, 3})
                                  : at::IntArrayRef({2, 3, 48}))
          << name;
    }
    EXPECT_THAT(names, ElementsAreArray(expected_sites(type))) << type;
  }
}

TEST(DropoutSites, KeptElementsAreDividedByTheirShareAndOthersAreZero) {
  const RngStreams streams(1);
  ModelConfig config = builtin_config("tiny-gpt2");
  const auto plain = make_model(config, AttentionImpl::kEager);
  config.embedding_dropout = 0.25;
  const auto model = make_model(config, AttentionImpl::kEager);
  const Parameters parameters = weights_of(*model);
  Masks with, without;

  static_cast<void>(model->forward(ids(), parameters, Strategy(), &with, training_pass(streams)));
  static_cast<void>(
      plain->forward(ids(), parameters, Strategy(), &without, training_pass(streams)));

  const at::Tensor mask = with.masks.at("transformer.drop");
  EXPECT_TRUE(at::equal(with.values.at("transformer.drop"),
                        without.values.at("transformer.drop") * mask.to(at::kFloat).div_(0.75)));
  EXPECT_FALSE(mask.all().item<bool>());
  EXPECT_TRUE(without.masks.empty());
}

TEST(DropoutSites, AnEvaluationDropsNothing) {
  ModelConfig config = builtin_config("tiny-gpt2");
  const auto plain = make_model(config, AttentionImpl::kEager);
  set_dropout(config, 0.5);
  const auto model = make_model(config, AttentionImpl::kEager);
  const Parameters parameters = weights_of(*model);
  Masks sink;

  const at::Tensor logits = model->forward(ids(), parameters, Strategy(), &sink);

  EXPECT_TRUE(at::equal(logits, plain->forward(ids(), parameters, Strategy(), nullptr)));
  EXPECT_TRUE(sink.masks.empty());
}

// A sample's place in the step's global batch decides, not the batch that it comes in.
TEST(DropoutMasks, OfASampleDoNotDependOnTheMicroBatchThatItIsIn) {
  const RngStreams streams(1);
  ModelConfig config = builtin_config("tiny-gpt2");
  set_dropout(config, 0.3);
  const auto model = make_model(config, AttentionImpl::kEager);
  const Parameters parameters = weights_of(*model);
  Masks whole, second;

  static_cast<void>(model->forward(ids(), parameters, Strategy(), &whole, training_pass(streams)));
  TrainingPass pass = training_pass(streams);
  pass.first_sample = 1;
  static_cast<void>(model->forward(ids().narrow(0, 1, 1), parameters, Strategy(), &second, pass));

  ASSERT_EQ(whole.masks.size(), 7U);
  for (const auto& [name, mask] : whole.masks)
    EXPECT_TRUE(at::equal(mask.narrow(0, 1, 1), second.masks.at(name))) << name;
}

// A strategy that holds a part of the positions, as sequence parallelism does between its regions.
class SequenceShard final : public Strategy {
 public:
  explicit SequenceShard(std::int64_t ranks) : ranks_(ranks) {}
  [[nodiscard]] ActivationLayouts activation_layouts(std::string_view /*point*/,
                                                     const at::Tensor& local,
                                                     int /*tp_dim*/) const override {
    Layout layout = replicated(local.sizes().vec());
    layout.global_shape[1] *= ranks_;
    layout.placements.push_back(shard(Axis::kTp, 1));
    return {layout, layout};
  }

 private:
  std::int64_t ranks_;
};

TEST(DropoutMasks, OfASequenceShardAreItsPartOfTheWholeMask) {
  const RngStreams streams(1);
  const Parameters none;
  const at::Tensor x = at::ones({2, 12, 5});
  Masks whole_sink, part_sink;
  static_cast<void>(
      ForwardPass(none, Strategy(), &whole_sink, training_pass(streams)).dropout("site", x, 0.4));

  TrainingPass pass = training_pass(streams);
  pass.mesh = MeshShape({{Axis::kDp, 1}, {Axis::kTp, 3}});
  pass.rank = 2;
  const at::Tensor part =
      ForwardPass(none, SequenceShard(3), &part_sink, pass).dropout("site", x.narrow(1, 8, 4), 0.4);

  EXPECT_TRUE(at::equal(part_sink.masks.at("site"), whole_sink.masks.at("site").narrow(1, 8, 4)));
  EXPECT_TRUE(at::equal(part != 0, part_sink.masks.at("site")));
}

// A strategy that says of a part of what a rank holds where it lies, and of the rest nothing.
class HalfKnown final : public Strategy {
 public:
  [[nodiscard]] ActivationLayouts activation_layouts(std::string_view /*point*/,
                                                     const at::Tensor& local,
                                                     int /*tp_dim*/) const override {
    Layout layout = replicated(local.sizes().vec());
    layout.explicit_parts = true;
    Shape half = layout.global_shape;
    half[1] /= 2;
    layout.boxes = {{.local_offset = {0, 0, 0}, .global_offset = {0, 0, 0}, .size = half}};
    return {layout, layout};
  }
};

TEST(DropoutMasks, AreRefusedWhereALayoutLeavesElementsOut) {
  const RngStreams streams(1);
  const Parameters none;

  try {
    static_cast<void>(ForwardPass(none, HalfKnown(), nullptr, training_pass(streams))
                          .dropout("site", at::ones({2, 12, 5}), 0.4));
    FAIL() << "half of the mask was made up";
  } catch (const ShapeError& error) {
    EXPECT_THAT(error.what(), HasSubstr("dropout site: the rank's [2, 12, 5] must be boxes"));
  }
}

TEST(DropoutSites, RefuseWhatCannotBeRepeatedOrDoesNotExist) {
  ModelConfig lattice = builtin_config("lattice"), qwen = builtin_config("tiny");
  EXPECT_THROW(set_dropout(lattice, 0.1), UsageError);
  set_dropout(lattice, 0);
  set_dropout(qwen, 0.1);
  EXPECT_EQ(qwen.attention_dropout, 0.1);
  EXPECT_EQ(qwen.residual_dropout, 0.0) << "Qwen2 has none";
  const RngStreams streams(1);
  const auto sdpa = make_model(qwen, AttentionImpl::kSdpa);
  try {
    static_cast<void>(
        sdpa->forward(ids(), weights_of(*sdpa), Strategy(), nullptr, training_pass(streams)));
    FAIL() << "sdpa with dropout was taken";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("eager"));
  }
}

}  // namespace
}  // namespace isoshard
