// SPDX-License-Identifier: Apache-2.0
/// The collectives that the ranks of a run must call, as a trusted bundle says them.
///
///     {"subject": "ddp", "mesh": [{"axis": "dp", "degree": 2}],
///      "calls": [{"axis": "dp", "at": [[0, 0], [0, 1]],
///                 "rows": [[0, 11, 1, 1, 1, 4096, 0, 0, 0]]}]}
///
/// "at" are the steps and ranks that make the calls of "rows", in order. A row is that of a record
/// of calls (harness/trace/collective_calls.h) and three flags, 0 or 1: only_if_stepped,
/// may_be_split and any_order of ExpectedCall. Where nothing is listed, nothing is called.
#pragma once
#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/mesh/mesh.h"
#include "harness/trace/collective_calls.h"

namespace isoshard {

struct RunCalls {
  std::string subject;
  MeshShape mesh;
  /// By step, rank and axis.
  std::map<std::tuple<int, int, Axis>, std::vector<ExpectedCall>> calls;
};

/// What a table says of the steps from `first_step` to below `steps` of a run, on the axes of the
/// mesh and the whole world.
[[nodiscard]] nlohmann::json calls_json(std::string_view subject, const MeshShape& mesh,
                                        int first_step, int steps, const CollectiveTable& table);

/// Of a list of such objects.
/// Errors   FileError that starts with `origin`.
[[nodiscard]] std::vector<RunCalls> run_calls_of(const nlohmann::json& list,
                                                 const std::filesystem::path& origin);

[[nodiscard]] CollectiveTable table_of(RunCalls calls);

}  // namespace isoshard
