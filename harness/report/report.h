// SPDX-License-Identifier: Apache-2.0
/// A verdict in words: the table for the terminal, the one line, and JSON.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "harness/verdict/verdict.h"

namespace isoshard {

struct RenderOptions {
  /// ANSI colors on the verdict and on what is not within its tolerance.
  bool color = false;
  bool all_tensors = false;  ///< every tensor, instead of module outputs and the sums of each kind
};

/// The whole report of one case, several lines, each ended by a newline: data ids, losses, output
/// norms, differences per module, gradients, clip norm, step, findings with their diagnosis, and
/// the verdict line last.
///
/// Determinism   a function of its arguments: no time, no host, no environment.
[[nodiscard]] std::string render(const Verdict& verdict, const RenderOptions& options = {});

/// "CONFORMS  autotp qwen2_tp2_dp2 (dp 2 x tp 2): 212 tensors compared, ..."
[[nodiscard]] std::string verdict_line(const Verdict& verdict);

/// The schema is described in docs/report.md. Numbers that JSON does not have (NaN, infinities) are
/// strings.
[[nodiscard]] nlohmann::json report_json(const Verdict& verdict);

}  // namespace isoshard
