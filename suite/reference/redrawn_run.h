// SPDX-License-Identifier: Apache-2.0
/// Redrawn runs: the plain reference with its own weights, whose roundings are drawn anew.
#pragma once
#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fixtures/cases/case.h"
#include "harness/trace/reference.h"
#include "suite/reference/cut_strategy.h"

namespace isoshard {

/// Redrawn runs that a reference gets (docs/internals/tolerances.md, "Redrawn runs").
inline constexpr int kRedrawnRuns = 32;

/// The unsharded strategy whose sums are cut at places drawn by a seed, and added in an order drawn
/// by it, each piece rounded to the tensor's dtype as ranks round what they add.
///
/// Guarantees   as CutStrategy's. Cut are the product of a row layer along its inputs, and of every
///              linear layer the gradient of its input along the outputs (as tp cuts column layers)
///              and the gradient of its weight along the tokens (as dp, micro-batches and cut
///              sequences do); of an embedding the last.
/// Determinism  a function of the seed and the module's name.
class RedrawnStrategy final : public CutStrategy {
 public:
  /// `row_modules`: the linear layers that tp may cut along their inputs.
  RedrawnStrategy(std::uint64_t seed, std::set<std::string, std::less<>> row_modules)
      : seed_(seed), row_modules_(std::move(row_modules)) {}

 private:
  [[nodiscard]] std::vector<std::int64_t> cuts(std::string_view module, CutDim dim,
                                               std::int64_t size) const override;
  [[nodiscard]] std::vector<std::size_t> order(std::string_view module,
                                               std::size_t pieces) const override;

  std::uint64_t seed_;
  std::set<std::string, std::less<>> row_modules_;
};

/// The linear layers of a case's model that tp may cut along their inputs (TpRole::kRow).
[[nodiscard]] std::set<std::string, std::less<>> row_modules_of(const Case& c);

/// Where a dim of `size` is cut: 0 first, `size` last, each piece at least one long, at most
/// `pieces` of them, drawn by (seed, name).
[[nodiscard]] std::vector<std::int64_t> random_cuts(std::uint64_t seed, std::string_view name,
                                                    std::int64_t size, std::int64_t pieces);

/// Whether redrawn runs say anything of the case: something is computed in a 16-bit dtype, and
/// nothing is exact by construction.
[[nodiscard]] bool has_redrawn_runs(const Case& c);

/// Runs as many more redrawn runs as `reference`, made of the same case, lacks to `runs`; none for
/// a case without any (has_redrawn_runs). With dp > 1 one in four is grouped as the dp ranks are
/// (regrouped_run), and one in four has the loss times dp (scaled_run) where that factor rounds
/// (fp16, or no power of two).
/// `deadline` is for each run; 0: the case's (case_deadline).
/// Errors        InfrastructureError that says how a run failed.
/// Determinism   bit-equal between calls on one machine, whatever the number of cores.
void add_redrawn_runs(const Case& c, Reference& reference, int runs = kRedrawnRuns,
                      std::chrono::milliseconds deadline = std::chrono::milliseconds(0));

}  // namespace isoshard
