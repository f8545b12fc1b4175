// SPDX-License-Identifier: Apache-2.0
/// What the experiments share: their worlds, their claims, and the one function of each.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "harness/world/rank.h"
#include "suite/published/differences.h"
#include "suite/published/experiment.h"

namespace isoshard::detail {

/// Collects the text and numbers of a report.
class Findings {
 public:
  explicit Findings(ExperimentKind kind, const ExperimentSettings& settings);
  void line(std::string_view text = "");
  /// A line "holds: ..." or "FAILS: ...".
  void claim(bool holds, std::string text);
  void add_part(nlohmann::json part) { parts_.push_back(std::move(part)); }
  [[nodiscard]] ExperimentReport report() const;

 private:
  bool holds_ = true;
  std::string text_;
  nlohmann::json head_, parts_ = nlohmann::json::array(), claims_ = nlohmann::json::array();
};

/// Where this rank's tensors are.
[[nodiscard]] c10::Device device_of(const Rank& rank, const ExperimentSettings& settings);
/// The experiment column-row probes column-parallel products on worlds of these sizes. No setting
/// changes them.
inline constexpr int kProbedDegrees[] = {2, 4, 7};
/// What a report says of the device: how the ranks of each world of the experiment meet, too.
[[nodiscard]] std::map<std::string, std::string> environment_of(ExperimentKind kind,
                                                                const ExperimentSettings& settings);

/// Runs `body` on `size` ranks, whose communicator takes tensors of their device, and gives back
/// what each returns.   Errors   InfrastructureError if a rank fails.
[[nodiscard]] std::vector<nlohmann::json> run_ranks(std::string name, int size,
                                                    ReductionOrder order,
                                                    const ExperimentSettings& settings,
                                                    std::function<nlohmann::json(Rank&)> body);

/// Hex hash of a tensor's bits: equal tensors have equal ones.
[[nodiscard]] std::string digest_of(const at::Tensor& tensor);
/// True if every rank returned the same, non-empty "digest".
[[nodiscard]] bool digests_agree(const std::vector<nlohmann::json>& ranks);

/// The head and one line of the table that the stack and growth experiments print.
[[nodiscard]] std::string layer_table_head();
[[nodiscard]] std::string layer_table_line(std::string_view layer, const Differences& differences);
/// Layers that the published tables show: the first five, then every few, the last.
[[nodiscard]] bool is_shown(std::int64_t layer, std::int64_t layers);

[[nodiscard]] ExperimentReport run_init(const ExperimentSettings& settings,
                                        const ExperimentProgress& progress);
[[nodiscard]] ExperimentReport run_column_row(const ExperimentSettings& settings,
                                              const ExperimentProgress& progress);
[[nodiscard]] ExperimentReport run_stack(const ExperimentSettings& settings,
                                         const ExperimentProgress& progress);
[[nodiscard]] ExperimentReport run_growth(const ExperimentSettings& settings,
                                          const ExperimentProgress& progress);

}  // namespace isoshard::detail
