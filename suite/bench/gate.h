// SPDX-License-Identifier: Apache-2.0
/// No speed without a verdict: a small case with the settings of the timed one is verified first.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "fixtures/cases/case.h"
#include "harness/report/report.h"

namespace isoshard {

/// kConforms: verified now. kRemembered: verified before, with the same settings, program and CPU.
/// kTrusted: the reference, which is judged by nobody. kUngated: not asked for. kFails: its verdict
/// is not "conforms".
enum class GateState : std::uint8_t { kConforms, kRemembered, kTrusted, kUngated, kFails };
/// conforms, remembered, trusted, ungated, fails.
[[nodiscard]] std::string_view name_of(GateState state) noexcept;

struct GateResult {
  GateState state = GateState::kUngated;
  std::string twin;      ///< slug of the small case; empty where none ran
  std::string strength;  ///< "exact" or "within tolerance"
  std::string key;       ///< of the remembered verdict
  Report report;         ///< of the small case; only of kFails
  int exit_code = 0;     ///< that of the verdict
};

/// The same subject, degrees, dtypes and settings on a small model of the same architecture, for
/// one step of few short samples: heads and widths are what the tp degree needs, layers what the
/// stages need, and buckets are as many as in the whole model.
[[nodiscard]] Case twin_of(const Case& item);

/// A name for all that a verdict depends on: the twin's settings, who starts its ranks, the
/// contents of the program and its libraries (by their build ids), and the CPU.
[[nodiscard]] std::string gate_key(const Case& twin);

/// The folder in which verdicts are remembered: $XDG_CACHE_HOME/isoshard/gate,
/// ~/.cache/isoshard/gate, or `otherwise` if there is no home.
[[nodiscard]] std::filesystem::path gate_folder(const std::filesystem::path& otherwise);

/// Verifies the twin, unless `folder` remembers that it conforms; remembers a verdict that
/// conforms. A folder that cannot be written to remembers nothing, and is no error.
/// `fault`: the id of a fault that the twin's runs get; empty: none.
/// Ranks    called by the controller; with peers (Launcher::peers) collective over them. Then the
///          folder of process 0 counts, where all have the same program and CPU.
/// Errors   as verify; InfrastructureError if the twin's ranks fail.
[[nodiscard]] GateResult pass_gate(const Case& item, const std::filesystem::path& folder,
                                   const std::string& fault = {});

}  // namespace isoshard
