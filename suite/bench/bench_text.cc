// SPDX-License-Identifier: Apache-2.0
// Pictures and tables.
#include "suite/bench/bench_text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <set>

#include "core/mesh/mesh_words.h"
#include "subjects/registry/subject_spec.h"
#include "suite/bench/bench_statistics.h"
#include "suite/bench/formulas/flops.h"

namespace isoshard {
namespace {

std::string upper(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return result;
}

/// Of rank `first` and those that differ from it in dp and tp.
void add_picture(const MeshShape& mesh, int first, Lines& lines) {
  lines.emplace_back("        TP dimension (tensor parallel)");
  lines.emplace_back("        ----------------------->");
  const std::vector<int> rows = mesh.group_of(first, Axis::kDp);
  const std::size_t width = std::to_string(mesh.world_size() - 1).size();
  for (std::size_t row = 0; row < rows.size(); ++row) {
    std::string cells;
    for (const int rank : mesh.group_of(rows[row], Axis::kTp))
      cells += fmt::format(" rank{:<{}}", rank, width);
    lines.push_back(fmt::format("   {:<3} |{} |  <- DP replica {}",
                                row == 0   ? "DP"
                                : row == 1 ? "dim"
                                           : " | ",
                                cells, row));
  }
  if (rows.size() == 1) lines.emplace_back("   dim |");
  lines.emplace_back("    |");
  lines.emplace_back("    v");
}

std::string groups_along(const MeshShape& mesh, Axis axis) {
  std::set<std::vector<int>> groups;
  for (int rank = 0; rank < mesh.world_size(); ++rank) groups.insert(mesh.group_of(rank, axis));
  std::vector<std::string> words;
  for (const std::vector<int>& group : groups)
    words.push_back(fmt::format("{{{}}}", fmt::join(group, ",")));
  return fmt::format("{}", fmt::join(words, ", "));
}

std::string place_of(Axis axis) {
  return axis == Axis::kTp ? " (same row)" : axis == Axis::kDp ? " (same column)" : "";
}

std::string meaning_of(Axis axis) {
  switch (axis) {
    case Axis::kTp:
      return "  - Model weights are split across these groups; each group processes the same data";
    case Axis::kDp:
      return "  - Gradients are reduced across these groups; each rank of one has other samples";
    case Axis::kPp:
      return "  - Stages of the model follow each other across these groups";
    default:
      return "  - Tokens of each sample are shared out across these groups";
  }
}

std::string bytes_in_words(double bytes) {
  constexpr double kKiB = 1024, kMiB = 1024 * kKiB;
  if (bytes < kMiB) return fmt::format("{:.1f} KiB", bytes / kKiB);
  if (bytes < kBytesPerGb) return fmt::format("{:.1f} MiB", bytes / kMiB);
  return fmt::format("{:.2f} GiB", bytes / kBytesPerGb);
}

std::string gib_in_words(double gib) {
  return bytes_in_words(gib * kBytesPerGb);
}

void add_steps(const BenchResult& result, Lines& lines) {
  if (result.plan.log_interval < 1) return;
  for (const WorldStep& step : world_steps(result.runs.back(), result.plan.item)) {
    if (step.step % result.plan.log_interval != 0) continue;
    lines.push_back(fmt::format("step {:>4}  loss {:.4f}  {:.2f} ms  {:.0f} tokens/s  peak {}",
                                step.step, step.loss, kMillisecondsPerSecond * step.times.total,
                                step.tokens_per_second, gib_in_words(step.peak_gb)));
  }
}

std::string utilization_in_words(const std::optional<double>& share) {
  return share.has_value() ? fmt::format("{:.1f} %", kPercent * *share) : "unknown";
}

void add_utilization(const BenchSummary& s, const GemmCeiling& ceiling, Lines& lines) {
  lines.push_back(fmt::format("{:.3f} GFLOP a step: {} of the {:.1f} GFLOP/s of products",
                              s.model_flops / 1e9, utilization_in_words(s.model_utilization),
                              ceiling.flops_per_second / 1e9));
  lines.push_back(fmt::format("  (squares of {} beside the steps, on as many ranks, {} threads)",
                              ceiling.size, ceiling.threads));
  if (s.hardware_flops > s.model_flops)
    lines.push_back(fmt::format("  with what is computed again {}",
                                utilization_in_words(s.hardware_utilization)));
  if (s.model_utilization.has_value()) return;
  lines.push_back(fmt::format("  steps reached {:.1f} GFLOP/s, more than products beside them did:",
                              s.model_flops / s.mean_s / 1e9));
  lines.emplace_back("  the machine was busy when these were timed; take more steps");
}

void add_parts(const StepTimes& times, Lines& lines) {
  const auto row = [&](const char* name, StepPart part) {
    lines.push_back(fmt::format("  {:<14} {:>10.3f} ms {:>6.1f} %", name,
                                kMillisecondsPerSecond * times.of(part),
                                kPercent * times.of(part) / times.total));
  };
  lines.emplace_back("where a step goes (mean of the slowest rank of each step)");
  row("forward", StepPart::kForward);
  row("backward", StepPart::kBackward);
  row("optimizer", StepPart::kOptimizer);
  row("communication", StepPart::kCommunication);
  row("other", StepPart::kOther);
  lines.push_back(
      fmt::format("  {:<14} {:>10.3f} ms", "step", kMillisecondsPerSecond * times.total));
}

void add_collectives(const BenchRun& run, Lines& lines) {
  const std::vector<ReportCollective> rows = purpose_rows(run);
  if (rows.empty() || run.ranks.size() == 1) return;
  lines.emplace_back("collectives of a step");
  lines.push_back(fmt::format("  {:<24} {:>12} {:>16} {:>10}", "purpose", "calls a rank",
                              "bytes, all ranks", "ms a rank"));
  for (const ReportCollective& row : rows)
    lines.push_back(fmt::format("  {:<24} {:>12.1f} {:>16} {:>10.3f}", row.purpose,
                                row.calls_per_rank, bytes_in_words(row.bytes),
                                kMillisecondsPerSecond * row.seconds_per_rank));
}

}  // namespace

Lines mesh_lines(const Case& item) {
  Lines lines;
  if (is_reference(item.subject)) {
    lines.emplace_back("One process: nothing is sharded.");
    return lines;
  }
  const MeshShape mesh = item.mesh();
  std::vector<std::string> sizes;
  for (const AxisDegree& axis : mesh.axes())
    sizes.push_back(fmt::format("{}_size={}", name_of(axis.axis), axis.degree));
  lines.push_back(fmt::format("For {} {} with {}:", mesh.world_size(),
                              mesh.world_size() == 1 ? "process" : "processes",
                              fmt::join(sizes, ", ")));
  lines.emplace_back();
  for (int rank = 0; rank < mesh.world_size(); ++rank) {
    if (mesh.coordinate(rank, Axis::kDp) != 0 || mesh.coordinate(rank, Axis::kTp) != 0) continue;
    if (mesh.degree(Axis::kPp) > 1 || mesh.degree(Axis::kCp) > 1)
      lines.push_back(fmt::format("   pp {}, cp {}:", mesh.coordinate(rank, Axis::kPp),
                                  mesh.coordinate(rank, Axis::kCp)));
    add_picture(mesh, rank, lines);
    lines.emplace_back();
  }
  for (auto axis = mesh.axes().rbegin(); axis != mesh.axes().rend(); ++axis) {
    lines.push_back(fmt::format("- {} groups{}: {}", upper(name_of(axis->axis)),
                                place_of(axis->axis), groups_along(mesh, axis->axis)));
    lines.push_back(meaning_of(axis->axis));
  }
  return lines;
}

Lines plan_lines(const BenchPlan& plan) {
  const Case& item = plan.item;
  return {fmt::format("{} ({}), {}, {} layers, {}, {}", plan.impl, title_of_subject(item.subject),
                      plan.model_name, item.config.num_layers,
                      item.settings.autocast.has_value()
                          ? fmt::format("autocast {}", name_of(*item.settings.autocast))
                          : std::string(name_of(item.dtype)),
                      name_of(item.attention)),
          fmt::format("{:.0f} tokens a step: dp {} x {} micro-batches x batch {} x {} tokens; {} "
                      "threads a rank; {} steps, {} of them warm-up",
                      tokens_per_step(item), item.degrees.dp, item.micro_batches, item.batch_size,
                      item.seq_length, plan.threads, item.steps, plan.warmup_steps)};
}

Lines gate_lines(const GateResult& gate) {
  switch (gate.state) {
    case GateState::kConforms:
      return {fmt::format("gate: {} conforms ({})", gate.twin, gate.strength)};
    case GateState::kRemembered:
      return {fmt::format("gate: {} conformed ({}) with this program and CPU", gate.twin,
                          gate.strength)};
    case GateState::kTrusted:
      return {"gate: the reference is what others are judged against"};
    case GateState::kUngated:
      return {"gate: none (--ungated): nothing says that this run computes what it should"};
    case GateState::kFails:
      break;
  }
  return {fmt::format("gate: {} does not conform, so nothing is timed", gate.twin)};
}

Lines result_lines(const BenchResult& result) {
  Lines lines;
  add_steps(result, lines);
  const BenchSummary s = summary_of(result);
  lines.push_back(fmt::format(
      "{} steps: mean {:.3f} ms (deviation {:.3f}), median {:.3f}, 95 % below {:.3f}", s.num_steps,
      kMillisecondsPerSecond * s.mean_s, kMillisecondsPerSecond * s.deviation_s,
      kMillisecondsPerSecond * s.p50_s, kMillisecondsPerSecond * s.p95_s));
  lines.push_back(fmt::format("{:.1f} tokens/s, {:.3f} samples/s of the global batch; loss {:.4f}",
                              s.tokens_per_second, s.samples_per_second, s.final_loss));
  add_utilization(s, result.ceiling, lines);
  add_parts(s.times, lines);
  if (result.runs.back().ranks.size() > 1)
    lines.push_back(fmt::format(
        "  {:.1f} % of communication is issued during backward, {}", kPercent * s.in_backward_share,
        s.hidden_share ? fmt::format("{:.1f} % is hidden", kPercent * *s.hidden_share)
                       : "what is hidden is not measured"));
  add_collectives(result.runs.back(), lines);
  lines.push_back(fmt::format("memory: at most {} of tensors a rank, {} on all ranks",
                              gib_in_words(s.peak_gb), gib_in_words(s.peak_all_gb)));
  lines.push_back(fmt::format("  resident on all ranks {}", gib_in_words(s.resident_all_gb)));
  return lines;
}

Lines speed_lines(const BenchResult& result) {
  const BenchSummary s = summary_of(result);
  return {fmt::format("{} {}: median {:.3f} ms a step, {:.1f} tokens/s", result.plan.impl,
                      result.plan.item.slug(), kMillisecondsPerSecond * s.p50_s,
                      s.tokens_per_second)};
}

std::string text_of(const Lines& lines, bool is_gated) {
  std::string text;
  for (const std::string& line : lines)
    text += fmt::format("{}{}\n", is_gated ? "" : "[ungated] ", line);
  return text;
}

}  // namespace isoshard
