// SPDX-License-Identifier: Apache-2.0
// One weight for embedding and head: its gradient is the sum of both uses.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "core/comm/thread/thread_world.h"
#include "subjects/model/config/builtin.h"
#include "subjects/train/parts.h"

namespace isoshard {
namespace {

// The head starts as a copy of the embedding, as if it were tied.
class HeadLikeEmbedding final : public WeightSource {
 public:
  [[nodiscard]] at::Tensor read(const ParameterSpec& spec, const Shape& offset,
                                const Shape& size) const override {
    ParameterSpec source = spec;
    if (spec.name == "lm_head.weight") source.name = "model.embed_tokens.weight";
    return weights_.read(source, offset, size);
  }

 private:
  InitialWeights weights_{0, 0.02, true};
};

NamedTensors gradients_of(bool tied) {
  TrainerConfig config;
  config.model = builtin_config("tiny");
  config.model.tie_word_embeddings = tied;
  config.dtype = Dtype::kFloat64;
  config.weights = std::make_shared<HeadLikeEmbedding>();
  const at::Tensor ids = (at::arange(26, at::kLong) * 31).remainder(96).view({2, 13});
  const TokenBatch batch{ids, ids, {0, 1}};
  NamedTensors gradients;
  ThreadWorld world(1);
  world.run([&](Communicator& comm) {
    Mesh mesh(MeshShape({{Axis::kDp, 1}, {Axis::kTp, 1}}), comm);
    Trainer trainer(plain_parts(config, mesh, 1), mesh, nullptr);
    trainer.setup();
    trainer.forward_backward({&batch, 1});
    trainer.reduce_gradients();
    gradients = trainer.gradients();
  });
  return gradients;
}

TEST(TiedHead, GradientIsTheSumOfBothUses) {
  const NamedTensors tied = gradients_of(true), untied = gradients_of(false);
  const at::Tensor &embedding = untied.at("model.embed_tokens.weight"),
                   &head = untied.at("lm_head.weight");
  const at::Tensor& both = tied.at("model.embed_tokens.weight");

  EXPECT_EQ(tied.count("lm_head.weight"), 0U);
  EXPECT_LE((both - (embedding + head)).norm().item<double>(), 1e-14 * both.norm().item<double>());
  EXPECT_GT((both - embedding).norm().item<double>(), 0.01 * both.norm().item<double>());
  EXPECT_GT((both - head).norm().item<double>(), 0.01 * both.norm().item<double>());
}

}  // namespace
}  // namespace isoshard
