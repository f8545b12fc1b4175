// SPDX-License-Identifier: Apache-2.0
// Section 2.2 of docs/internals/seeds.md 3: column-row pairs one after the other, h = (h W_col^T)
// W_row^T.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cmath>

#include "subjects/model/ops/linear.h"
#include "subjects/parallel/tensor/tensor_parallel_strategy.h"
#include "suite/published/drawn.h"
#include "suite/published/internal.h"

namespace isoshard::detail {
namespace {

struct Pair {
  Drawn column, row;
};

// Weights that keep outputs of the inputs' scale.
Pair pair_of(const ExperimentSettings& s, std::int64_t layer, c10::Device device) {
  return {{fmt::format("column.{}", layer),
           {s.ffn_size, s.hidden_size},
           1 / std::sqrt(static_cast<double>(s.hidden_size)),
           s.seed,
           device},
          {fmt::format("row.{}", layer),
           {s.hidden_size, s.ffn_size},
           1 / std::sqrt(static_cast<double>(s.ffn_size)),
           s.seed,
           device}};
}

nlohmann::json stack_rank(Rank& rank, const ExperimentSettings& s, Dtype dtype) {
  ShardPlan plan;
  plan.kinds = {{"column.weight", ShardKind::kColumn}, {"row.weight", ShardKind::kRow}};
  const TensorParallelStrategy split(plan, rank.comm(), 1, 1.0);
  const c10::Device device = device_of(rank, s);
  at::Tensor actual = Drawn{"hidden_states",
                            {s.seq_length, s.batch_size, s.hidden_size},
                            1.0,
                            s.seed,
                            device}
                          .whole(dtype),
             reference = actual;
  nlohmann::json layers = nlohmann::json::array();
  for (std::int64_t layer = 0; layer < s.layers; ++layer) {
    rank.set_phase(fmt::format("layer {}", layer));
    const Pair pair = pair_of(s, layer, device);
    const at::Tensor wide =
        split.linear("column", actual, pair.column.part(dtype, 0, rank.rank(), rank.size()),
                     std::nullopt, nullptr);
    actual = split.linear("row", wide, pair.row.part(dtype, 1, rank.rank(), rank.size()),
                          std::nullopt, nullptr);
    if (rank.rank() != 0) continue;
    reference =
        apply_linear(apply_linear(reference, pair.column.whole(dtype)), pair.row.whole(dtype));
    layers.push_back(to_json(differences(reference, actual)));
  }
  return {{"digest", digest_of(actual)}, {"layers", std::move(layers)}};
}

void run_part(Findings& findings, const ExperimentSettings& s, Dtype dtype, ReductionOrder order) {
  const int tp = s.tp.front();
  const std::vector<nlohmann::json> ranks =
      run_ranks(fmt::format("stack_{}_{}", name_of(dtype), name_of(order)), tp, order, s,
                [&](Rank& rank) { return stack_rank(rank, s, dtype); });
  findings.line(fmt::format("\n{} column-row pairs, TP=1 against TP={}, {}, {} reduction", s.layers,
                            tp, name_of(dtype), name_of(order)));
  findings.line(layer_table_head());
  std::vector<Differences> rows;
  std::int64_t not_finite = 0;
  for (const nlohmann::json& layer : ranks.at(0).at("layers")) {
    const auto index = static_cast<std::int64_t>(rows.size());
    rows.push_back(differences_of(layer));
    not_finite += rows.back().not_finite;
    if (is_shown(index, s.layers))
      findings.line(layer_table_line(std::to_string(index), rows.back()));
  }
  findings.claim(not_finite == 0,
                 fmt::format("{}, {}: every output is finite", name_of(dtype), name_of(order)));
  findings.claim(digests_agree(ranks),
                 fmt::format("{}, {}: all {} ranks have the same output, bit for bit",
                             name_of(dtype), name_of(order), tp));
  const Differences &first = rows.front(), &last = rows.back();
  if (tp == 1) {
    findings.claim(last.max == 0, "a tp of 1 is the single process, bit for bit");
  } else if (s.layers >= 4) {
    findings.claim(
        last.mean > first.mean && first.mean > 0,
        fmt::format("{}, {}: the mean difference grows over {} layers, {:.1f}x (max {:.1f}x)",
                    name_of(dtype), name_of(order), s.layers, last.mean / first.mean,
                    last.max / first.max));
  }
  findings.add_part(
      {{"dtype", name_of(dtype)}, {"order", name_of(order)}, {"layers", ranks.at(0).at("layers")}});
}

}  // namespace

ExperimentReport run_stack(const ExperimentSettings& settings, const ExperimentProgress& progress) {
  Findings findings(ExperimentKind::kStack, settings);
  findings.line(fmt::format("input [{}, {}, {}], W_col [{}, {}], W_row [{}, {}]",
                            settings.seq_length, settings.batch_size, settings.hidden_size,
                            settings.ffn_size, settings.hidden_size, settings.hidden_size,
                            settings.ffn_size));
  for (const Dtype dtype : settings.dtypes) {
    for (const ReductionOrder order : settings.orders) {
      progress(fmt::format("{}, {}", name_of(dtype), name_of(order)));
      run_part(findings, settings, dtype, order);
    }
  }
  return findings.report();
}

}  // namespace isoshard::detail
