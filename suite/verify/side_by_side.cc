// SPDX-License-Identifier: Apache-2.0
// From verdicts and what the taps saw to columns.
#include "suite/verify/side_by_side.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>
#include <utility>

#include "fixtures/inputs/inputs.h"
#include "subjects/model/ops/loss.h"
#include "subjects/registry/subject_spec.h"
#include "suite/verify/verify_case.h"

namespace isoshard {
namespace {

std::string column_title(const Case& item) {
  std::string title = item.subject;
  if (item.degrees.tp != 1) title += fmt::format(" tp{}", item.degrees.tp);
  if (item.degrees.dp != 1) title += fmt::format(" dp{}", item.degrees.dp);
  if (item.settings.make_vocab_size_divisible_by != 0) title += " vocab";
  return title;
}

/// What gradients of the global loss are multiplied with to be those of dp rank 0's own loss in its
/// first micro-batch.
double own_loss_factor(const Case& item) {
  if (item.settings.loss_mean == LossMean::kSum) return 1;
  if (item.settings.loss_mean == LossMean::kLocal) return item.degrees.dp;
  if (item.settings.loss_mean == LossMean::kMicroBatch)
    return static_cast<double>(item.degrees.dp) * item.micro_batches;
  const CaseData data(item);
  const auto counted = [](const TokenBatch& batch) {
    return static_cast<double>(
        shift_labels(batch.labels_BS).ne(kNotCounted).sum().item<std::int64_t>());
  };
  double total = 0, own = 0;
  for (int d = 0; d < item.degrees.dp; ++d) {
    const std::vector<TokenBatch> batches = data.rank_batches(0, d);
    for (const TokenBatch& batch : batches) total += counted(batch);
    if (d == 0) own = counted(batches.front());
  }
  return own > 0 ? total / own : 0;
}

void add_norms(TableColumn& column, const std::vector<ModuleNumbers>& modules,
               double gradient_factor) {
  for (const ModuleNumbers& m : modules) {
    column.output_norms[m.name] = m.output_norm;
    if (!(m.gradient_norm < 0)) column.gradient_norms[m.name] = m.gradient_norm * gradient_factor;
  }
}

void add_local(TableColumn& column, const std::vector<ModuleNumbers>& modules,
               ModuleTap::LocalGradients gradients, double gradient_factor) {
  for (const ModuleNumbers& m : modules) {
    column.local.outputs[m.name] = m.local_output_norm;
    column.output_digests[m.name] = m.output_digest;
    if (m.gradient_norm < 0) continue;
    column.local.output_gradients[m.name] = m.local_gradient_norm * gradient_factor;
    column.gradient_digests[m.name] = m.gradient_digest;
  }
  column.local.parameter_gradients = std::move(gradients.norms);
  column.local.sharded = std::move(gradients.sharded);
}

/// Rank 0's norms of sharded parameters, or of the others, against whole ones.
GradientComparison compare_local(const std::map<std::string, double>& whole,
                                 const LocalNorms& local, bool sharded) {
  std::map<std::string, double> norms = local.parameter_gradients;
  std::erase_if(norms,
                [&](const auto& entry) { return local.sharded.contains(entry.first) != sharded; });
  return compare_gradient_norms(whole, norms);
}

struct VerdictNumbers {
  std::vector<double> losses, reference_losses;
  std::map<std::string, double> gradient_norms, reference_gradient_norms;
  std::map<std::string, Difference> outputs;
};

VerdictNumbers numbers_of(const Verdict& verdict) {
  VerdictNumbers numbers;
  for (const TensorComparison& t : verdict.tensors) {
    if (t.key.step != 0 || t.key.call != 0) continue;
    if (role_of(t.key) == NameRole::kLossPerDpRank) {
      numbers.losses = t.actual_values;
      numbers.reference_losses = t.reference_values;
    } else if (t.stage == Stage::kParameterGrad && !is_gradient_besides(t.key)) {
      numbers.gradient_norms[t.key.name] = std::sqrt(t.stats.sum_sq_actual);
      numbers.reference_gradient_norms[t.key.name] = std::sqrt(t.stats.sum_sq_reference);
    } else if (t.key.kind == RecordKind::kActivation && is_listed_module(t.key.name)) {
      numbers.outputs[t.key.name] = difference_of(t.stats);
    }
  }
  return numbers;
}

ModuleDifference from_reference(const VerdictNumbers& judged,
                                const std::vector<double>* reference_first,
                                const ModuleNumbers& module) {
  ModuleDifference difference;
  if (const auto found = judged.outputs.find(module.name); found != judged.outputs.end())
    difference.whole = found->second;
  difference.whole_of = difference.whole.numel;
  if (reference_first != nullptr) difference.first = difference_of(*reference_first, module.first);
  return difference;
}

using Cases = std::vector<Case>::iterator;

// Two references that fit together are made at once. So the case with the most ranks, which needs
// the most memory, can wait until one of them is not needed any more.
void move_largest_behind(Cases first, Cases last) {
  const auto second = std::find_if(
      first, last, [&](const Case& c) { return c.reference_slug() != first->reference_slug(); });
  if (second == last || !references_fit_together(*first, *second)) return;
  if (std::any_of(second, last,
                  [&](const Case& c) { return c.reference_slug() != second->reference_slug(); }))
    return;
  const auto fewer_ranks = [](const Case& a, const Case& b) {
    return a.world_size() < b.world_size();
  };
  const auto largest = std::max_element(first + 1, second, fewer_ranks);
  if (largest != second && !fewer_ranks(*largest, *std::max_element(second, last, fewer_ranks)))
    std::rotate(largest, largest + 1, last);
}

}  // namespace

std::string table_group(const Case& item) {
  Case alone = item;
  alone.degrees.dp = 1;
  return alone.reference_slug();
}

void order_for_tables(std::vector<Case>& cases) {
  // of each group: that of its first baseline subject, or of its first case
  std::map<std::string, std::string> first_reference;
  for (const bool only_baseline : {true, false}) {
    for (const Case& item : cases) {
      if (!only_baseline || is_baseline(item.subject))
        first_reference.emplace(table_group(item), item.reference_slug());
    }
  }
  const auto place = [&](const Case& item) {
    const std::string group = table_group(item), reference = item.reference_slug();
    return std::tuple(group, reference != first_reference.at(group), reference,
                      !is_baseline(item.subject));
  };
  std::stable_sort(cases.begin(), cases.end(),
                   [&](const Case& a, const Case& b) { return place(a) < place(b); });
  for (auto first = cases.begin(); first != cases.end();) {
    const auto last = std::find_if(
        first, cases.end(), [&](const Case& c) { return table_group(c) != table_group(*first); });
    move_largest_behind(first, last);
    first = last;
  }
}

SideBySide::Group& SideBySide::group_of(const Case& item) {
  const std::string name = table_group(item);
  for (auto& [known, group] : groups_) {
    if (known == name) return group;
  }
  Group group;
  group.tables.title = fmt::format("{} {}", item.model_name, name_of(item.dtype));
  group.reference.title = "reference";
  return groups_.emplace_back(name, std::move(group)).second;
}

void SideBySide::add_plain(const Case& item, const Reference& reference) {
  Group& group = group_of(item);
  if (!group.reference_first.empty()) return;
  const std::vector<ModuleNumbers> modules = module_numbers(item, reference);
  add_norms(group.reference, modules, own_loss_factor(item));
  for (const ModuleNumbers& m : modules) {
    group.modules.push_back(m.name);
    group.reference_first[m.name] = m.first;
  }
}

RunOptions SideBySide::observed(const Case& item, const Reference& records, RunOptions options) {
  if (baseline_group_ != table_group(item)) baseline_ = nullptr;
  current_ = nullptr;  // its memory is free before the next is made
  const auto tap =
      std::make_shared<const ModuleTap>(item, records, baseline_, baseline_ == nullptr);
  current_ = tap;
  options.observers.emplace_back([tap](int rank) { return tap->on_rank(rank); });
  return options;
}

void SideBySide::add(const Case& item, const CaseJudgement& judgement) {
  if (current_ == nullptr || judgement.verdict.tensors.empty()) return;
  Group& group = group_of(item);
  const std::vector<ModuleNumbers> modules = current_->numbers();
  const VerdictNumbers judged = numbers_of(judgement.verdict);
  TableColumn column;
  column.title = column_title(item);
  column.case_slug = item.slug();
  column.losses = judged.losses;
  column.parameter_gradient_norms = judged.gradient_norms;
  add_norms(column, modules, own_loss_factor(item));
  add_local(column, modules, current_->local_gradients(), own_loss_factor(item));
  // The emulated reference is no column of its own: it has the bits of the run, or the verdict
  // names where not.
  const bool is_from_plain = judgement.against != ReferenceKind::kEmulated;
  if (is_from_plain && judged.reference_losses.size() > group.reference.losses.size())
    group.reference.losses = judged.reference_losses;
  const bool is_baseline = group.tables.columns.empty();
  for (const ModuleNumbers& m : modules) {
    if (is_baseline && group.reference_first.empty()) group.modules.push_back(m.name);
    if (is_from_plain) {
      const auto first = group.reference_first.find(m.name);
      column.from_reference[m.name] = from_reference(
          judged, first == group.reference_first.end() ? nullptr : &first->second, m);
    }
    if (m.from_baseline.numel == 0) continue;
    ModuleDifference& other = column.from_baseline[m.name];
    other.whole = difference_of(m.from_baseline);
    other.whole_of = m.numel;
    other.first = difference_of(group.baseline_first.at(m.name), m.first);
  }
  if (is_from_plain)
    column.gradients_from_reference =
        compare_gradient_norms(judged.reference_gradient_norms, judged.gradient_norms);
  if (is_baseline) {
    group.tables.baseline = column.title;
    group.baseline_dp = item.degrees.dp;
    for (const ModuleNumbers& m : modules) group.baseline_first[m.name] = m.first;
    baseline_ = std::exchange(current_, nullptr);
    baseline_group_ = table_group(item);
  } else if (item.degrees.dp == group.baseline_dp) {
    const std::map<std::string, double>& whole =
        group.tables.columns.front().parameter_gradient_norms;
    column.gradients_from_baseline = compare_gradient_norms(whole, judged.gradient_norms);
    column.local_from_baseline_sharded = compare_local(whole, column.local, true);
    column.local_from_baseline_whole = compare_local(whole, column.local, false);
  }
  const auto twin = std::ranges::find(group.degrees, std::pair(item.degrees.tp, item.degrees.dp));
  if (twin != group.degrees.end() && !is_baseline)
    column.same_bits = same_bits(
        group.tables.columns[static_cast<std::size_t>(twin - group.degrees.begin())], column);
  group.degrees.emplace_back(item.degrees.tp, item.degrees.dp);
  group.tables.columns.push_back(std::move(column));
}

std::vector<ComparisonTables> SideBySide::tables() const {
  std::vector<ComparisonTables> result;
  for (const auto& [name, group] : groups_) {
    if (group.tables.columns.empty()) continue;
    ComparisonTables tables = group.tables;
    tables.modules = group.modules;
    const bool has_reference =
        !group.reference.losses.empty() || !group.reference.output_norms.empty();
    if (has_reference) tables.columns.insert(tables.columns.begin(), group.reference);
    result.push_back(std::move(tables));
  }
  return result;
}

}  // namespace isoshard
