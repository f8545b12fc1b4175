// SPDX-License-Identifier: Apache-2.0
// One body for all unsharded runs; the variants are data.
#include "suite/reference/plain_run.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/reference_name.h"
#include "core/mesh/mesh.h"
#include "subjects/optim/wrapped_optimizer.h"
#include "subjects/parallel/frozen_weights.h"
#include "subjects/train/torch_norm.h"
#include "suite/reference/cut_strategy.h"
#include "suite/reference/device/device_rank.h"
#include "suite/reference/next_samples.h"
#include "suite/reference/policy.h"
#include "suite/reference/reference.h"

namespace isoshard {
namespace {

bool depends_on_factor(const Site& site) {
  const NameRole role = parse_record_name(site.kind, site.name).role;
  return site.kind == RecordKind::kGrad || role == NameRole::kLoss ||
         role == NameRole::kLossBackward;
}

/// Passes on what a run with `factor` times the loss records, as the reference records it.
class OfScaledLoss final : public Sink {
 public:
  /// `groups`: forward passes that one micro-batch is taken in, each with the next samples. A pass
  /// visits a site once at most.
  OfScaledLoss(Sink& recorder, double factor, int groups = 1)
      : recorder_(&recorder), factor_(factor), groups_(static_cast<std::size_t>(groups)) {}
  void begin_step(int step) override {
    sums_.clear();
    recorder_->begin_step(step);
  }
  at::Tensor on_activation(const Site& site, at::Tensor value) override {
    if (const std::optional<Joined> whole = joined(site, value))
      (void)recorder_->on_activation(whole->site, whole->value);
    return value;
  }
  at::Tensor on_activation_grad(const Site& site, at::Tensor gradient) override {
    if (const std::optional<Joined> whole = joined(site, gradient))
      (void)recorder_->on_activation_grad(scaled(whole->site), whole->value);
    return gradient;
  }
  void on_record(const Site& site, const at::Tensor& value) override {
    // data and masks are those of the forward passes
    if (site.kind == RecordKind::kDataId || site.kind == RecordKind::kMask) return;
    // the sums of all ranks, at the end of a micro-batch
    if (parse_record_name(site.kind, site.name).role == NameRole::kMicroBatch &&
        ++sums_[site.name] % groups_ != 0)
      return;
    recorder_->on_record(depends_on_factor(site) ? scaled(site) : site, value);
  }

 private:
  struct Joined {
    Site site;
    at::Tensor value;
  };

  /// That of the whole micro-batch, once all of it was seen.
  std::optional<Joined> joined(const Site& site, const at::Tensor& value) {
    if (groups_ == 1) return Joined{site, value};
    std::vector<at::Tensor>& parts = parts_[{site.kind, site.name, site.recomputed}];
    parts.push_back(value.detach().clone());  // the loss may overwrite logits
    if (parts.size() < groups_) return std::nullopt;
    Joined whole{site, at::cat(std::exchange(parts, {}))};
    whole.site.layout.global_shape.at(0) = whole.value.size(0);
    return whole;
  }
  Site scaled(Site site) const {
    site.grad_scale *= factor_;
    return site;
  }

  Sink* recorder_;
  double factor_;
  std::size_t groups_;
  std::map<std::string, std::size_t> sums_;  ///< between forward passes, in this step
  std::map<std::tuple<RecordKind, std::string, bool>, std::vector<at::Tensor>> parts_;
};

class ScaledWeights final : public LossNormalizer {
 public:
  ScaledWeights(std::unique_ptr<LossNormalizer> inner, double factor)
      : inner_(std::move(inner)), factor_(factor) {}
  std::vector<double> weights(std::span<const std::int64_t> counts) override {
    std::vector<double> weights = inner_->weights(counts);
    for (double& weight : weights) weight *= factor_;
    return weights;
  }

 private:
  std::unique_ptr<LossNormalizer> inner_;
  double factor_;
};

NamedTensors divided(const NamedTensors& gradients, double factor) {
  NamedTensors result;
  for (const auto& [name, gradient] : gradients)
    result[name] = gradient.defined() ? gradient / factor : gradient;
  return result;
}

class NormOfScaled final : public GradNorm {
 public:
  NormOfScaled(std::unique_ptr<GradNorm> inner, double factor)
      : inner_(std::move(inner)), factor_(factor) {}
  double norm(const NamedTensors& gradients) override { return inner_->norm(gradients) / factor_; }
  double factor(double norm, double max_norm) override { return inner_->factor(norm, max_norm); }

 private:
  std::unique_ptr<GradNorm> inner_;
  double factor_;
};

class StepOfScaled final : public WrappedOptimizer {
 public:
  StepOfScaled(std::unique_ptr<Optimizer> inner, double factor)
      : WrappedOptimizer(std::move(inner)), factor_(factor) {}
  void step(NamedTensors& parameters, const NamedTensors& gradients) override {
    inner().step(parameters, divided(gradients, factor_));
  }

 private:
  double factor_;
};

/// Each piece of a gradient is to TorchGradNorm a gradient of its own.
class TorchNormOfPieces final : public GradNorm {
 public:
  TorchNormOfPieces(std::vector<ParameterSpec> specs, std::int64_t pieces)
      : specs_(std::move(specs)), pieces_(pieces), norm_(pieces_of(specs_, pieces)) {}
  double norm(const NamedTensors& gradients) override {
    NamedTensors cut;
    for (const ParameterSpec& spec : specs_) {
      const std::vector<at::Tensor> pieces =
          gradients.at(spec.name).flatten().tensor_split(pieces_);
      for (std::size_t i = 0; i < pieces.size(); ++i) cut[name_of_piece(spec.name, i)] = pieces[i];
    }
    return norm_.norm(cut);
  }
  double factor(double norm, double max_norm) override { return norm_.factor(norm, max_norm); }

 private:
  static std::string name_of_piece(const std::string& parameter, std::size_t piece) {
    return fmt::format("{}/{}", parameter, piece);
  }
  static std::vector<ParameterSpec> pieces_of(const std::vector<ParameterSpec>& specs,
                                              std::int64_t pieces) {
    std::vector<ParameterSpec> result;
    for (ParameterSpec spec : specs) {
      const std::string whole = spec.name;
      for (std::size_t i = 0; i < static_cast<std::size_t>(pieces); ++i) {
        spec.name = name_of_piece(whole, i);
        result.push_back(spec);
      }
    }
    return result;
  }

  std::vector<ParameterSpec> specs_;
  std::int64_t pieces_;
  TorchGradNorm norm_;
};

/// The loss times `factor`, and gradients divided by it where they are used.
void scale(TrainerParts& parts, double factor) {
  parts.loss_normalizer = std::make_unique<ScaledWeights>(std::move(parts.loss_normalizer), factor);
  parts.grad_norm = std::make_unique<NormOfScaled>(std::move(parts.grad_norm), factor);
  parts.optimizer = std::make_unique<StepOfScaled>(std::move(parts.optimizer), factor);
}

}  // namespace

PlainRun whole_batch_run(const CaseData& data, std::shared_ptr<const WeightSource> weights) {
  return {std::move(weights), [&data](int step) { return data.global_batches(step); }};
}

PlainRun regrouped_run(const Case& c, const CaseData& data,
                       std::shared_ptr<const WeightSource> weights) {
  PlainRun run;
  run.weights = std::move(weights);
  // Micro-batch by micro-batch, as the global batch has its samples: so masks stand where they did.
  run.batches = [&c, &data](int step) {
    std::vector<std::vector<TokenBatch>> of_ranks;
    for (int dp = 0; dp < c.degrees.dp; ++dp) of_ranks.push_back(data.rank_batches(step, dp));
    std::vector<TokenBatch> batches;
    for (std::size_t m = 0; m < of_ranks.front().size(); ++m) {
      for (std::vector<TokenBatch>& of_rank : of_ranks) batches.push_back(std::move(of_rank.at(m)));
    }
    return batches;
  };
  const int groups = c.degrees.dp;
  run.edit = [groups](TrainerParts& parts) {
    parts.takes_turns = true;
    scale(parts, groups);
  };
  run.between = [groups](Sink& recorder) {
    return std::make_unique<OfScaledLoss>(recorder, groups, groups);
  };
  return run;
}

PlainRun scaled_run(const Case& c, const CaseData& data,
                    std::shared_ptr<const WeightSource> weights) {
  PlainRun run = whole_batch_run(data, std::move(weights));
  const double factor = c.degrees.dp;
  run.edit = [factor](TrainerParts& parts) { scale(parts, factor); };
  run.between = [factor](Sink& recorder) {
    return std::make_unique<OfScaledLoss>(recorder, factor);
  };
  return run;
}

bool factor_shows(const Case& c) {
  const auto dp = static_cast<unsigned>(c.degrees.dp);
  return dp > 1 && (!std::has_single_bit(dp) || c.coarsest_dtype() == Dtype::kFloat16);
}

PlainRun pieces_run(const Case& c, const CaseData& data,
                    std::shared_ptr<const WeightSource> weights) {
  PlainRun run = whole_batch_run(data, std::move(weights));
  run.edit = [&c](TrainerParts& parts) {
    parts.strategy = std::make_shared<const EqualPieces>();
    if (c.settings.clip_norm == ClipNorm::kTorch) {
      parts.grad_norm = std::make_unique<TorchNormOfPieces>(
          trained_parameters(*parts.model, c.settings), std::max(2, c.degrees.dp));
    }
  };
  return run;
}

const MeshShape& world_of_one() {
  static const MeshShape shape({{Axis::kDp, 1}, {Axis::kTp, 1}});
  return shape;
}

namespace {
/// A trainer before its first step.
std::unique_ptr<Trainer> begun(const Case& c, const PlainRun& run,
                               std::shared_ptr<const WeightSource> weights, Mesh& mesh,
                               Sink* sink) {
  TrainerParts parts = plain_parts(trainer_config(c, std::move(weights)), mesh, c.degrees.dp);
  parts.recompute_every = 0;  // a reference keeps what it computed
  if (run.edit) run.edit(parts);
  auto trainer = std::make_unique<Trainer>(std::move(parts), mesh, sink);
  if (c.resumed.has_value()) {
    trainer->resume(c.resumed->path);
  } else {
    trainer->setup();
  }
  return trainer;
}

void run_plain(const Case& c, const PlainRun& run, Rank& rank, Sink& end) {
  const std::unique_ptr<Sink> between = run.between ? run.between(end) : nullptr;
  Sink* const sink = between == nullptr ? &end : between.get();
  DeviceRank device(c, rank.comm());
  Mesh mesh(world_of_one(), device.comm());
  rank.set_phase("setup");
  const std::unique_ptr<Trainer> trainer = begun(c, run, run.weights, mesh, sink);
  for (int step = c.first_step(); step < c.steps; ++step) {
    rank.set_phase(fmt::format("step {}", step));
    if (c.reload_after != 0 && c.reload_after == step) trainer->state();
    trainer->train_step(run.batches(step));
    record_next_samples(*sink, run.batches(step + 1), 1);
  }
  device.check();
}
}  // namespace

RunSpec plain_spec(const Case& c, PlainRun run) {
  RunSpec spec;
  spec.name = c.reference_slug();
  spec.subject = kReferenceName;
  spec.mesh = world_of_one();
  spec.policy = policy_of(c);
  spec.trace_bytes = trace_capacity(c);
  spec.on_each_host = true;
  spec.body = [&c, run = std::move(run)](Rank& rank, Sink& sink) { run_plain(c, run, rank, sink); };
  return spec;
}

}  // namespace isoshard
