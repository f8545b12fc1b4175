// SPDX-License-Identifier: Apache-2.0
// Sections 3 to 6 of docs/internals/seeds.md 3: how the difference grows over the layers of a
// transformer.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "subjects/parallel/tensor/tensor_parallel_strategy.h"
#include "suite/published/internal.h"
#include "suite/published/transformer_stack.h"

namespace isoshard::detail {
namespace {

// docs/internals/seeds.md 3, section 7.
constexpr double kFp32Atol = 1e-3, kBf16Atol = 0.15;

std::vector<double> first_values(const at::Tensor& x_BSH) {
  const at::Tensor values = x_BSH[0][0].slice(0, 0, 5).to(at::kDouble).cpu().contiguous();
  return {values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel()};
}

// Rank 0 runs the whole layers beside its part of them, layer by layer, and compares.
nlohmann::json growth_rank(Rank& rank, const ExperimentSettings& settings, Dtype dtype) {
  const TransformerStack stack(settings, device_of(rank, settings));
  const TensorParallelStrategy split(stack.plan(), rank.comm(), 1, 1.0);
  const Strategy whole;
  const bool compares = rank.rank() == 0;
  at::Tensor actual = stack.input(dtype), reference = actual;
  nlohmann::json layers = nlohmann::json::array();
  for (std::int64_t layer = 0; layer < settings.layers; ++layer) {
    rank.set_phase(fmt::format("layer {}", layer));
    const std::vector<ParameterSpec> specs = stack.layer_parameters(layer);
    actual = stack.forward_layer(layer, stack.read_all(specs, dtype, rank.rank(), rank.size()),
                                 split, actual);
    if (!compares) continue;
    reference = stack.forward_layer(layer, stack.read_all(specs, dtype, 0, 1), whole, reference);
    layers.push_back(to_json(differences(reference, actual)));
  }
  const Parameters last = stack.read_all(stack.final_parameters(), dtype, 0, 1);
  actual = stack.forward_final(last, actual);
  nlohmann::json result = {{"digest", digest_of(actual)}};
  if (!compares) return result;
  reference = stack.forward_final(last, reference);
  result["layers"] = std::move(layers);
  result["final"] = to_json(differences(reference, actual));
  result["reference_values"] = first_values(reference);
  result["actual_values"] = first_values(actual);
  return result;
}

void print_values(Findings& findings, const nlohmann::json& result, int tp) {
  const auto reference = result.at("reference_values").get<std::vector<double>>(),
             actual = result.at("actual_values").get<std::vector<double>>();
  std::vector<double> gaps;
  for (std::size_t i = 0; i < reference.size(); ++i) gaps.push_back(reference[i] - actual[i]);
  findings.line(fmt::format("Typical output values (position 0, sample 0, first {} hidden dims)",
                            reference.size()));
  findings.line(fmt::format("TP=1: [{:9.6f}]", fmt::join(reference, ", ")));
  findings.line(fmt::format("TP={}: [{:9.6f}]", tp, fmt::join(actual, ", ")));
  findings.line(fmt::format("diff: [{:9.6f}]", fmt::join(gaps, ", ")));
}

// The published tolerances, for every layer's output and the final one.
void claim_tolerance(Findings& findings, Dtype dtype, const std::vector<Differences>& rows) {
  double max = 0, excess = 0;
  std::int64_t not_finite = 0;
  for (const Differences& d : rows) {
    max = std::max(max, d.max);
    excess = std::max(excess, d.worst_excess);
    not_finite += d.not_finite;
  }
  findings.claim(not_finite == 0, fmt::format("{}: every output is finite", name_of(dtype)));
  if (dtype == Dtype::kBFloat16) {
    findings.claim(
        max <= kBf16Atol,
        fmt::format("bf16: largest difference {:.6f} is within the published {} absolute", max,
                    kBf16Atol));
    return;
  }
  findings.claim(
      excess <= kFp32Atol,
      fmt::format("{}: largest difference {:.6f} is within the published {} absolute and relative",
                  name_of(dtype), max, kFp32Atol));
}

// The last layer's output; nothing in json that is not in the table.
Differences run_part(Findings& findings, const ExperimentSettings& settings, Dtype dtype,
                     ReductionOrder order) {
  const int tp = settings.tp.front();
  const std::vector<nlohmann::json> ranks =
      run_ranks(fmt::format("growth_{}_{}", name_of(dtype), name_of(order)), tp, order, settings,
                [&](Rank& rank) { return growth_rank(rank, settings, dtype); });
  const nlohmann::json& result = ranks.at(0);
  findings.line(fmt::format("\nPer-layer difference, TP=1 against TP={}, {}, {} reduction", tp,
                            name_of(dtype), name_of(order)));
  findings.line(layer_table_head());
  std::vector<Differences> rows;
  for (const nlohmann::json& layer : result.at("layers")) {
    const auto index = static_cast<std::int64_t>(rows.size());
    rows.push_back(differences_of(layer));
    if (is_shown(index, settings.layers))
      findings.line(layer_table_line(std::to_string(index), rows.back()));
  }
  const Differences last_layer = rows.back();
  rows.push_back(differences_of(result.at("final")));
  findings.line(layer_table_line("final", rows.back()));
  print_values(findings, result, tp);
  claim_tolerance(findings, dtype, rows);
  findings.claim(
      digests_agree(ranks),
      fmt::format("{}: all {} ranks have the same output, bit for bit", name_of(dtype), tp));
  findings.add_part({{"dtype", name_of(dtype)}, {"order", name_of(order)}, {"result", result}});
  return last_layer;
}

void print_ratios(Findings& findings, const Differences& narrow, const Differences& wide,
                  std::int64_t layers) {
  findings.line(fmt::format(
      "\n| Metric (after {} layers)      | bf16         | fp32         | Ratio    |", layers));
  findings.line("|-------------------------------|--------------|--------------|----------|");
  const auto ratio = [](double a, double b) {
    return b > 0 ? fmt::format("~{:.0f}x", a / b) : std::string("-");
  };
  findings.line(fmt::format("| Max absolute diff             | {:<12.4g} | {:<12.3g} | {:<8} |",
                            narrow.max, wide.max, ratio(narrow.max, wide.max)));
  findings.line(fmt::format("| Mean absolute diff            | {:<12.4g} | {:<12.3g} | {:<8} |",
                            narrow.mean, wide.mean, ratio(narrow.mean, wide.mean)));
  for (const double threshold : {1e-3, 1e-2}) {
    findings.line(fmt::format("| % elements > {:<16} | {:<12} | {:<12} | -        |", threshold,
                              fmt::format("{:.2f}%", narrow.percent_above(threshold)),
                              fmt::format("{:.2f}%", wide.percent_above(threshold))));
  }
}

}  // namespace

ExperimentReport run_growth(const ExperimentSettings& settings,
                            const ExperimentProgress& progress) {
  Findings findings(ExperimentKind::kGrowth, settings);
  findings.line(
      fmt::format("{}-layer transformer, hidden_size={}, {} attention heads, ffn_size={}, "
                  "seq_len={}, batch_size={}",
                  settings.layers, settings.hidden_size, settings.num_heads, settings.ffn_size,
                  settings.seq_length, settings.batch_size));
  for (const ReductionOrder order : settings.orders) {
    Differences bf16, fp32;
    for (const Dtype dtype : settings.dtypes) {
      progress(fmt::format("{}, {}", name_of(dtype), name_of(order)));
      const Differences last = run_part(findings, settings, dtype, order);
      if (dtype == Dtype::kBFloat16) bf16 = last;
      if (dtype == Dtype::kFloat32) fp32 = last;
    }
    if (bf16.numel > 0 && fp32.numel > 0) print_ratios(findings, bf16, fp32, settings.layers);
  }
  return findings.report();
}

}  // namespace isoshard::detail
