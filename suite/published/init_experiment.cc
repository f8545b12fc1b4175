// SPDX-License-Identifier: Apache-2.0
// Section 1 of docs/internals/seeds.md 3: shards of every tp, gathered, are the same weights.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>

#include "core/comm/tensor.h"
#include "suite/published/internal.h"
#include "suite/published/transformer_stack.h"

namespace isoshard::detail {
namespace {

// Every rank reads its part, the parts are gathered, and the whole is compared with what one
// process reads.
nlohmann::json init_rank(Rank& rank, const ExperimentSettings& settings, Dtype dtype) {
  const TransformerStack stack(settings, device_of(rank, settings));
  const ShardPlan plan = stack.plan();
  nlohmann::json parameters = nlohmann::json::array();
  for (const ParameterSpec& spec : stack.parameters()) {
    const int dim = plan.sharded_dim(spec);
    const at::Tensor local = stack.read(spec, dtype, rank.rank(), rank.size());
    at::Tensor whole = local;
    if (dim >= 0)
      whole = all_gather(rank.comm(), local.transpose(0, dim).contiguous(),
                         {Purpose::kParamGather, Axis::kTp, {}})
                  .transpose(0, dim);
    if (rank.rank() != 0) continue;
    const at::Tensor reference = stack.read(spec, dtype, 0, 1);
    parameters.push_back(
        {{"name", spec.name},
         {"shape", spec.shape},
         {"split", name_of(plan.kind_of(spec.name))},
         {"local_numel", local.numel()},
         {"max", (whole.to(at::kDouble) - reference.to(at::kDouble)).abs().max().item<double>()},
         {"digest", digest_of(whole)}});
  }
  return parameters;
}

// Equal digests over all tp; the largest difference from the single process's weights.
void print_parameters(Findings& findings, const ExperimentSettings& settings, Dtype dtype,
                      const std::vector<nlohmann::json>& by_tp) {
  std::vector<std::string> heads;
  for (const int tp : settings.tp) heads.push_back(fmt::format("{:>8}", fmt::format("tp {}", tp)));
  findings.line(fmt::format("\n{:<49} | {:<12} | {:<10} | {}",
                            fmt::format("Parameter ({})", name_of(dtype)), "Shape", "Split",
                            fmt::join(heads, " | ")));
  bool equal = true;
  double max = 0;
  const std::size_t count = by_tp.front().size();
  for (std::size_t i = 0; i < count; ++i) {
    const nlohmann::json& first = by_tp.front().at(i);
    std::vector<std::string> cells;
    for (const nlohmann::json& parameters : by_tp) {
      const nlohmann::json& parameter = parameters.at(i);
      const double gap =
          parameter.at("max").is_null() ? HUGE_VAL : parameter.at("max").get<double>();
      max = std::max(max, gap);
      equal = equal && parameter.at("digest") == first.at("digest");
      cells.push_back(fmt::format("{:>8}", gap));
    }
    findings.line(fmt::format(
        "{:<49} | {:<12} | {:<10} | {}", first.at("name").get<std::string>(),
        fmt::format("[{}]", fmt::join(first.at("shape").get<std::vector<std::int64_t>>(), ", ")),
        first.at("split").get<std::string>(), fmt::join(cells, " | ")));
  }
  findings.claim(equal && max == 0,
                 fmt::format("{}: all {} parameters of tp {} are bit-equal, max diff = {:.1f}",
                             name_of(dtype), count, fmt::join(settings.tp, ", "), max));
}

}  // namespace

ExperimentReport run_init(const ExperimentSettings& settings, const ExperimentProgress& progress) {
  Findings findings(ExperimentKind::kInit, settings);
  findings.line(
      "Initial weights: largest difference of the gathered shards from what one process reads");
  for (const Dtype dtype : settings.dtypes) {
    std::vector<nlohmann::json> by_tp;
    for (const int tp : settings.tp) {
      progress(fmt::format("{}, tp {}", name_of(dtype), tp));
      by_tp.push_back(run_ranks(fmt::format("init_tp{}", tp), tp, ReductionOrder::kOrdered,
                                settings,
                                [&](Rank& rank) { return init_rank(rank, settings, dtype); })
                          .at(0));
    }
    print_parameters(findings, settings, dtype, by_tp);
    findings.add_part({{"dtype", name_of(dtype)}, {"parameters_by_tp", by_tp}});
  }
  return findings.report();
}

}  // namespace isoshard::detail
