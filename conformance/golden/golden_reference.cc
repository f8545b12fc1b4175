// SPDX-License-Identifier: Apache-2.0
// Six runs side by side, and one verdict.
#include "conformance/golden/golden_reference.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.h"

namespace isoshard {
namespace {

constexpr int kPerturbed = 5;
constexpr double kLargestInFp32 = 1e-4, kLargestOfFsdp = 0.02;

std::string problem_of(const TrainedCase& run) {
  if (run.is_sound()) return "";
  if (run.non_finite.has_value())
    return fmt::format("{}: {} of step {} is {}", run.curve.subject, run.non_finite->number, run.non_finite->step, run.non_finite->value);
  if (run.unequal_copies.has_value())
    return fmt::format("{}: ranks {} and {} hold different copies of {}", run.curve.subject, run.unequal_copies->first_rank,
                       run.unequal_copies->second_rank, describe(run.unequal_copies->key));
  return fmt::format("{}: {}", run.curve.subject, run.unequal_numbers);
}

}  // namespace

Case golden_reference_case(Case item) {
  item.subject = "reference";
  item.tp = 1;
  item.tp_is_slow = false;
  item.reduction_order = ReductionOrder::kOrdered;
  item.settings.vocab_multiple = 0;
  item.settings.zero_stage = 0;
  return item;
}

TrainedCase train_golden_reference(const Case& item, const TrainOptions& options) {
  const Case reference = golden_reference_case(item);
  std::vector<TrainingRun> runs;
  for (int run = 0; run <= kPerturbed; ++run) {
    TrainOptions own = options;
    own.perturbed_by = static_cast<std::uint64_t>(run);  // the first one is the reference itself
    runs.emplace_back(reference, std::move(own));
  }
  TrainedCase trained = runs.front().wait();
  std::vector<Curve> perturbed;
  for (std::size_t i = 1; i < runs.size(); ++i) {
    perturbed.push_back(runs[i].wait().curve);
    if (perturbed.back().steps.size() != trained.curve.steps.size())
      throw InfrastructureError(fmt::format("{}: a run with weights one ulp away ended after {} of {} steps", reference.slug(),
                                            perturbed.back().steps.size(), trained.curve.steps.size()));
  }
  trained.curve.spreads = spreads_of(trained.curve, perturbed);
  trained.curve.perturbed_runs = kPerturbed;
  return trained;
}

CurveBounds golden_bounds(const Case& item) {
  CurveBounds bounds;
  if (item.coarsest_dtype() == Dtype::kFloat32 || item.coarsest_dtype() == Dtype::kFloat64) bounds.ceiling = kLargestInFp32;
  if (item.subject == "fsdp_tp") bounds.ceiling = std::min(bounds.ceiling, kLargestOfFsdp);
  return bounds;
}

GoldenParity curve_parity(const TrainedCase& reference, const TrainedCase& trained, const CurveBounds& bounds) {
  refuse_different_settings(reference.curve, trained.curve);
  const CurveVerdict verdict = judge_curve(reference.curve, trained.curve, bounds);
  std::string words = verdict.reason;
  for (const TrainedCase* run : {&trained, &reference}) {
    if (const std::string problem = problem_of(*run); !problem.empty()) words = problem + "; " + words;
  }
  const bool holds = verdict.status == Status::kConforms && trained.is_sound() && reference.is_sound();
  return {holds, fmt::format("{} against its reference: {}", trained.curve.subject, words)};
}

}  // namespace isoshard
