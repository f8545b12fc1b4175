// SPDX-License-Identifier: Apache-2.0
// Section 2.1 of docs/internals/seeds.md 3: a column-parallel product is
// exact, a row-parallel one is not, and by how much.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>

#include "subjects/model/ops/linear.h"
#include "subjects/parallel/tensor/tensor_parallel_strategy.h"
#include "suite/published/column_probe.h"
#include "suite/published/drawn.h"
#include "suite/published/internal.h"
#include "suite/published/row_bound.h"

namespace isoshard::detail {
namespace {

// What docs/internals/seeds.md 3 prints for tp 4, bf16 and sums of 4096 products; they hold for
// per-hop and pairwise rounding.
constexpr double kPublished[3][2] = {{1e-4, 50.0}, {1e-3, 41.6}, {1e-2, 1.3}};
constexpr double kPointsAllowed = 1.5;
constexpr std::int64_t kPublishedTerms = 4096, kRowsPerBlock = 1024;

nlohmann::json row_rank(Rank& rank, const ExperimentSettings& s, Dtype dtype,
                        ReductionOrder order) {
  const c10::Device device = device_of(rank, s);
  const Drawn x{"x", {s.seq_length * s.batch_size, s.ffn_size}, 1.0, s.seed, device};
  const Drawn weight{"weight",
                     {s.hidden_size, s.ffn_size},
                     1 / std::sqrt(static_cast<double>(s.ffn_size)),
                     s.seed,
                     device};
  ShardPlan plan;
  plan.kinds = {{"row.weight", ShardKind::kRow}};
  const TensorParallelStrategy split(plan, rank.comm(), 1, 1.0);
  const at::Tensor actual =
      split.linear("row", x.part(dtype, 1, rank.rank(), rank.size()),
                   weight.part(dtype, 1, rank.rank(), rank.size()), std::nullopt, nullptr);
  nlohmann::json result = {{"digest", digest_of(actual)}};
  if (rank.rank() != 0) return result;
  const at::Tensor x_MK = x.whole(dtype), weight_NK = weight.whole(dtype),
                   reference = apply_linear(x_MK, weight_NK);
  double share = 0;
  for (std::int64_t row = 0; row < x_MK.size(0); row += kRowsPerBlock) {
    const auto block = [&](const at::Tensor& t) {
      return t.narrow(0, row, std::min(kRowsPerBlock, t.size(0) - row));
    };
    share = std::max(share, share_of_bound(block(reference), block(actual),
                                           row_parallel_bound(block(x_MK), weight_NK, rank.size(),
                                                              dtype, order)));
  }
  result["differences"] = to_json(differences(reference, actual));
  result["share_of_bound"] = share;
  return result;
}

void print_row_table(Findings& findings, const Differences& d) {
  findings.line(fmt::format("Max abs diff:    {:.6f}", d.max));
  findings.line(fmt::format("Mean abs diff:   {:.8f}", d.mean));
  findings.line(fmt::format("Median abs diff: {:.8f}", d.median));
  findings.line(fmt::format("Output mean:     {:.6f}", d.reference_mean));
  findings.line(fmt::format("Output std:      {:.6f}", d.reference_std));
  for (const double threshold : kThresholds)
    findings.line(fmt::format("% > {:g}: {:5.1f}%", threshold, d.percent_above(threshold)));
}

void claim_published(Findings& findings, ReductionOrder order, const Differences& d) {
  for (const auto& [threshold, published] : kPublished) {
    const double measured = d.percent_above(threshold);
    findings.claim(
        std::abs(measured - published) <= kPointsAllowed,
        fmt::format("{}: {:.1f} % above {:g}; published {:.1f} %, {} points apart allowed",
                    name_of(order), measured, threshold, published, kPointsAllowed));
  }
}

void run_row(Findings& findings, const ExperimentSettings& s, Dtype dtype, ReductionOrder order) {
  const int tp = s.tp.front();
  const std::vector<nlohmann::json> ranks =
      run_ranks(fmt::format("row_{}_{}", name_of(dtype), name_of(order)), tp, order, s,
                [&](Rank& rank) { return row_rank(rank, s, dtype, order); });
  const nlohmann::json& result = ranks.at(0);
  const Differences d = differences_of(result.at("differences"));
  const double share =
      result.at("share_of_bound").is_null() ? HUGE_VAL : result.at("share_of_bound").get<double>();
  findings.line(fmt::format(
      "\nRow-parallel (TP=1 against TP={}, {}, {} reduction, input=[{},{},{}], weight=[{},{}])", tp,
      name_of(dtype), name_of(order), s.seq_length, s.batch_size, s.ffn_size, s.hidden_size,
      s.ffn_size));
  print_row_table(findings, d);
  findings.claim(share <= 1, fmt::format("{}, {}: within the analytic bound (largest share {:.3f})",
                                         name_of(dtype), name_of(order), share));
  findings.claim(digests_agree(ranks),
                 fmt::format("{}, {}: all {} ranks have the same output, bit for bit",
                             name_of(dtype), name_of(order), tp));
  const bool as_published = dtype == Dtype::kBFloat16 && tp == 4 && s.ffn_size == kPublishedTerms;
  if (as_published && order != ReductionOrder::kOrdered) claim_published(findings, order, d);
  findings.add_part(
      {{"layer", "row"}, {"dtype", name_of(dtype)}, {"order", name_of(order)}, {"result", result}});
}

nlohmann::json to_json(const ColumnProbe& probe) {
  return {{"dtype", name_of(probe.dtype)},
          {"rows", probe.shape.rows},
          {"in", probe.shape.in},
          {"out", probe.shape.out},
          {"tp", probe.tp},
          {"unequal", probe.unequal},
          {"max", probe.max}};
}

void print_probe(Findings& findings, const nlohmann::json& probe) {
  const std::int64_t unequal = probe.at("unequal").get<std::int64_t>();
  const std::int64_t numel =
      probe.at("rows").get<std::int64_t>() * probe.at("out").get<std::int64_t>();
  findings.line(fmt::format(
      "{:<5} | {:>5} x {:>4} x {:>4} | {:>2} | {}", probe.at("dtype").get<std::string>(),
      probe.at("rows").get<std::int64_t>(), probe.at("in").get<std::int64_t>(),
      probe.at("out").get<std::int64_t>(), probe.at("tp").get<int>(),
      unequal == 0 ? "bit-equal"
                   : fmt::format("{} of {} differ, max {:.3g}", unequal, numel,
                                 probe.at("max").get<double>())));
}

// One world for each tp: every dtype and shape. bf16 must be exact (docs/internals/facts.md); the
// others are told as they are.
void run_probes(Findings& findings, const ExperimentSettings& s) {
  findings.line("Column-parallel output against its part of the whole product");
  findings.line(
      "dtype | rows x in x out      | tp | bits\n------+----------------------+----+-----");
  bool exact_in_bf16 = true;
  for (const int tp : kProbedDegrees) {
    const std::vector<nlohmann::json> ranks = run_ranks(
        fmt::format("column_probes_tp{}", tp), tp, ReductionOrder::kOrdered, s, [&](Rank& rank) {
          nlohmann::json probes = nlohmann::json::array();
          for (const Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat32, Dtype::kFloat64}) {
            for (const ProductShape& shape : probed_shapes())
              probes.push_back(
                  to_json(probe_column(rank, dtype, shape, s.seed, device_of(rank, s))));
          }
          return probes;
        });
    for (const nlohmann::json& probe : ranks.at(0)) {
      print_probe(findings, probe);
      exact_in_bf16 = exact_in_bf16 && (probe.at("dtype") != "bf16" || probe.at("unequal") == 0);
    }
    findings.add_part({{"layer", "column probes"}, {"tp", tp}, {"probes", ranks.at(0)}});
  }
  findings.claim(exact_in_bf16,
                 "bf16: column-parallel outputs of every probed shape are bit-equal");
}

void run_column(Findings& findings, const ExperimentSettings& s, Dtype dtype) {
  const int tp = s.tp.front();
  const ProductShape shape{s.seq_length * s.batch_size, s.ffn_size, s.hidden_size};
  const std::vector<nlohmann::json> ranks = run_ranks(
      fmt::format("column_{}", name_of(dtype)), tp, ReductionOrder::kOrdered, s, [&](Rank& rank) {
        return to_json(probe_column(rank, dtype, shape, s.seed, device_of(rank, s)));
      });
  const auto unequal = ranks.at(0).at("unequal").get<std::int64_t>();
  findings.line(fmt::format(
      "\nColumn-parallel (TP=1 against TP={}, {}, input=[{},{},{}], weight=[{},{}])", tp,
      name_of(dtype), s.seq_length, s.batch_size, s.ffn_size, s.hidden_size, s.ffn_size));
  findings.line(fmt::format("Max abs diff:    {}", ranks.at(0).at("max").get<double>()));
  findings.line(fmt::format("Unequal bits:    {} of {}", unequal, shape.rows * shape.out));
  if (dtype == Dtype::kBFloat16) findings.claim(unequal == 0, "bf16: column-parallel is bit-exact");
  findings.add_part({{"layer", "column"}, {"dtype", name_of(dtype)}, {"result", ranks.at(0)}});
}

}  // namespace

ExperimentReport run_column_row(const ExperimentSettings& settings,
                                const ExperimentProgress& progress) {
  Findings findings(ExperimentKind::kColumnRow, settings);
  progress("column probes");
  run_probes(findings, settings);
  for (const Dtype dtype : settings.dtypes) {
    progress(fmt::format("column, {}", name_of(dtype)));
    run_column(findings, settings, dtype);
    for (const ReductionOrder order : settings.orders) {
      progress(fmt::format("row, {}, {}", name_of(dtype), name_of(order)));
      run_row(findings, settings, dtype, order);
    }
  }
  return findings.report();
}

}  // namespace isoshard::detail
