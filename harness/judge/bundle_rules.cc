// SPDX-License-Identifier: Apache-2.0
/// Layouts that hide nothing, and responses that fit.
#include "harness/judge/bundle_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "harness/ids/rule.h"
#include "harness/stats/stats.h"
#include "harness/trace/collective_calls.h"
#include "harness/trace/judge_policy.h"
#include "harness/trace/parts.h"
#include "harness/trace/stage.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;

std::int64_t held_elements(const Record& record) {
  std::int64_t held = 0;
  for (const PartStats& part : record.parts) held += numel_of(part, is_flat(record.layout));
  return held;
}

/// One byte per local element: whether a part covers it.
std::vector<std::uint8_t> covered(const Record& record) {
  std::vector<std::uint8_t> cover(static_cast<std::size_t>(numel_of(record.local_shape)), 0);
  const bool flat = is_flat(record.layout);
  for (const PartStats& part : record.parts) {
    if (numel_of(part, flat) == 0) continue;
    // the part as a tensor of the local shape: its place in the local tensor takes the global one's
    PartStats local = part;
    Record own = record;
    local.box.global_offset = part.box.local_offset;
    local.range.global_begin = part.range.local_begin;
    own.layout.global_shape = record.local_shape;
    for_each_run(local, own, [&](std::int64_t position, std::int64_t, std::int64_t count) {
      std::fill_n(cover.begin() + position, count, std::uint8_t{1});
    });
  }
  return cover;
}

void require_zero_padding(const RankTrace& rank, const Record& record, const fs::path& file) {
  if (held_elements(record) >= numel_of(record.local_shape) && record.parts.size() <= 1) return;
  const std::vector<std::uint8_t> cover = covered(record);
  const HostTensor tensor = rank.tensor(record);
  for (std::size_t i = 0; i < cover.size(); ++i) {
    if (cover[i] != 0) continue;
    const double value = value_at(tensor.bytes.data(), tensor.dtype, static_cast<std::int64_t>(i));
    if (value != 0)
      refuse(file, RuleId::kPaddingNotZero,
             {{"tensor", describe(record.key)},
              {"element", i},
              {"rank", rank.rank},
              {"value", value}});
  }
}

/// The tensors among which a rank may hold nothing of one: those of a step, kind and call, and
/// gradients between micro-batches, which need not lie as final ones do.
using Group = std::tuple<int, RecordKind, int, bool>;

Group group_of(const RecordKey& key) {
  return {key.step, key.kind, key.call, role_of(key) == NameRole::kMicroBatch};
}

/// A part of a tensor, wherever it stands.
using Place = std::tuple<RecordKey, Shape, Shape, std::int64_t, std::int64_t>;

using NumNames = std::map<std::string, int, std::less<>>;

/// The module that makes the logits, in the names of the models that tie it to the embedding.
constexpr std::string_view kHead = "lm_head";

class Holders {
 public:
  Holders(const Trace& trace, const NumNames& num_names) : trace_(trace), num_names_(num_names) {
    for (const RankTrace& rank : trace.ranks) {
      for (const Record& record : rank.records) {
        // each is one rank's own, and held to that rank's other records
        if (role_of(record.key) == NameRole::kCollectives || is_own_repetition(record.key))
          continue;
        // numbers of the ranks that step a parameter, and no part of a tensor
        if (role_of(record.key) == NameRole::kHyperparameters) continue;
        const std::int64_t held = held_elements(record);
        elements_[record.key][rank.rank] = held;
        held_[group_of(record.key)][rank.rank] += held;
        const bool is_declared = is_declared_copy(record) || is_tied(record.key.name);
        if (!is_declared) own_[group_of(record.key)][rank.rank] += held;
        if (numel_of(record.layout.global_shape) <= 1) continue;
        for (const PartStats& part : record.parts) {
          if (numel_of(part, is_flat(record.layout)) == 0) continue;
          if (is_declared) declared_.insert(record.key);
          places_[group_of(record.key)][{record.key, part.box.global_offset, part.box.size,
                                         part.range.global_begin, part.range.count}]
              .push_back(rank.rank);
        }
      }
    }
  }

  void require_no_gap(const std::vector<std::string>& allowed, const fs::path& file) const {
    for (const auto& [key, ranks] : elements_) {
      if (matches_any(allowed, key)) continue;
      for (int rank = 0; rank < trace_.mesh.world_size(); ++rank) {
        const auto found = ranks.find(rank);
        // a rank without the record is missed or excused by the judge, by only_at
        const bool is_empty = found == ranks.end() ? is_only_elsewhere(key) : found->second == 0;
        if (!is_empty || is_nothing(key) || is_cut(key, rank)) continue;
        refuse(file, RuleId::kRankHoldsNothing,
               {{"tensor", describe(key)}, {"rank", rank}, {"kind", name_of(key.kind)}});
      }
    }
  }

  /// A stage that reads a tied parameter has a copy of it, which may drift.
  void require_tied_copies(const std::vector<std::string>& allowed, const fs::path& file) const {
    if (trace_.mesh.degree(Axis::kPp) == 1) return;
    for (const auto& [key, held] : elements_) {
      const auto names = num_names_.find(key.name);
      if (key.kind != RecordKind::kParam || names == num_names_.end() || names->second < 2 ||
          matches_any(allowed, key))
        continue;
      std::set<int> stages;
      for (const auto& [rank, elements] : held) {
        if (elements > 0) stages.insert(stage_of_rank(rank));
      }
      const std::string module = key.name.substr(0, key.name.rfind('.'));
      for (const std::string_view reader : {std::string_view(module), kHead}) {
        for (const int stage : stages_that_call(reader)) {
          if (stages.contains(stage)) continue;
          refuse(file, RuleId::kTiedCopyMissing,
                 {{"tensor", describe(key)}, {"stage", stage}, {"reader", reader}});
        }
      }
    }
  }

 private:
  int stage_of_rank(int rank) const { return trace_.mesh.coordinate(rank, Axis::kPp); }

  /// The stages that computed this module, if only some did.
  std::set<int> stages_that_call(std::string_view module) const {
    std::set<int> stages;
    for (const auto& [key, held] : elements_) {
      if (key.kind != RecordKind::kActivation || key.name != module) continue;
      for (const auto& [rank, elements] : held) {
        if (elements > 0) stages.insert(stage_of_rank(rank));
      }
    }
    const bool is_everywhere = std::ssize(stages) == trace_.mesh.degree(Axis::kPp);
    return is_everywhere ? std::set<int>() : stages;
  }

  /// Whether the trusted side says that two modules read the parameter that this is, or is of.
  bool is_tied(std::string_view name) const {
    return std::ranges::any_of(num_names_, [&](const auto& parameter) {
      const auto& [own, count] = parameter;
      return count > 1 && name.starts_with(own) &&
             (name.size() == own.size() || name[own.size()] == '.');
    });
  }

  /// Whether the tensor has no element at all.
  bool is_nothing(const RecordKey& key) const {
    return std::ranges::all_of(elements_.at(key),
                               [](const auto& held) { return held.second == 0; });
  }

  bool is_only_elsewhere(const RecordKey& key) const {
    for (const RankTrace& rank : trace_.ranks) {
      if (const Record* record = rank.find(key)) {
        return std::ranges::any_of(record->layout.placements, [](const Placement& placement) {
          return placement.kind == Placement::Kind::kOnlyAt;
        });
      }
    }
    return false;
  }

  /// Of a tensor that two stages read: each copy is recorded, so none is left out.
  static bool is_declared_copy(const Record& record) {
    return std::ranges::any_of(record.layout.placements, [](const Placement& placement) {
      return placement.axis == Axis::kPp && placement.also_at != 0;
    });
  }

  /// Whether along some axis another rank of this rank's line holds of the tensor, and the whole
  /// group is cut along it.
  bool is_cut(const RecordKey& key, int rank) const {
    for (const AxisDegree& axis : trace_.mesh.axes()) {
      if (axis.degree == 1) continue;
      const std::vector<int> line = trace_.mesh.group_of(rank, axis.axis);
      const bool any_holds = std::ranges::any_of(line, [&](int other) {
        const auto found = elements_.at(key).find(other);
        return found != elements_.at(key).end() && found->second > 0;
      });
      if (!any_holds) continue;
      if (is_cut_along(group_of(key), axis.axis)) return true;
      if (axis.axis == Axis::kPp && is_of_one_stage(key) && is_pipeline(key.step)) return true;
    }
    return false;
  }

  /// Of ids, losses and masks, and of what a layer computes in its second call and later ones, a
  /// right stage may hold nothing. Every stage has parameters, gradients, states and first calls.
  static bool is_of_one_stage(const RecordKey& key) {
    return key.kind == RecordKind::kDataId || key.kind == RecordKind::kScalar ||
           key.kind == RecordKind::kMask || (key.call > 0 && key.kind != RecordKind::kParam);
  }

  /// Whether stages of a pipeline share out the layers.
  bool is_pipeline(int step) const {
    const Group parameters{step, RecordKind::kParam, 0, false};
    return held_.contains(parameters) && is_cut_along(parameters, Axis::kPp);
  }

  bool is_cut_along(const Group& group, Axis axis) const {
    const auto known = cut_.find({group, axis});
    if (known != cut_.end()) return known->second;
    bool is_cut = true;
    // stages that read one tensor besides their own are still cut; what they share shows nothing
    const bool is_pp = axis == Axis::kPp;
    const auto found_own = own_.find(group);
    if (is_pp && found_own == own_.end()) return cut_[{group, axis}] = false;
    const std::map<int, std::int64_t>& held = is_pp ? found_own->second : held_.at(group);
    for (int rank = 0; is_cut && rank < trace_.mesh.world_size(); ++rank) {
      const auto found = held.find(rank);
      is_cut = found != held.end() && found->second > 0;
    }
    const auto places = places_.find(group);
    if (places == places_.end()) is_cut = false;
    if (is_cut) {
      for (const auto& [place, ranks] : places->second) {
        if (is_pp && declared_.contains(std::get<0>(place))) continue;
        std::set<int> lines;  // each by its first rank
        for (const int rank : ranks)
          is_cut = is_cut && lines.insert(trace_.mesh.group_of(rank, axis).front()).second;
      }
    }
    cut_[{group, axis}] = is_cut;
    return is_cut;
  }

  const Trace& trace_;
  const NumNames& num_names_;
  std::map<RecordKey, std::map<int, std::int64_t>> elements_;
  std::map<Group, std::map<int, std::int64_t>> held_;
  std::map<Group, std::map<int, std::int64_t>> own_;  ///< without declared copies
  std::set<RecordKey> declared_;
  std::map<Group, std::map<Place, std::vector<int>>> places_;
  mutable std::map<std::pair<Group, Axis>, bool> cut_;
};

// -- responses ------------------------------------------------------------------------------------

/// What sums in another order may change of a norm.
constexpr double kSlack = 1e-6;

/// Of a tensor that is nothing but rounding noise, relative to the largest one of its step and
/// kind. Measured on the small preset: all responses are below 1e-6 (fp32) and 0.03 (bf16) of that
/// norm.
double largest_noise(Dtype coarsest) {
  if (coarsest == Dtype::kFloat64) return 1e-6;
  return coarsest == Dtype::kFloat32 ? 1e-2 : 0.5;
}

bool at_most(double a, double b) {
  return a <= b * (1 + kSlack) + 1e-300;
}

/// Statistics of the reference's tensors, each of which is read once.
class OwnStats {
 public:
  explicit OwnStats(const Reference& reference) : reference_(reference) {}

  const Stats& of(const Record& record) {
    const auto [found, is_new] = known_.try_emplace(record.key);
    if (is_new) {
      const std::byte* bytes = reference_.bytes(record);
      accumulate(found->second, bytes, record.dtype, bytes, record.dtype,
                 numel_of(record.layout.global_shape), 0);
    }
    return found->second;
  }

 private:
  const Reference& reference_;
  std::map<RecordKey, Stats> known_;
};

/// Why the response cannot be of this tensor; empty if it can.
std::string problem_of(const Response& r, const Record& record, const Stats& own, bool is_masked) {
  for (const double number : {r.relative_error, r.scale_error, r.absolute_norm, r.max_abs,
                              r.reference_norm, r.reference_max_abs}) {
    if (!std::isfinite(number) || number < 0)
      return fmt::format("every number must be finite and not negative, got {}", number);
  }
  const double root = std::sqrt(static_cast<double>(numel_of(record.layout.global_shape)));
  const double norm = std::sqrt(own.sum_sq_reference);
  const double largest = own.max_abs_reference;
  const bool is_finite = own.nan_reference + own.inf_reference == 0;
  if (!at_most(r.max_abs, r.absolute_norm) || !at_most(r.absolute_norm, root * r.max_abs))
    return fmt::format(
        "absolute_norm must lie between max_abs and sqrt(numel) x max_abs, got {:.3g} "
        "for {:.3g}",
        r.absolute_norm, r.max_abs);
  if (!at_most(r.reference_norm, norm) || !at_most(r.reference_max_abs, largest))
    return fmt::format(
        "the tensor has norm {:.6g} and largest element {:.6g}, the response says "
        "{:.6g} and {:.6g}",
        norm, largest, r.reference_norm, r.reference_max_abs);
  if (!at_most(r.reference_max_abs, r.reference_norm))
    return "reference_max_abs must be at most reference_norm";
  // both are made of sums in fp64
  const double roundings = (8 + root) * 0x1p-52;
  if (!at_most(r.scale_error, r.relative_error + roundings))
    return fmt::format("scale_error must be at most relative_error, got {:.3g} and {:.3g}",
                       r.scale_error, r.relative_error);
  if (r.reference_norm > 0 && !at_most(r.absolute_norm, r.relative_error * r.reference_norm))
    return fmt::format(
        "absolute_norm must be at most relative_error x reference_norm, got {:.3g} and "
        "{:.3g}",
        r.absolute_norm, r.relative_error * r.reference_norm);
  if (is_masked || !is_finite) return "";
  if (!at_most(norm, r.reference_norm) || !at_most(largest, r.reference_max_abs))
    return fmt::format(
        "the tensor has norm {:.6g} and largest element {:.6g}, the response says "
        "{:.6g} and {:.6g}",
        norm, largest, r.reference_norm, r.reference_max_abs);
  if (!at_most(r.relative_error * r.reference_norm, r.absolute_norm))
    return fmt::format(
        "relative_error x reference_norm must be absolute_norm, got {:.3g} and {:.3g}",
        r.relative_error * r.reference_norm, r.absolute_norm);
  return "";
}

void require_responses(const Reference& reference, bool is_masked, Dtype coarsest, OwnStats& stats,
                       const fs::path& file) {
  std::map<std::pair<int, RecordKind>, double> largest;  // norms, of each step and kind
  for (const auto& [key, response] : reference.responses()) {
    const Record* record = reference.find(key);
    if (record == nullptr) refuse(file, RuleId::kResponseOfNoRecord, {{"tensor", describe(key)}});
    const Stats& own = stats.of(*record);
    const bool may_be_masked = is_masked && !stepped_parameter(key).empty();
    const std::string problem = problem_of(response, *record, own, may_be_masked);
    if (!problem.empty())
      refuse(file, RuleId::kResponseDoesNotFit,
             {{"tensor", describe(key)}, NamedValue::words("problem", problem)});
    // such as counts and states of random numbers
    if (is_exact(stage_of(key)) || is_gradient_besides(key)) continue;
    double& norm = largest[{key.step, key.kind}];
    norm = std::max(norm, std::sqrt(own.sum_sq_reference));
  }
  for (const auto& [key, response] : reference.responses()) {
    if (is_exact(stage_of(key)) || is_gradient_besides(key)) continue;
    const double norm = largest.at({key.step, key.kind});
    const bool is_noise = 2 * response.absolute_norm >= response.reference_norm;
    if (is_noise && response.absolute_norm > largest_noise(coarsest) * norm)
      refuse(file, RuleId::kResponseTooLarge,
             {{"tensor", describe(key)},
              {"dtype", name_of(coarsest)},
              {"moved", response.absolute_norm},
              {"largest", norm}});
  }
}

void require_redrawn(const Reference& reference, OwnStats& stats, const fs::path& file) {
  constexpr double kRounded = 1 + 1e-6;  // of sums in fp64
  for (const auto& [key, runs] : reference.redrawn().sums) {
    const Record* record = reference.find(key);
    if (record == nullptr) continue;  // a sum without a tensor widens nothing
    const double norm = std::sqrt(stats.of(*record).sum_sq_reference);
    const double root = std::sqrt(static_cast<double>(numel_of(record->layout.global_shape)));
    for (const RedrawnSums& run : runs) {
      const double moved = std::sqrt(run.sum_sq_diff);
      if (std::fabs(run.dot_diff) > norm * moved * kRounded ||
          std::fabs(run.sum_diff) > root * moved * kRounded)
        refuse(file, RuleId::kRedrawnDoesNotFit, {{"run", run.run}, {"tensor", describe(key)}});
    }
  }
}

}  // namespace

void require_kept(const Trace& trace, const fs::path& file) {
  for (const RankTrace& rank : trace.ranks) {
    for (const Record& record : rank.records) {
      if (!record.kept && !record.compared)
        refuse(file, RuleId::kTensorNotKept,
               {{"tensor", describe(record.key)}, {"rank", rank.rank}});
    }
  }
}

void require_honest_layouts(const Trace& trace, const std::vector<std::string>& allowed,
                            const fs::path& file, const NumNames& num_names) {
  require_kept(trace, file);
  for (const RankTrace& rank : trace.ranks) {
    for (const Record& record : rank.records) {
      // Of what a rank compared there is no padding (require_fitting_statistics).
      if (record.kept) require_zero_padding(rank, record, file);
    }
  }
  const Holders holders(trace, num_names);
  holders.require_no_gap(allowed, file);
  holders.require_tied_copies(allowed, file);
}

void require_fitting_responses(const Reference& reference, bool is_masked, Dtype coarsest,
                               const fs::path& folder) {
  OwnStats stats(reference);
  require_responses(reference, is_masked, coarsest, stats, folder / "responses.json");
  require_redrawn(reference, stats, folder / "redrawn.json");
}

}  // namespace isoshard
