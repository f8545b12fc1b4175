// SPDX-License-Identifier: Apache-2.0
// The plain run, its perturbed repetitions, and the cache of both.
#include "suite/reference/reference.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/base/reference_name.h"
#include "fixtures/inputs/inputs.h"
#include "harness/run/record.h"
#include "harness/run/side_by_side.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/process_name.h"
#include "suite/reference/case_deadline.h"
#include "suite/reference/lattice_guard.h"
#include "suite/reference/perturbed_weights.h"
#include "suite/reference/plain_run.h"

namespace isoshard {
namespace {

using Start = std::function<RunningRecord()>;

// What the plain run of a case needs.
struct PlainInput {
  explicit PlainInput(const Case& of) : c(of), data(of), weights(case_weights(of)) {
    require_counted_tokens(c, data);
    run = whole_batch_run(data, weights);
  }
  PlainInput(const PlainInput&) = delete;
  PlainInput& operator=(const PlainInput&) = delete;
  const Case& c;
  CaseData data;
  std::shared_ptr<const WeightSource> weights;
  PlainRun run;
};

RunSpec spec_of(const PlainInput& input, const ReferenceOptions& options) {
  RunSpec spec = plain_spec(input.c, input.run);
  spec.deadline = case_deadline(input.c, options.deadline);
  spec.process_name = process_name(kReferenceName, options.number);
  return spec;
}

// The perturbed runs that a reference lacks, and its variants.
class ResponseRuns {
 public:
  /// `number` is that of the reference (ReferenceOptions).
  ResponseRuns(const Case& c, const Reference& reference, int responses,
               std::chrono::milliseconds deadline, int number = 1)
      : c_(c), bare_(reference.trace()), data_(c), weights_(case_weights(c)), deadline_(deadline) {
    // An exact case has no rounding to respond to.
    if (reference.response_runs() >= responses || is_lattice(c)) return;
    constexpr int kRoom = 16;  // no two runs of one case have one name
    // In 16 bits the result's own rounding covers the accumulators', which have fp32.
    const bool in_pieces = size_of(c.coarsest_dtype()) > 2;
    first_number_ = reference.response_runs() + 1 + (number - 1) * kRoom;
    for (int run = reference.response_runs(); run < responses; ++run) {
      // Seeds from 1: 0 is the usual seed of the weights themselves.
      const auto perturbed = std::make_shared<PerturbedWeights>(
          weights_, static_cast<std::uint64_t>(run) + 1, c.dtype, c.settings.autocast);
      // The first comes alone where it suffices, and is the reference's own arithmetic.
      add(in_pieces && run > 0 ? pieces_run(c, data_, perturbed)
                               : whole_batch_run(data_, perturbed),
          fmt::format("perturbed{}", run));
    }
    num_perturbed_ = starts_.size();
    if (responses == 1) return;
    if (in_pieces) add(pieces_run(c, data_, weights_), "pieces");
    if (c.degrees.dp == 1) return;
    add(regrouped_run(c, data_, weights_), "regrouped");
    if (factor_shows(c)) add(scaled_run(c, data_, weights_), "scaled");
  }
  ResponseRuns(const ResponseRuns&) = delete;
  ResponseRuns& operator=(const ResponseRuns&) = delete;

  /// They refer to this object.
  [[nodiscard]] const std::vector<Start>& starts() const noexcept { return starts_; }
  void ended(std::size_t run, RunningRecord& record) { traces_.at(run) = record.wait(); }
  void add_to(Reference& reference) const {
    for (std::size_t i = 0; i < traces_.size(); ++i) {
      if (i < num_perturbed_) {
        reference.add_response(traces_[i]);
      } else {
        reference.add_variant(traces_[i]);
      }
    }
  }

 private:
  void add(PlainRun run, const std::string& name) {
    RunSpec spec = plain_spec(c_, std::move(run));
    spec.name = fmt::format("{}_{}", c_.reference_slug(), name);
    spec.deadline = case_deadline(c_, deadline_);
    // numbered on through perturbed runs and variants
    const auto number = first_number_ + static_cast<int>(starts_.size());
    spec.process_name = process_name("response", number);
    // compared with the reference as it records
    starts_.emplace_back([this, spec = std::move(spec)] {
      return RunningRecord(
          default_launcher(), spec,
          {.reference = &bare_, .keep = Keep::kNothing, .purpose = RunPurpose::kResponse});
    });
    traces_.emplace_back();
  }

  const Case& c_;
  // no run sees the responses of others: it would mask by them, and so depend on the number of
  // cores
  Reference bare_;
  CaseData data_;
  std::shared_ptr<const WeightSource> weights_;
  std::chrono::milliseconds deadline_;
  std::size_t num_perturbed_ = 0;
  int first_number_ = 1;
  std::vector<Start> starts_;
  std::vector<Trace> traces_;
};

std::map<std::string, Reference>& cache() {
  static std::map<std::string, Reference> references;
  return references;
}

}  // namespace

std::size_t trace_capacity(const Case& c) {
  const ModelConfig& m = c.config;
  const auto tokens =
      static_cast<double>(c.degrees.dp * c.batch_size * c.micro_batches * c.seq_length);
  const double per_layer =
      12.0 * static_cast<double>(m.hidden_size) + 8.0 * static_cast<double>(m.intermediate_size) +
      8.0 * static_cast<double>(m.num_heads * std::max<std::int64_t>(m.head_dim, 1)) +
      4.0 * static_cast<double>(m.num_heads * c.seq_length);
  const double activations =
      tokens * (static_cast<double>(m.num_layers) * per_layer +
                8.0 * static_cast<double>(m.hidden_size) + 4.0 * static_cast<double>(m.vocab_size));
  double parameters = 0;
  for (const ParameterSpec& spec : make_model(m, c.attention)->parameters())
    parameters += static_cast<double>(numel_of(spec.shape));
  // As read, gradient after each micro-batch, up to three states, after the step; activations and
  // their gradients. Twice, for points not thought of.
  const double step = 8.0 * ((5.0 + c.micro_batches) * parameters + 2.0 * activations);
  // sizes that no machine has must not overflow on their way to being refused
  constexpr double kMost = 0x1p60;
  return static_cast<std::size_t>(std::min(2.0 * step * c.steps, kMost)) + (std::size_t{64} << 20);
}

std::size_t trace_bytes(const Case& c) {
  // 8 bytes an element and everything twice: see trace_capacity.
  return trace_capacity(c) / 16 * size_of(c.dtype);
}

void add_responses(const Case& c, Reference& reference, int responses,
                   std::chrono::milliseconds deadline) {
  if (reference.response_runs() >= responses || is_lattice(c)) return;
  ResponseRuns runs(c, reference, responses, deadline);
  run_side_by_side<RunningRecord>(
      runs.starts(), [&](std::size_t run, RunningRecord& record) { runs.ended(run, record); });
  runs.add_to(reference);
}

std::vector<Reference> make_references(const std::vector<Case>& cases,
                                       const ReferenceOptions& options) {
  std::deque<PlainInput> inputs;  // runs refer to them
  for (const Case& c : cases) {
    c.validate();
    require_exact(c);
    inputs.emplace_back(c);
  }
  std::vector<Start> starts;
  for (const PlainInput& input : inputs) {
    starts.emplace_back([&] {
      return RunningRecord(default_launcher(), spec_of(input, options),
                           {.keep = Keep::kEverything});
    });
  }
  std::vector<Reference> references(cases.size());
  run_side_by_side<RunningRecord>(starts, [&](std::size_t i, RunningRecord& record) {
    references[i] = Reference(record.wait());
  });

  std::vector<std::unique_ptr<ResponseRuns>> responses;
  std::vector<std::pair<std::size_t, std::size_t>> owners;
  starts.clear();
  for (std::size_t i = 0; i < cases.size(); ++i) {
    responses.push_back(std::make_unique<ResponseRuns>(cases[i], references[i], options.responses,
                                                       options.deadline, options.number));
    const std::vector<Start> own = responses.back()->starts();
    for (std::size_t run = 0; run < own.size(); ++run) {
      starts.push_back(own[run]);
      owners.emplace_back(i, run);
    }
  }
  run_side_by_side<RunningRecord>(starts, [&](std::size_t i, RunningRecord& record) {
    responses[owners[i].first]->ended(owners[i].second, record);
  });
  for (std::size_t i = 0; i < cases.size(); ++i) responses[i]->add_to(references[i]);
  return references;
}

Reference make_reference(const Case& c, const ReferenceOptions& options) {
  return std::move(make_references({c}, options).front());
}

const Reference& reference_of(const Case& c) {
  const std::string slug = c.reference_slug();
  const auto found = cache().find(slug);
  if (found != cache().end()) return found->second;
  return cache().emplace(slug, make_reference(c)).first->second;
}

void forget_references() {
  cache().clear();
}

}  // namespace isoshard
