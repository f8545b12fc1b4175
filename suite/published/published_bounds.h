// SPDX-License-Identifier: Apache-2.0
/// What seeds/000 published, and how far a run of that size may be from it
/// (docs/internals/published.md).
#pragma once
#include <string>
#include <vector>

#include "harness/report/tables.h"

namespace isoshard {

/// Bounds: the data, the random generator, kernels and machine differ; model, sizes, dtype and the
/// distribution of weights and ids do not.
inline constexpr double kNormBound = 0.03;          ///< relative, of output norms
inline constexpr double kLogitsNormBound = 0.10;    ///< of lm_head's
inline constexpr double kGradientNormBound = 0.10;  ///< relative, of norms of output gradients
inline constexpr double kLossBound = 2e-5;          ///< relative difference of losses from ddp's
inline constexpr double kDifferenceFactor = 4;      ///< of differences, in either direction
/// Of the mean relative difference that taking one rank's shard for the whole gives, itself.
inline constexpr double kShardBound = 0.03;

/// Titles of columns. The published tables are of runs at tp 2; outputs on dp rank 0 are the same
/// at every dp degree.
struct PublishedRuns {
  std::string ddp = "ddp dp2", autotp = "autotp tp2", autotp_dp2 = "autotp tp2 dp2",
              fsdp_tp_dp2 = "fsdp_tp tp2 dp2";
};

/// One published number beside the measured one.
struct PublishedRow {
  std::string what;    ///< "output norm", "max abs difference, first 100", ...
  std::string module;  ///< or "dp rank 1"
  std::string run;     ///< title of the column
  double published = 0, measured = 0;
  /// Of norms: relative; of differences: the factor; of losses, shards and counts: the difference
  /// itself.
  double deviation = 0, allowed = 0;
  bool holds = false;
};

/// All rows, in the order of the document: losses of every run; norms and differences of ddp,
/// autotp and fsdp_tp; how many outputs and output gradients of fsdp_tp have other bits than
/// autotp's (none may); what rank 0's shards look like. A run or module that is not in the tables
/// gives a row that does not hold.
[[nodiscard]] std::vector<PublishedRow> published_rows(const ComparisonTables& tables,
                                                       const PublishedRuns& runs = {});

/// A Markdown table of rows.
[[nodiscard]] std::string markdown(const std::vector<PublishedRow>& rows);

}  // namespace isoshard
