// SPDX-License-Identifier: Apache-2.0
// The published tables, and rows beside them.
#include "suite/published/published_bounds.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <span>
#include <utility>

namespace isoshard {
namespace {

struct ModuleValue {
  const char* module;
  double ddp, autotp;
};

// "Layer Output Norms (Rank 0)"; the two that are sharded there are put together here: published
// times sqrt(2).
constexpr double kTwoShards = 1.4142135623730951;
constexpr ModuleValue kOutputNorms[] = {
    {"model.embed_tokens", 27.1251, 27.1251},
    {"model.layers.0", 374.6458, 374.6450},
    {"model.layers.0.self_attn", 43.3304, 43.3291},
    {"model.layers.0.self_attn.q_proj", 810.2407, 573.3234 * kTwoShards},
    {"model.layers.0.self_attn.o_proj", 43.3304, 43.3291},
    {"model.layers.0.mlp", 371.1974, 371.1962},
    {"model.layers.0.mlp.gate_proj", 1892.3745, 1338.2168 * kTwoShards},
    {"model.layers.0.mlp.down_proj", 371.1974, 371.1962},
    {"model.layers.1", 560.0239, 560.0243},
    {"model.norm", 1354.6165, 1354.6190},
    {"lm_head", 10558.2695, 10558.2891}};

// "Layer Gradient Norms (Rank 0)".
constexpr ModuleValue kGradientNorms[] = {{"model.embed_tokens", 1.2588, 1.2590},
                                          {"model.layers.0.self_attn", 0.7774, 0.7774},
                                          {"model.layers.0.self_attn.o_proj", 0.7774, 0.7774},
                                          {"model.layers.0.mlp", 0.0529, 0.0529},
                                          {"model.layers.0.mlp.down_proj", 0.0529, 0.0529},
                                          {"model.layers.1.self_attn", 0.0526, 0.0526},
                                          {"model.layers.1.mlp", 0.0322, 0.0322},
                                          {"model.norm", 0.0132, 0.0132},
                                          {"lm_head", 0.0221, 0.0221}};

// "DDP vs TP Implementations".
struct PublishedDifference {
  const char* module;
  double max_abs, relative;
};
constexpr PublishedDifference kDifferences[] = {
    {"model.embed_tokens", 0, 0},
    {"model.layers.0", 7.81e-3, 1.77e-3},
    {"model.layers.0.self_attn", 3.91e-3, 1.11e-3},
    {"model.layers.0.self_attn.o_proj", 3.91e-3, 1.11e-3},
    {"model.layers.0.mlp", 5.86e-3, 2.18e-3},
    {"model.layers.0.mlp.down_proj", 5.86e-3, 2.18e-3},
    {"model.layers.1", 1.56e-2, 2.39e-3},
    {"model.norm", 2.34e-2, 2.40e-3},
    {"lm_head", 1.56e-2, 2.49e-3}};

// "Layer Output Norms (Rank 0)" with an asterisk: one rank's shards. Both systems have the same.
constexpr ModuleValue kLocalNorms[] = {{"model.layers.0.self_attn.q_proj", 810.2407, 573.3234},
                                       {"model.layers.0.mlp.gate_proj", 1892.3745, 1338.2168}};

// "DDP vs DeepSpeed AutoTP", sharded parameters.
constexpr double kShardDifference = 0.29;

// "DP=2 Differences from DDP".
constexpr double kLossDifferences[] = {5.19e-6, 4.73e-6};

constexpr double kMissing = std::numeric_limits<double>::quiet_NaN();

double value_in(const std::map<std::string, double>& values, const std::string& name) {
  const auto found = values.find(name);
  return found == values.end() ? kMissing : found->second;
}

class Rows {
 public:
  explicit Rows(const ComparisonTables& tables) : tables_(tables) {}

  void norms(std::string_view what, const std::string& run, bool is_ddp,
             std::span<const ModuleValue> published,
             std::map<std::string, double> TableColumn::*norms, double bound) {
    for (const ModuleValue& value : published) {
      const double expected = is_ddp ? value.ddp : value.autotp;
      const TableColumn* column = tables_.find(run);
      PublishedRow row{std::string(what), value.module, run, expected,
                       column == nullptr ? kMissing : value_in(column->*norms, value.module)};
      row.deviation = std::fabs(row.measured / row.published - 1);
      const bool is_logits = std::string_view(value.module) == "lm_head" && bound == kNormBound;
      row.allowed = is_logits ? kLogitsNormBound : bound;
      add(std::move(row));
    }
  }

  void losses(const std::string& ddp, const std::string& run) {
    const TableColumn *baseline = tables_.find(ddp), *column = tables_.find(run);
    const std::size_t ranks = column == nullptr ? 1 : column->losses.size();
    for (std::size_t r = 0; r < std::min(ranks, std::size(kLossDifferences)); ++r) {
      const bool is_there = baseline != nullptr && column != nullptr && r < baseline->losses.size();
      PublishedRow row{"relative loss difference from ddp", fmt::format("dp rank {}", r), run,
                       kLossDifferences[r], kMissing};
      if (is_there) row.measured = std::fabs(column->losses[r] / baseline->losses[r] - 1);
      row.deviation = row.measured;
      row.allowed = kLossBound;
      add(std::move(row));
    }
  }

  void local_norms(const std::string& run) {
    const TableColumn* column = tables_.find(run);
    for (const ModuleValue& value : kLocalNorms) {
      PublishedRow row{
          "output norm on rank 0 alone", value.module, run, value.autotp,
          column == nullptr ? kMissing : value_in(column->local.outputs, value.module)};
      row.deviation = std::fabs(row.measured / row.published - 1);
      row.allowed = kNormBound;
      add(std::move(row));
    }
  }

  void shards(const std::string& run) {
    const TableColumn* column = tables_.find(run);
    PublishedRow row{"relative difference of one rank's shards of gradients from whole ones",
                     "mean over sharded parameters", run, kShardDifference, kMissing};
    if (column != nullptr && column->local_from_baseline_sharded.has_value() &&
        column->local_from_baseline_sharded->parameters > 0)
      row.measured = column->local_from_baseline_sharded->mean_relative;
    row.deviation = std::fabs(row.measured - row.published);
    row.allowed = kShardBound;
    add(std::move(row));
  }

  /// "The two TP implementations are numerically identical."
  void equal_bits(const std::string& autotp, const std::string& fsdp_tp) {
    const TableColumn *one = tables_.find(autotp), *two = tables_.find(fsdp_tp);
    SameBits same;
    for (const auto& [column, other] : {std::pair(one, two), std::pair(two, one)}) {
      if (column != nullptr && other != nullptr && column->same_bits.has_value() &&
          column->same_bits->as == other->title)
        same = *column->same_bits;
    }
    const auto count = [&](std::string what, int equal, int of) {
      PublishedRow row{"bits other than autotp's", std::move(what), fsdp_tp, 0,
                       of > 0 ? static_cast<double>(of - equal) : kMissing};
      row.deviation = row.measured;
      add(std::move(row));
    };
    count("module outputs", same.outputs, same.outputs_of);
    count("output gradients", same.output_gradients, same.output_gradients_of);
    const bool has_losses =
        one != nullptr && two != nullptr && one->losses.size() == two->losses.size();
    const int losses = has_losses ? static_cast<int>(one->losses.size()) : 0;
    int equal = 0;
    for (std::size_t r = 0; has_losses && r < one->losses.size(); ++r)
      equal += one->losses[r] == two->losses[r] ? 1 : 0;
    count("losses", equal, losses);
  }

  using Measure = std::function<double(const ModuleDifference&)>;

  void differences(const std::string& what, const std::string& run,
                   double PublishedDifference::*published, const Measure& measure) {
    for (const PublishedDifference& value : kDifferences) {
      const TableColumn* column = tables_.find(run);
      PublishedRow row{what, value.module, run, value.*published, kMissing};
      if (column != nullptr) {
        const auto found = column->from_baseline.find(value.module);
        if (found != column->from_baseline.end()) row.measured = measure(found->second);
      }
      const double ratio = row.measured / row.published;
      row.deviation =
          row.published == 0 ? (row.measured == 0 ? 1 : kMissing) : std::max(ratio, 1 / ratio);
      row.allowed = kDifferenceFactor;
      add(std::move(row));
    }
  }

  std::vector<PublishedRow> take() { return std::move(rows_); }

 private:
  void add(PublishedRow row) {
    row.holds = row.deviation <= row.allowed;  // a NaN does not
    rows_.push_back(std::move(row));
  }

  const ComparisonTables& tables_;
  std::vector<PublishedRow> rows_;
};

}  // namespace

std::vector<PublishedRow> published_rows(const ComparisonTables& tables,
                                         const PublishedRuns& runs) {
  const std::vector<std::string> firsts = {runs.autotp, runs.fsdp_tp_dp2};
  Rows rows(tables);
  for (const std::string& run : {runs.autotp, runs.autotp_dp2, runs.fsdp_tp_dp2})
    rows.losses(runs.ddp, run);
  for (const std::string& run : {runs.ddp, firsts[0], firsts[1]}) {
    rows.norms("output norm", run, run == runs.ddp, kOutputNorms, &TableColumn::output_norms,
               kNormBound);
  }
  for (const std::string& run : {runs.ddp, firsts[0], firsts[1]}) {
    rows.norms("gradient norm", run, run == runs.ddp, kGradientNorms, &TableColumn::gradient_norms,
               kGradientNormBound);
  }
  rows.equal_bits(runs.autotp_dp2, runs.fsdp_tp_dp2);
  for (const std::string& run : firsts) rows.local_norms(run);
  rows.shards(runs.autotp_dp2);
  using D = PublishedDifference;
  for (const std::string& run : firsts) {
    rows.differences("max abs difference, first 100", run, &D::max_abs,
                     [](const ModuleDifference& d) { return d.first.max_abs; });
    rows.differences("relative difference, first 100 (max abs / norm)", run, &D::relative,
                     [](const ModuleDifference& d) { return d.first.max_abs_by_norm(); });
    rows.differences("max abs difference, all", run, &D::max_abs,
                     [](const ModuleDifference& d) { return d.whole.max_abs; });
    rows.differences("relative difference, all (of Frobenius norms)", run, &D::relative,
                     [](const ModuleDifference& d) { return d.whole.relative(); });
  }
  return rows.take();
}

std::string markdown(const std::vector<PublishedRow>& rows) {
  std::string text, what;
  for (const PublishedRow& row : rows) {
    if (row.what + row.run != what) {
      what = row.what + row.run;
      text += fmt::format(
          "\n### {}: {}\n| | published | measured | {} | bound |\n|---|---|---|---|---|\n", row.run,
          row.what, row.allowed == kDifferenceFactor ? "factor" : "deviation");
    }
    const bool is_factor = row.allowed == kDifferenceFactor;
    text += fmt::format("| {} | {:.6g} | {:.6g} | {} | {}{} |\n", row.module, row.published,
                        row.measured,
                        is_factor                  ? fmt::format("{:.2f}", row.deviation)
                        : row.allowed < kNormBound ? fmt::format("{:.2e}", row.deviation)
                                                   : fmt::format("{:.2f} %", 100 * row.deviation),
                        is_factor                  ? fmt::format("{:g}", row.allowed)
                        : row.allowed < kNormBound ? fmt::format("{:g}", row.allowed)
                                                   : fmt::format("{:g} %", 100 * row.allowed),
                        row.holds ? "" : " **broken**");
  }
  return text;
}

}  // namespace isoshard
