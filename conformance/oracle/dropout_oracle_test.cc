// SPDX-License-Identifier: Apache-2.0
// Contract oracle.dropout: masks of torch and ours differ, but not what they do on average. Means
// over seeds of a step with dropout are those that transformers gave.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "core/base/hex_float.h"
#include "core/comm/thread/thread_world.h"
#include "core/io/json.h"
#include "core/io/safetensors.h"
#include "core/tensor/convert.h"
#include "fixtures/oracle/oracle_files.h"
#include "subjects/checkpoint/file_weights.h"
#include "subjects/model/zoo/registry.h"
#include "subjects/train/parts.h"

namespace isoshard {
namespace {

constexpr int kSeeds = 64;

struct MeanOfSeeds {
  double mean = 0, standard_error = 0;
};
using Means = std::map<std::string, MeanOfSeeds>;

const nlohmann::json& stored_dropout() {
  static const nlohmann::json stored =
      read_json_file(std::filesystem::path(ISOSHARD_ORACLE_DIR) / "training" / "dropout.json");
  return stored;
}

Means stored_means(const std::string& site) {
  Means means;
  for (const auto& [name, stored] : stored_dropout().at("sites").at(site).items())
    means[name] = {parse_hex(stored.at("mean").get<std::string>()).value(),
                   parse_hex(stored.at("standard_error").get<std::string>()).value()};
  return means;
}

/// Keeps what passes at some points of the model.
class PointRecorder final : public Sink {
 public:
  explicit PointRecorder(std::vector<std::string> points) : points_(std::move(points)) {}
  void begin_step(int /*step*/) override {}
  [[nodiscard]] at::Tensor on_activation(const Site& site, at::Tensor value) override {
    for (std::size_t i = 0; i < points_.size(); ++i) {
      if (points_[i] == site.name)
        states_[fmt::format("hidden.{}", i)] = value.detach().to(at::kDouble);
    }
    return value;
  }
  [[nodiscard]] at::Tensor on_activation_grad(const Site& /*site*/, at::Tensor gradient) override {
    return gradient;
  }
  void on_record(const Site& /*site*/, const at::Tensor& /*value*/) override {}
  [[nodiscard]] const NamedTensors& states() const noexcept { return states_; }

 private:
  std::vector<std::string> points_;
  NamedTensors states_;
};

/// Draws masks of another rate than what is kept is scaled for.
class OtherRate final : public RngStreams {
 public:
  OtherRate(std::uint64_t seed, double factor) : RngStreams(seed), factor_(factor) {}
  [[nodiscard]] at::Tensor keep_mask(const MaskPart& part) const override {
    MaskPart other = part;
    other.rate *= factor_;
    return RngStreams::keep_mask(other);
  }

 private:
  double factor_;
};

/// Means over `kSeeds` seeds of one step; `factor` on the rate of the masks alone.
Means own_means(const std::string& site, double factor = 1) {
  const std::filesystem::path folder =
      std::filesystem::path(ISOSHARD_ORACLE_DIR) / stored_dropout().at("model");
  TrainerConfig config;
  config.model = detail::read_oracle_config(folder);
  const auto model = make_model(config.model, config.attention);
  config.weights = std::make_shared<FileWeights>(folder / "model.safetensors", model->parameters());
  const double rate = stored_dropout().at("rate");
  (site == "embedding"   ? config.model.embedding_dropout
   : site == "attention" ? config.model.attention_dropout
                         : config.model.residual_dropout) = rate;
  config.settings.max_grad_norm = 0;
  const SafetensorsFile file = SafetensorsFile::open(folder / "train_batches.safetensors");
  const at::Tensor ids = tensor_of(file.tensor("batches"))[0].clone();
  const TokenBatch batch{ids, ids, {0, 1}};

  std::map<std::string, std::vector<double>> draws;
  ThreadWorld world(1);
  world.run([&](Communicator& comm) {
    Mesh mesh(MeshShape({{Axis::kDp, 1}, {Axis::kTp, 1}}), comm);
    PointRecorder recorder(model->hidden_state_points());
    NamedTensors still;
    for (int seed = -1; seed < kSeeds; ++seed) {
      TrainerParts parts = plain_parts(config, mesh, 1);
      parts.streams = std::make_shared<OtherRate>(static_cast<std::uint64_t>(seed + 1), factor);
      Trainer trainer(std::move(parts), mesh, &recorder);
      trainer.setup();
      trainer.set_training(seed >= 0);
      trainer.forward_backward({&batch, 1});
      if (seed < 0) {
        still = recorder.states();
        continue;
      }
      trainer.reduce_gradients();
      trainer.clip();
      draws["loss"].push_back(trainer.loss());
      draws["grad_norm"].push_back(trainer.grad_norm());
      for (const auto& [name, state] : recorder.states()) {
        const at::Tensor& h = still.at(name);
        draws[name].push_back(((state * h).sum() / h.square().sum()).item<double>());
      }
    }
  });
  Means means;
  for (const auto& [name, values] : draws) {
    const at::Tensor all = at::tensor(values, at::kDouble);
    means[name] = {all.mean().item<double>(),
                   all.std().item<double>() / std::sqrt(static_cast<double>(kSeeds))};
  }
  return means;
}

/// How many standard errors two means are apart; equal ones are 0 apart.
double apart(const MeanOfSeeds& a, const MeanOfSeeds& b) {
  if (std::abs(a.mean - b.mean) <= 1e-6 * std::abs(a.mean)) return 0;
  return std::abs(a.mean - b.mean) / std::hypot(a.standard_error, b.standard_error);
}

class OracleDropout : public testing::TestWithParam<std::string> {};

TEST_P(OracleDropout, HasTheMeansOfTransformers) {
  const Means stored = stored_means(GetParam()), own = own_means(GetParam());

  EXPECT_EQ(stored.size(), 5U) << "loss, norm, embedding, first layer, final norm";
  for (const auto& [name, mean] : stored) {
    ASSERT_TRUE(own.contains(name)) << name;
    EXPECT_LE(apart(mean, own.at(name)), 4)
        << name << ": " << mean.mean << " +- " << mean.standard_error << " stored, "
        << own.at(name).mean << " +- " << own.at(name).standard_error << " ours";
    RecordProperty(name, fmt::format("{:.2f} standard errors", apart(mean, own.at(name))));
  }
}

TEST_P(OracleDropout, AScaleThatIsNotThatOfTheMasksIsOutside) {
  const Means stored = stored_means(GetParam()), own = own_means(GetParam(), 0.8);

  double farthest = 0;
  for (const auto& [name, mean] : stored) farthest = std::max(farthest, apart(mean, own.at(name)));
  EXPECT_GT(farthest, 8);
}

INSTANTIATE_TEST_SUITE_P(Sites, OracleDropout,
                         testing::Values("embedding", "attention", "residual"),
                         [](const auto& tested) { return tested.param; });

}  // namespace
}  // namespace isoshard
