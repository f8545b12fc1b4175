// SPDX-License-Identifier: Apache-2.0
/// The file redrawn.json of a reference's bundle: the sums of its redrawn runs.
///
///     {"schema": 1, "runs": 16, "redrawn": [{"step": 0, "kind": "grad", "name": "w", "call": 0,
///       "draws": [[0, "<sum_sq_diff>", "<dot_diff>", "<sum_diff>"], ...]}, ...]}
///
/// Numbers are hex floats; each draw begins with the number of its run.
#pragma once
#include <filesystem>
#include <nlohmann/json_fwd.hpp>

#include "harness/trace/reference.h"

namespace isoshard::detail {

inline constexpr const char* kRedrawnFile = "redrawn.json";

[[nodiscard]] nlohmann::json to_json(const Redrawn& redrawn);

/// Errors   FileError that starts with the file: malformed, a draw that is not finite, a negative
///          sum of squares, a run out of order or beyond `runs`, sums of differences where there
///          are none, or a record that stands twice.
[[nodiscard]] Redrawn redrawn_of(const nlohmann::json& whole, const std::filesystem::path& file);

}  // namespace isoshard::detail
