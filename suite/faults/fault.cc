// SPDX-License-Identifier: Apache-2.0
/// The two lists, look-ups in them, and how a fault is put on a run.
#include "suite/faults/fault.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "fixtures/cases/presets.h"
#include "harness/trace/numbers.h"
#include "harness/trace/run_view.h"
#include "harness/world/forked/forked_world.h"
#include "suite/faults/catalogue.h"
#include "suite/reference/reference.h"

namespace isoshard {
namespace {

using SamplesOf = decltype(FaultHooks::sampler);

class SamplerDouble final : public Sampler {
 public:
  SamplerDouble(std::shared_ptr<const Sampler> inner, SamplesOf samples, Case item,
                FaultProbe probe)
      : inner_(std::move(inner)),
        samples_(std::move(samples)),
        item_(std::move(item)),
        probe_(std::move(probe)) {}
  std::vector<std::int64_t> samples(std::int64_t global_batch, int dp_coordinate) const override {
    return samples_(*inner_, item_, global_batch, dp_coordinate, probe_);
  }

 private:
  std::shared_ptr<const Sampler> inner_;
  SamplesOf samples_;
  Case item_;
  FaultProbe probe_;
};

Faults catalogue_by_class() {
  Faults faults;
  add_reduction_faults(faults);
  add_scale_faults(faults);
  add_clip_faults(faults);
  add_data_faults(faults);
  add_sequence_faults(faults);
  add_sharding_faults(faults);
  add_random_faults(faults);
  add_checkpoint_faults(faults);
  add_step_faults(faults);
  add_zero_faults(faults);
  add_buffer_faults(faults);
  add_vocab_faults(faults);
  add_context_faults(faults);
  add_pipeline_faults(faults);
  std::stable_sort(faults.begin(), faults.end(),
                   [](const Fault& a, const Fault& b) { return a.fault_class < b.fault_class; });
  return faults;
}

}  // namespace

std::string_view title_of_class(char fault_class) {
  constexpr std::array<std::string_view, 13> kTitles = {"missing or extra reduction",
                                                        "wrong scale",
                                                        "clipping and gradient norm",
                                                        "vocabulary, loss, tokens",
                                                        "sharding, slicing, shapes",
                                                        "positions, context parallelism",
                                                        "tied weights",
                                                        "random numbers, recomputing",
                                                        "data, replicas in step",
                                                        "accumulation",
                                                        "precision, optimizer state",
                                                        "races, buffer reuse",
                                                        "pipeline, run mode"};
  const int index = fault_class - 'A';
  if (index < 0 || index >= std::ssize(kTitles))
    throw UsageError(fmt::format("a class of faults must be one of A to M, got '{}'", fault_class));
  return kTitles[static_cast<std::size_t>(index)];
}

int FaultHooks::count() const noexcept {
  return static_cast<int>(collective != nullptr) + static_cast<int>(tap != nullptr) +
         static_cast<int>(plan != nullptr) + static_cast<int>(parts != nullptr) +
         static_cast<int>(data != nullptr) + static_cast<int>(sampler != nullptr) +
         static_cast<int>(order != nullptr);
}

std::span<const Fault> fault_catalogue() {
  static const Faults catalogue = catalogue_by_class();
  return catalogue;
}

std::span<const Fault> benign_variations() {
  static const Faults misses = [] {
    Faults result;
    add_benign_variations(result);
    add_value_benign_variations(result);
    add_buffer_benign_variations(result);
    return result;
  }();
  return misses;
}

const Fault& find_fault(std::string_view id) {
  std::vector<std::string> known;
  for (const std::span<const Fault> list : {fault_catalogue(), benign_variations()}) {
    for (const Fault& fault : list) {
      if (fault.id == id) return fault;
      known.push_back(fault.id);
    }
  }
  throw UsageError(fmt::format("unknown fault '{}'{}; 'isoshard list faults' lists them", id,
                               did_you_mean(id, known)));
}

RunOptions with_fault(RunOptions options, const Fault& fault, const Case& item,
                      const FaultProbe& probe) {
  const FaultHooks& hooks = fault.hooks;
  if (hooks.collective) {
    options.decorate = [collective = hooks.collective(item), probe, shape = item.mesh()](
                           std::unique_ptr<Communicator> inner, int) {
      return decorate_with_fault(std::move(inner), collective, probe, shape);
    };
  }
  if (hooks.tap) {
    options.mutation = [tap = hooks.tap, item, probe](int rank) {
      return counted(tap(item, rank), probe);
    };
  }
  if (hooks.plan) {
    options.edits.plan = [plan = hooks.plan, probe](ShardPlan& edited, const Mesh& mesh) {
      plan(edited, mesh, probe);
    };
  }
  if (hooks.parts) {
    options.edits.parts = [parts = hooks.parts, item, probe](TrainerParts& edited, Mesh& mesh) {
      parts(edited, mesh, item, probe);
    };
  }
  if (hooks.data) {
    options.batches = [data = hooks.data, item, probe](std::vector<Batch>& edited,
                                                       const CaseData& source, int rank, int step) {
      data(edited, source, item, rank, step, probe);
    };
  }
  if (hooks.sampler) {
    options.sampler = [samples = hooks.sampler, item, probe](std::shared_ptr<const Sampler> inner,
                                                             int) {
      return std::make_shared<SamplerDouble>(std::move(inner), samples, item, probe);
    };
  }
  if (hooks.order) {
    options.order = hooks.order(item);
    if (options.order != ReductionOrder::kOrdered) probe.fired();
  }
  return options;
}

void require_fired(const FaultProbe& probe, std::string_view fault, std::string_view run) {
  if (sum_over_peers(default_launcher(), probe.count()) == 0)
    throw IdleFaultError(fmt::format(
        "fault {} had no effect on {}: the case never runs the code it changes", fault, run));
}

Case fault_case(std::string_view model_type, std::string subject, const Degrees& degrees) {
  Case item = tiny_fault_case(model_type);
  // else the optimizer's state would move before the parameters
  item.settings.optimizer.momentum = 0;
  item.subject = std::move(subject);
  item.degrees = degrees;
  return item;
}

Case pipeline_case(std::string_view model_type, const Degrees& degrees, int micro_batches) {
  Case item = fault_case(model_type, "nd", degrees);
  item.config.num_layers = 2 * degrees.pp;
  item.model_name += fmt::format("_{}_layers", item.config.num_layers);
  item.micro_batches = micro_batches;
  return item;
}

Case clipped(Case item) {
  static std::map<std::string, double> norms;  // a case is asked for again and again
  item.settings.max_grad_norm = 0;
  const std::string slug = item.reference_slug();
  auto known = norms.find(slug);
  if (known == norms.end()) {
    const Reference reference = make_reference(item, {.responses = 0});
    known = norms.emplace(slug, RunView(reference).grad_norm(0).value()).first;
  }
  // two digits fit a slug
  item.settings.max_grad_norm = std::stod(fmt::format("{:.2g}", known->second / 2));
  return item;
}

bool is_gradient_of(const CallInfo& info, const Segment* segment, Axis axis,
                    ParamClass param_class) {
  return info.purpose == Purpose::kGradReduce && info.axis == axis && segment != nullptr &&
         segment->param_class == param_class;
}

std::vector<int> any_rank(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace isoshard
