// SPDX-License-Identifier: Apache-2.0
// Settings and names of experiments.
#include "suite/published/experiment.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "fixtures/cases/device_settings.h"
#include "harness/world/interrupt.h"
#include "harness/world/machine.h"
#include "subjects/model/config/limits.h"
#include "suite/published/internal.h"

namespace isoshard {
namespace {

constexpr ExperimentKind kKinds[] = {ExperimentKind::kInit, ExperimentKind::kColumnRow,
                                     ExperimentKind::kStack, ExperimentKind::kGrowth};
constexpr int kMaxTp = 16;

struct NamedSize {
  const char* name;
  std::int64_t value;
};

void check_divides(int tp, const NamedSize& size) {
  if (size.value % tp != 0)
    throw UsageError(fmt::format("tp {} does not divide the {} of {}", tp, size.name, size.value));
}

/// Elements of the largest tensors that one part holds at once: input, weights, output.
double num_elements(const ExperimentSettings& s, ExperimentKind kind) {
  const auto wide = [](std::int64_t size) { return static_cast<double>(size); };
  const double rows = wide(s.seq_length) * wide(s.batch_size), hidden = wide(s.hidden_size),
               ffn = wide(s.ffn_size), matrix = hidden * ffn;
  switch (kind) {
    case ExperimentKind::kInit:
      return std::max(matrix, hidden * hidden);
    case ExperimentKind::kColumnRow:
    case ExperimentKind::kStack:
      return rows * ffn + matrix + rows * hidden;
    case ExperimentKind::kGrowth:
      break;
  }
  const double scores = wide(s.seq_length) * wide(s.seq_length);  // of one head of one sample
  return rows * ffn + rows * hidden + std::max(matrix, hidden * hidden) + scores;
}

/// Refuses what no dtype could make fit.
void require_memory(const ExperimentSettings& settings, ExperimentKind kind) {
  constexpr double kSmallestElement = 2, kGiB = 1 << 30;
  const double needed = kSmallestElement * num_elements(settings, kind);
  const auto there = static_cast<double>(memory_of_machine().bytes);
  if (there <= 0 || needed <= there) return;
  throw UsageError(fmt::format(
      "experiment {} needs at least {:.3g} GiB of memory, the machine has {:.3g} GiB; take smaller "
      "sizes: hidden {}, ffn {}, sequence length {}, batch {}",
      name_of(kind), needed / kGiB, there / kGiB, settings.hidden_size, settings.ffn_size,
      settings.seq_length, settings.batch_size));
}

}  // namespace

std::string_view name_of(ExperimentKind kind) noexcept {
  switch (kind) {
    case ExperimentKind::kInit:
      return "init";
    case ExperimentKind::kColumnRow:
      return "column-row";
    case ExperimentKind::kStack:
      return "stack";
    case ExperimentKind::kGrowth:
      return "growth";
  }
  return "unknown";
}

ExperimentKind parse_experiment_kind(std::string_view name) {
  std::vector<std::string> known;
  for (const ExperimentKind kind : kKinds) {
    if (name_of(kind) == name) return kind;
    known.emplace_back(name_of(kind));
  }
  throw UsageError(fmt::format("unknown experiment '{}'{}; it must be one of {}", name,
                               did_you_mean(name, known), join_names(known)));
}

void ExperimentSettings::validate(ExperimentKind kind) const {
  const NamedSize hidden{"hidden size", hidden_size}, heads{"number of heads", num_heads},
      ffn{"ffn size", ffn_size};
  for (const NamedSize& size :
       {NamedSize{"number of layers", layers}, hidden, heads, ffn,
        NamedSize{"sequence length", seq_length}, NamedSize{"batch size", batch_size}}) {
    if (size.value < 1)
      throw UsageError(fmt::format("the {} must be at least 1, got {}", size.name, size.value));
  }
  if (layers > kMaxLayers)
    throw UsageError(
        fmt::format("the number of layers must be at most {}, got {}", kMaxLayers, layers));
  require_memory(*this, kind);
  if (device != Device::Kind::kCpu) require_gpu();
  if (tp.empty() || dtypes.empty() || orders.empty())
    throw UsageError("nothing is selected; an experiment needs a tp degree, a dtype and an order");
  if (kind != ExperimentKind::kInit && tp.size() != 1) {
    throw UsageError(fmt::format("{} takes one tp degree, got {}; init compares several",
                                 name_of(kind), tp.size()));
  }
  const bool transformer = kind == ExperimentKind::kInit || kind == ExperimentKind::kGrowth;
  if (transformer && hidden_size % num_heads != 0) {
    throw UsageError(fmt::format("the hidden size must be divisible by the {} heads, got {}",
                                 num_heads, hidden_size));
  }
  for (const int degree : tp) {
    if (degree < 1 || degree > kMaxTp)
      throw UsageError(fmt::format("the tp degree must be from 1 to {}, got {}", kMaxTp, degree));
    check_divides(degree, ffn);
    if (transformer) check_divides(degree, heads);
    if (kind == ExperimentKind::kColumnRow) check_divides(degree, hidden);
  }
  for (const Dtype dtype : dtypes) {
    if (dtype != Dtype::kFloat64 && dtype != Dtype::kFloat32 && dtype != Dtype::kBFloat16) {
      throw UsageError(fmt::format("the dtype of an experiment must be fp64, fp32 or bf16, got {}",
                                   name_of(dtype)));
    }
  }
  for (const ReductionOrder order : orders) {
    if (order == ReductionOrder::kNative)
      throw UsageError(
          "reduction order native is not available for experiments; use ordered, ring or tree");
  }
}

ExperimentSettings default_settings(ExperimentKind kind, bool full) {
  ExperimentSettings settings;
  switch (kind) {
    case ExperimentKind::kInit:
      settings.tp = {1, 2, 4};
      settings.dtypes = {Dtype::kFloat32};
      settings.layers = 2;
      break;
    case ExperimentKind::kColumnRow:
      settings.orders = {ReductionOrder::kOrdered, ReductionOrder::kRing, ReductionOrder::kTree};
      break;
    case ExperimentKind::kStack:
      settings.layers = 16;
      break;
    case ExperimentKind::kGrowth:
      settings.dtypes = {Dtype::kBFloat16, Dtype::kFloat32};
      settings.layers = 28;
      break;
  }
  if (full) return settings;
  // The sums keep their published length where the claim depends on it; the others are small.
  switch (kind) {
    case ExperimentKind::kInit:
      settings.hidden_size = 128;
      settings.num_heads = 8;
      settings.ffn_size = 512;
      break;
    case ExperimentKind::kColumnRow:
      settings.seq_length = 128;
      break;
    case ExperimentKind::kStack:
      settings.seq_length = 16;
      break;
    case ExperimentKind::kGrowth:
      settings.hidden_size = 128;
      settings.num_heads = 8;
      settings.ffn_size = 512;
      settings.seq_length = 64;
      break;
  }
  return settings;
}

ExperimentReport run_experiment(ExperimentKind kind, const ExperimentSettings& settings,
                                const ExperimentProgress& progress) {
  settings.validate(kind);
  const ExperimentProgress shown = progress ? progress : [](std::string_view) {};
  switch (kind) {
    case ExperimentKind::kInit:
      return detail::run_init(settings, shown);
    case ExperimentKind::kColumnRow:
      return detail::run_column_row(settings, shown);
    case ExperimentKind::kStack:
      return detail::run_stack(settings, shown);
    case ExperimentKind::kGrowth:
      break;
  }
  return detail::run_growth(settings, shown);
}

Report report_experiment(ExperimentKind kind, const ExperimentSettings& settings,
                         const ExperimentProgress& progress) {
  Report report;
  report.environment = settings_in_environment();
  report.environment.merge(detail::environment_of(kind, settings));
  try {
    ExperimentReport found = run_experiment(kind, settings, progress);
    const std::string name(name_of(kind));
    report.summary =
        fmt::format("experiment {}: {}", name, found.holds ? "every claim holds" : "a claim FAILS");
    report.add(ReportExperiment{.name = name,
                                .holds = found.holds,
                                .text = std::move(found.text),
                                .json = std::move(found.json)});
  } catch (const InfrastructureError&) {
    if (interrupt_signal() == 0) throw;
    report.exit_code = 128 + interrupt_signal();
  }
  return report;
}

int num_parts(ExperimentKind kind, const ExperimentSettings& settings) {
  const int dtypes = static_cast<int>(settings.dtypes.size()),
            orders = static_cast<int>(settings.orders.size());
  switch (kind) {
    case ExperimentKind::kInit:
      return dtypes * static_cast<int>(settings.tp.size());
    case ExperimentKind::kColumnRow:
      return 1 + dtypes * (1 + orders);
    case ExperimentKind::kStack:
    case ExperimentKind::kGrowth:
      break;
  }
  return dtypes * orders;
}

}  // namespace isoshard
