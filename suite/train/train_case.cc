// SPDX-License-Identifier: Apache-2.0
// The body of a rank that trains, and one curve out of what the ranks posted.
#include "suite/train/train_case.h"

#include <fmt/format.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "core/base/error.h"
#include "core/base/hex_float.h"
#include "fixtures/cases/case_settings.h"
#include "fixtures/inputs/input_digests.h"
#include "fixtures/inputs/inputs.h"
#include "harness/world/process_name.h"
#include "subjects/registry/subject_spec.h"
#include "suite/record/make_subject.h"
#include "suite/reference/perturbed_weights.h"
#include "suite/reference/plain_run.h"

namespace isoshard {
namespace {

bool is_reference(const Case& item) {
  return isoshard::is_reference(item.subject);
}

MeshShape mesh_of(const Case& item) {
  return is_reference(item) ? world_of_one() : item.mesh();
}

/// Whether any rank says so: all end in the same step.
bool any_rank(Rank& rank, bool here) {
  double flag = here ? 1 : 0;
  const Buffer buffer{reinterpret_cast<std::byte*>(&flag), 1, Dtype::kFloat64};
  rank.comm().all_reduce(buffer, Reduction::kMax, {Purpose::kSetup, Axis::kWorld, {}}).wait();
  return flag > 0;
}

SubjectEdits edits_of(const Case& item, const TrainOptions& options) {
  SubjectEdits edits = options.run.edits;
  if (options.perturbed_by == 0) return edits;
  // One ulp of the coarsest dtype on the way: of what autocast rounds, and of reductions or an
  // output that are rounded more.
  std::optional<Dtype> rounded_to = item.settings.autocast;
  if (item.coarsest_dtype() != rounded_to.value_or(item.dtype)) rounded_to = item.coarsest_dtype();
  edits.parts = [inner = edits.parts, seed = options.perturbed_by, dtype = item.dtype, rounded_to](
                    TrainerParts& parts, Mesh& mesh) {
    parts.weights = std::make_shared<PerturbedWeights>(parts.weights, seed, dtype, rounded_to);
    if (inner) inner(parts, mesh);
  };
  return edits;
}

void train(const Case& item, const CaseData& data, const TrainOptions& options, Sink& head,
           CurveSink& curve, Rank& rank) {
  RunOptions run = options.run;
  run.edits = edits_of(item, options);
  run_steps(item, data, run, head, rank, [&](int step) {
    if (options.on_step && rank.rank() == 0) options.on_step(step);
    return !any_rank(rank, !is_finite(curve.current()));
  });
}

struct Spec {
  Case item;
  TrainOptions options;
  CaseData data;
  int watch_from = -1;
};

CurveSinkOptions sink_options(const Spec& spec, int rank) {
  CurveSinkOptions options;
  options.mesh = mesh_of(spec.item);
  options.rank = rank;
  options.num_steps = spec.item.steps;
  options.check_interval = spec.options.check_interval;
  options.watch_from = spec.watch_from;
  return options;
}

WorldRun start(const std::shared_ptr<const Spec>& spec) {
  RunSpec run = run_spec_of(spec->item, spec->options.run);
  run.mesh = mesh_of(spec->item);
  if (const std::uint64_t seed = spec->options.perturbed_by; seed != 0)
    run.process_name = process_name("response", static_cast<int>(seed));
  run.on_each_host = is_reference(spec->item) && spec->item.save_path.empty();
  return {default_launcher(), run, Processes::kOneARank, [spec](int r) {
            const auto sink = std::make_shared<CurveSink>(sink_options(*spec, r));
            ProcessWork work;
            work.ends = {sink};
            work.body = [spec, sink](Rank& rank, std::span<Sink* const> heads) {
              const SamplerDecorator& sampler = spec->options.run.sampler;
              train(spec->item,
                    sampler ? spec->data.with_sampler(sampler, rank.rank()) : spec->data,
                    spec->options, *heads.front(), *sink, rank);
            };
            work.message = [sink](std::size_t) { return sink->finish().serialize(); };
            return work;
          }};
}

std::vector<RankCurve> curves_of(const Spec& spec, WorldRun run) {
  std::vector<RankCurve> curves;
  for (const std::vector<std::byte>& message : run.wait()) {
    curves.push_back(RankCurve::deserialize(message));
    if (curves.back().steps.empty()) {
      throw InfrastructureError(
          fmt::format("{}: rank {} reported no loss", spec.item.slug(), curves.size() - 1));
    }
  }
  return curves;
}

bool same_bits(double a, double b) {
  return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

std::string unequal_numbers(std::span<const RankCurve> ranks) {
  for (std::size_t i = 0; i < ranks[0].steps.size(); ++i) {
    for (std::size_t r = 1; r < ranks.size(); ++r) {
      if (ranks[r].steps.size() != ranks[0].steps.size())
        return fmt::format("ranks 0 and {} report different numbers of steps", r);
      const CurveStep &first = ranks[0].steps[i], &other = ranks[r].steps[i];
      for (const auto& [name, a, b] :
           {std::tuple("loss", first.loss, other.loss),
            std::tuple("grad_norm", first.grad_norm, other.grad_norm),
            std::tuple("learning_rate", first.learning_rate, other.learning_rate)}) {
        if (!same_bits(a, b))
          return fmt::format("{} of step {}: rank 0 reports {} ({}), rank {} {} ({})", name,
                             first.step, a, to_hex(a), r, b, to_hex(b));
      }
    }
  }
  return "";
}

/// Every rank reports the loss of its own dp rank, and ranks of one dp rank the same one. In a
/// pipeline those of one stage do.
std::string unequal_rank_losses(const MeshShape& mesh, std::span<const RankCurve> ranks) {
  for (std::size_t i = 0; i < ranks[0].steps.size(); ++i) {
    std::map<int, std::size_t> first_of;  // dp coordinate -> rank
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      const CurveStep& step = ranks[r].steps[i];
      if (step.rank_losses.empty() && mesh.degree(Axis::kPp) > 1) continue;
      if (step.rank_losses.size() != 1)
        return fmt::format("rank {} reports {} losses of its dp rank in step {}, must be 1", r,
                           step.rank_losses.size(), step.step);
      const int dp = mesh.coordinate(static_cast<int>(r), Axis::kDp);
      const std::size_t first = first_of.emplace(dp, r).first->second;
      const double a = ranks[first].steps[i].rank_losses[0], b = step.rank_losses[0];
      if (!same_bits(a, b))
        return fmt::format(
            "loss of dp rank {} of step {}: rank {} reports {} ({}), rank {} {} ({})", dp,
            step.step, first, a, to_hex(a), r, b, to_hex(b));
    }
    if (first_of.size() != static_cast<std::size_t>(mesh.degree(Axis::kDp)))
      return fmt::format("{} of {} dp ranks report their loss in step {}", first_of.size(),
                         mesh.degree(Axis::kDp), ranks[0].steps[i].step);
  }
  return "";
}

/// Rank 0's numbers, with every dp rank's own loss.
std::vector<CurveStep> steps_of(const Case& item, std::span<const RankCurve> ranks) {
  std::vector<CurveStep> steps = ranks[0].steps;
  if (is_reference(item)) return steps;
  const MeshShape mesh = mesh_of(item);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    std::map<int, double> losses;
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      if (i >= ranks[r].steps.size() || ranks[r].steps[i].rank_losses.size() != 1) continue;
      losses.emplace(mesh.coordinate(static_cast<int>(r), Axis::kDp),
                     ranks[r].steps[i].rank_losses.front());
    }
    steps[i].rank_losses.clear();
    for (const auto& [dp, loss] : losses) steps[i].rank_losses.push_back(loss);
  }
  return steps;
}

/// What a case starts from and reads; of cases with one reference it is the same.
const std::map<std::string, std::string>& input_digests(const Case& item) {
  static std::map<std::string, std::map<std::string, std::string>> known;
  const auto [place, is_new] = known.try_emplace(item.reference_slug());
  if (is_new)
    place->second = {{std::string(kInitialWeightsKey), weights_sha256(item)},
                     {std::string(kBatchesKey), batches_sha256(item)}};
  return place->second;
}

Curve empty_curve(const Case& item, const TrainOptions& options) {
  Curve curve;
  curve.subject = item.subject;
  curve.title = title_of_subject(item.subject);
  curve.case_slug = item.slug();
  curve.mesh = {{"dp", is_reference(item) ? 1 : item.degrees.dp},
                {"tp", is_reference(item) ? 1 : item.degrees.tp}};
  for (const Axis axis : {Axis::kPp, Axis::kCp}) {
    if (!is_reference(item) && item.degrees[axis] > 1)
      curve.mesh[std::string(name_of(axis))] = item.degrees[axis];
  }
  curve.settings =
      nlohmann::json::parse(bundle_settings(item, policy_of(item))).at("training").dump();
  curve.fingerprint = {
      {"libtorch", TORCH_VERSION},
      {"reduction_order", std::string(name_of(options.run.order.value_or(item.reduction_order)))}};
  curve.fingerprint.insert(input_digests(item).begin(), input_digests(item).end());
  return curve;
}

std::optional<NonFiniteStep> non_finite_step(std::span<const CurveStep> steps) {
  for (const CurveStep& step : steps) {
    if (!std::isfinite(step.loss)) return NonFiniteStep{step.step, "loss", step.loss, {}, -1};
    if (!std::isfinite(step.grad_norm))
      return NonFiniteStep{step.step, "grad_norm", step.grad_norm, {}, -1};
  }
  return std::nullopt;
}

/// The first of all ranks: they execute the same tensors in the same order.
void locate(NonFiniteStep& found, std::span<const RankCurve> ranks) {
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const std::optional<NonFiniteTensor>& tensor = ranks[r].first_non_finite;
    if (!tensor.has_value() || (found.tensor.has_value() && found.tensor->order <= tensor->order))
      continue;
    found.tensor = tensor;
    found.rank = static_cast<int>(r);
  }
}

}  // namespace

struct TrainingRun::Impl {
  std::shared_ptr<const Spec> spec;
  WorldRun world;
};

TrainingRun::TrainingRun(const Case& item, TrainOptions options) {
  (void)subject_spec(item.subject);
  item.validate();
  require_usable_checkpoint(item);
  if (item.reload_after != 0) options.run.checkpoints = std::make_shared<ScratchFolder>();
  Case trained = item;
  if (options.perturbed_by != 0) trained.save_path.clear();  // what is saved is the run itself
  auto spec = std::make_shared<const Spec>(Spec{trained, std::move(options), CaseData(item)});
  impl_ = std::make_unique<Impl>(Impl{spec, start(spec)});
}
TrainingRun::TrainingRun(TrainingRun&&) noexcept = default;
TrainingRun::~TrainingRun() = default;

TrainedCase TrainingRun::wait() {
  const Spec& spec = *impl_->spec;
  std::vector<RankCurve> ranks = curves_of(spec, std::move(impl_->world));
  TrainedCase trained;
  trained.curve = empty_curve(spec.item, spec.options);
  trained.curve.steps = steps_of(spec.item, ranks);
  trained.unequal_numbers = unequal_numbers(ranks);
  if (trained.unequal_numbers.empty() && !is_reference(spec.item))
    trained.unequal_numbers = unequal_rank_losses(mesh_of(spec.item), ranks);
  Trace copies{spec.item.subject, spec.item.slug(), mesh_of(spec.item), {}};
  for (RankCurve& rank : ranks) copies.ranks.push_back(std::move(rank.copies));
  trained.unequal_copies = find_unequal_copies(copies);
  for (const RankCurve& rank : ranks) {
    if (trained.non_finite.has_value()) break;
    trained.non_finite = non_finite_step(rank.steps);
  }
  if (!trained.non_finite.has_value()) return trained;
  // Runs are bit-equal: a second one meets the same numbers, and looks at every tensor from the
  // step before on.
  auto again = std::make_shared<Spec>(spec);
  again->item.save_path.clear();
  ++again->options.run.number;
  again->watch_from = std::max(0, trained.non_finite->step - 1);
  locate(*trained.non_finite, curves_of(*again, start(again)));
  return trained;
}

Curve untrained_curve(const Case& item) {
  return empty_curve(item, TrainOptions());
}

TrainedCase train_case(const Case& item, const TrainOptions& options) {
  return TrainingRun(item, options).wait();
}

}  // namespace isoshard
