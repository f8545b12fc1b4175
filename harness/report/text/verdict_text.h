// SPDX-License-Identifier: Apache-2.0
/// A verdict and tables in words, for the terminal.
#pragma once
#include <string>

#include "harness/report/tables.h"
#include "harness/verdict/verdict.h"

namespace isoshard {

struct RenderOptions {
  /// ANSI colors on the verdict and on what is not within its tolerance
  bool color = false;
  bool all_tensors = false;  ///< every tensor, instead of module outputs and the sums of each kind
};

/// The whole report of one case, several lines, each ended by a newline: data ids, losses, output
/// norms, differences per module, gradients, clip norm, step, findings with their diagnosis, and
/// the verdict line last.
///
/// Determinism   a function of its arguments: no time, no host, no environment.
[[nodiscard]] std::string render(const Verdict& verdict, const RenderOptions& options = {});

/// "CONFORMS (within tolerance)  autotp qwen2_tp2_dp2 (dp 2 x tp 2): 212 tensors compared, ..."
[[nodiscard]] std::string verdict_line(const Verdict& verdict);

/// Several lines, each ended by a newline. Layers beyond the first show only what leaves them,
/// unless `all_modules`.
[[nodiscard]] std::string render_tables(const ComparisonTables& tables, bool all_modules = false);

}  // namespace isoshard
