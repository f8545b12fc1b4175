// SPDX-License-Identifier: Apache-2.0
/// Reading journals strictly.
#include "harness/bundle/journal.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string_view>

#include "core/base/error.h"
#include "harness/bundle/bundle_form.h"
#include "harness/bundle/bundle_json.h"

namespace isoshard {
namespace {

using nlohmann::json;

constexpr std::array<std::string_view, 11> kOps = {
    "all_reduce", "all_gather", "reduce_scatter", "reduce", "gather", "scatter",
    "all_to_all", "broadcast",  "barrier",        "send",   "recv"};
constexpr std::array<std::string_view, 4> kPhases = {"between", "forward", "backward", "update"};

[[noreturn]] void refuse_journal(const std::filesystem::path& file, std::string_view what) {
  detail::refuse_form(file, fmt::format("journal: {}", what));
}

void require_one_of(std::span<const std::string_view> known, const std::string& word,
                    std::string_view what, const std::filesystem::path& file) {
  if (std::ranges::find(known, word) == known.end())
    refuse_journal(file, fmt::format("\"{}\" must be one of {}, got '{}'", what,
                                     fmt::join(known, ", "), word));
}

/// Empty where the field is not there.
std::string words(const json& object, const char* name, const std::filesystem::path& file) {
  return object.contains(name) ? detail::text_field(object, name, file) : std::string();
}

std::vector<int> group_of(const json& ranks, const std::string& name, int world_size,
                          const std::filesystem::path& file) {
  std::vector<int> group;
  for (const json& rank : ranks) {
    if (!rank.is_number_integer() || rank < 0 || rank >= world_size)
      refuse_journal(file, fmt::format("the ranks of group {} must be 0 to {}, got {}", name,
                                       world_size - 1, rank.dump()));
    group.push_back(rank.get<int>());
  }
  std::vector<int> sorted = group;
  std::ranges::sort(sorted);
  if (sorted.size() < 2 || std::ranges::adjacent_find(sorted) != sorted.end())
    refuse_journal(file,
                   fmt::format("a group must have two different ranks or more, got {} in group {}",
                               ranks.dump(), name));
  return group;
}

JournaledCall call_of(const json& entry, const CallJournal& journal, int rank, int world_size,
                      const std::filesystem::path& file) {
  JournaledCall call;
  call.op = detail::text_field(entry, "op", file);
  call.group = detail::text_field(entry, "group", file);
  call.reduction = words(entry, "reduction", file);
  call.dtype = words(entry, "dtype", file);
  call.bytes = detail::field<std::int64_t>(entry, "bytes", file);
  call.peer = detail::field_or<int>(entry, "peer", -1, file);
  call.phase = detail::text_field(entry, "phase", file);
  call.at = words(entry, "at", file);
  call.of = words(entry, "of", file);
  require_one_of(kOps, call.op, "op", file);
  require_one_of(kPhases, call.phase, "phase", file);
  const auto group = journal.groups.find(call.group);
  if (group == journal.groups.end())
    refuse_journal(file,
                   fmt::format("the group {} of a call must be among the groups", call.group));
  if (std::ranges::find(group->second, rank) == group->second.end())
    refuse_journal(file, fmt::format("rank {} must be in group {} to call on it, got the ranks {}",
                                     rank, call.group, fmt::join(group->second, ", ")));
  constexpr std::int64_t kMostBytes = std::int64_t{1} << 48;
  if (call.bytes < 0 || call.bytes > kMostBytes)
    refuse_journal(file, fmt::format("bytes must be 0 to 2^48, got {}", call.bytes));
  if (call.dtype.empty() && call.op != "barrier")
    refuse_journal(file, fmt::format("a call of {} must have a dtype", call.op));
  if (call.reduction.empty() &&
      (call.op == "all_reduce" || call.op == "reduce" || call.op == "reduce_scatter"))
    refuse_journal(file, fmt::format("a call of {} must have a reduction", call.op));
  if (call.peer < -1 || call.peer >= world_size)
    refuse_journal(file, fmt::format("peer must be -1 or a rank from 0 to {}, got {}",
                                     world_size - 1, call.peer));
  return call;
}

}  // namespace

CallJournal journal_of(const json& object, int rank, int world_size,
                       const std::filesystem::path& file) {
  CallJournal journal;
  if (!object.is_object() || !object.contains("groups") || !object.at("groups").is_object())
    refuse_journal(file, "it must be an object with an object \"groups\"");
  for (const auto& [name, ranks] : object.at("groups").items()) {
    if (!ranks.is_array())
      refuse_journal(file, fmt::format("the ranks of group {} must be a list", name));
    journal.groups[name] = group_of(ranks, name, world_size, file);
  }
  for (const json& entry : detail::field<json>(object, "calls", file)) {
    if (!entry.is_object()) refuse_journal(file, "a call must be an object");
    journal.calls.push_back(call_of(entry, journal, rank, world_size, file));
  }
  journal.problem = words(object, "problem", file);
  return journal;
}

}  // namespace isoshard
