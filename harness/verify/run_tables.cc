// SPDX-License-Identifier: Apache-2.0
// Columns out of the statistics of tensors.
#include "harness/verify/run_tables.h"

#include <cmath>
#include <utility>

namespace isoshard {
namespace {

struct Columns {
  TableColumn reference, run;
  std::vector<std::string> modules;
};

Columns columns_of(const ReportCase& item) {
  Columns columns;
  columns.reference.title = "reference";
  columns.run.title = columns.run.case_slug = item.name;
  for (const TensorComparison& t : item.verdict->tensors) {
    if (t.key.step != 0 || t.key.call != 0) continue;
    const double reference = std::sqrt(t.stats.sum_sq_reference);
    const double actual = std::sqrt(t.stats.sum_sq_actual);
    const std::string& name = t.key.name;
    if (role_of(t.key) == NameRole::kLoss) {
      columns.reference.losses = t.reference_values;
      columns.run.losses = t.actual_values;
    } else if (t.stage == Stage::kParameterGrad && !is_gradient_besides(t.key)) {
      columns.reference.parameter_gradient_norms[name] = reference;
      columns.run.parameter_gradient_norms[name] = actual;
    } else if (t.key.kind == RecordKind::kActivationGrad) {
      columns.reference.gradient_norms[name] = reference;
      columns.run.gradient_norms[name] = actual;
    } else if (t.key.kind == RecordKind::kActivation) {
      columns.modules.push_back(name);
      columns.reference.output_norms[name] = reference;
      columns.run.output_norms[name] = actual;
      ModuleDifference& difference = columns.run.from_reference[name];
      difference.whole = difference_of(t.stats);
      difference.whole_of = difference.whole.numel;
    }
  }
  columns.run.gradients_from_reference = compare_gradient_norms(
      columns.reference.parameter_gradient_norms, columns.run.parameter_gradient_norms);
  return columns;
}

}  // namespace

ComparisonTables tables_of(const std::string& title, const std::vector<ReportCase>& cases) {
  ComparisonTables tables;
  tables.title = title;
  for (const ReportCase& item : cases) {
    if (!item.verdict.has_value() || item.verdict->tensors.empty()) continue;
    Columns columns = columns_of(item);
    if (tables.columns.empty()) {
      tables.columns.push_back(std::move(columns.reference));
      tables.modules = std::move(columns.modules);
    }
    tables.columns.push_back(std::move(columns.run));
  }
  return tables;
}

}  // namespace isoshard
