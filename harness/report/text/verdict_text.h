// SPDX-License-Identifier: Apache-2.0
/// A verdict and tables in words, for the terminal.
#pragma once
#include <cstddef>
#include <string>

#include "harness/report/card/card.h"
#include "harness/report/tables.h"
#include "harness/report/text/hanging.h"
#include "harness/verdict/verdict.h"

namespace isoshard {

struct RenderOptions {
  /// ANSI colors on the verdict and on what is not within its tolerance
  bool color = false;
  bool all_tensors = false;  ///< every tensor, instead of module outputs and the sums of each kind
  /// Columns of the terminal, at which every line is broken. 0: of a file, where sentences stay on
  /// one line.
  std::size_t columns = 0;
};

/// The whole report of one case, several lines, each ended by a newline: data ids, losses, output
/// norms, differences per module, gradients, clip norm, step, findings with their diagnosis, and
/// the verdict line last.
///
/// Determinism   a function of its arguments: no time, no host, no environment.
[[nodiscard]] std::string render(const Verdict& verdict, const RenderOptions& options = {});

/// "CONFORMS (within tolerance)  autotp qwen2_tp2_dp2 (dp 2 x tp 2): 212 tensors compared, ..."
[[nodiscard]] std::string verdict_line(const Verdict& verdict);

/// The same for whoever does not ask for more, in few words: of a run that conforms how strong the
/// verdict is and, where it is not exact, its weakest point; of one that diverges nothing but its
/// name, as its card follows; else the reason.
///
///     CONFORMS (exact)  autotp qwen2_tp2_dp2 (dp 2 x tp 2): 212 tensors
[[nodiscard]] std::string short_verdict_line(const Verdict& verdict);

/// "CONFORMS ..." in green, anything else in red; without `color` as it is.
[[nodiscard]] std::string painted(const std::string& line, Status status, bool color);

/// The rows of a card, each ended by a newline, titles and texts in columns.
[[nodiscard]] std::string card_text(const Card& card, const RenderOptions& options = {});
/// The row that says how to repeat a run, in lines that can be pasted into a shell.
[[nodiscard]] std::string repeat_text(const std::vector<std::string>& command,
                                      const RenderOptions& options = {});

/// Several lines, each ended by a newline. Layers beyond the first show only what leaves them,
/// unless `all_modules`. Columns that do not fit `width` stand below each other.
[[nodiscard]] std::string render_tables(const ComparisonTables& tables, bool all_modules = false,
                                        std::size_t width = kLineWidth);

}  // namespace isoshard
