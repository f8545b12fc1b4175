// SPDX-License-Identifier: Apache-2.0
/// What a rank of a foreign run says it called in a step: the field "journal" of its file.
///
///     {"groups": {"0": [0, 1]},
///      "calls": [{"op": "all_reduce", "group": "0", "reduction": "sum", "dtype": "fp32",
///                 "bytes": 4096, "phase": "backward", "at": "train.py:31",
///                 "of": "gradient of w"}]}
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

namespace isoshard {

struct JournaledCall {
  std::string op;          ///< all_reduce, all_gather, broadcast, send, ...
  std::string group;       ///< its name in CallJournal::groups
  std::string reduction;   ///< sum, avg, ...; empty where nothing is reduced
  std::string dtype;       ///< empty for a barrier
  std::int64_t bytes = 0;  ///< that this rank gives (of a scatter: gets)
  int peer = -1;           ///< the root, or the other rank; -1: none, or any
  std::string phase;       ///< between, forward, backward, update
  std::string at, of;      ///< the line that called, and whose tensor it is; may be empty
};

struct CallJournal {
  std::map<std::string, std::vector<int>> groups;  ///< ranks by the group's name
  std::vector<JournaledCall> calls;                ///< in the order of the rank
  std::string problem;                             ///< why calls may be missing; empty: none
};

/// By step and rank.
using Journals = std::map<std::pair<int, int>, CallJournal>;

/// Errors   FileError that starts with `file`: a field is missing or of another type, a group or a
///          rank is unknown, or `rank` is not in the group of a call.
[[nodiscard]] CallJournal journal_of(const nlohmann::json& json, int rank, int world_size,
                                     const std::filesystem::path& file);

}  // namespace isoshard
