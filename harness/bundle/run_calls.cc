// SPDX-License-Identifier: Apache-2.0
// Equal lists of calls are written once.
#include "harness/bundle/run_calls.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "core/base/error.h"
#include "harness/bundle/bundle_form.h"
#include "harness/bundle/bundle_json.h"

namespace isoshard {
namespace {

using nlohmann::json;

constexpr std::size_t kColumns = 6, kFlags = 3;

json rows_json(const std::vector<ExpectedCall>& calls) {
  json rows = json::array();
  for (const ExpectedCall& expected : calls) {
    json row = rows_of(std::span(&expected.call, 1));
    row.push_back(expected.only_if_stepped ? 1 : 0);
    row.push_back(expected.may_be_split ? 1 : 0);
    row.push_back(expected.any_order ? 1 : 0);
    rows.push_back(std::move(row));
  }
  return rows;
}

ExpectedCall call_of(const json& row, const std::filesystem::path& origin) {
  const auto numbers = row.get<std::vector<std::int64_t>>();
  if (numbers.size() != kColumns + kFlags)
    detail::refuse_form(origin,
                        fmt::format("settings: a row of collectives must have {} numbers, got {}",
                                    kColumns + kFlags, numbers.size()));
  ExpectedCall expected;
  expected.call = calls_of(std::as_bytes(std::span(numbers).first(kColumns))).front();
  expected.only_if_stepped = numbers[kColumns] != 0;
  expected.may_be_split = numbers[kColumns + 1] != 0;
  expected.any_order = numbers[kColumns + 2] != 0;
  return expected;
}

RunCalls read(const json& object, const std::filesystem::path& origin) {
  RunCalls run{
      object.at("subject").get<std::string>(), detail::mesh_of(object.at("mesh"), origin), {}};
  for (const json& entry : object.at("calls")) {
    const Axis axis = parse_axis(entry.at("axis").get<std::string>());
    std::vector<ExpectedCall> calls;
    for (const json& row : entry.at("rows")) calls.push_back(call_of(row, origin));
    for (const json& at : entry.at("at"))
      run.calls[{at.at(0).get<int>(), at.at(1).get<int>(), axis}] = calls;
  }
  return run;
}

}  // namespace

json calls_json(std::string_view subject, const MeshShape& mesh, int first_step, int steps,
                const CollectiveTable& table) {
  std::vector<Axis> axes{Axis::kWorld, Axis::kDpReplicate};
  for (const AxisDegree& axis : mesh.axes()) axes.push_back(axis.axis);
  json calls = json::array();
  for (const Axis axis : axes) {
    std::map<std::string, std::size_t> known;  // rows -> their place in `calls`
    for (int step = first_step; step < steps; ++step) {
      for (int rank = 0; rank < mesh.world_size(); ++rank) {
        json rows = rows_json(table(rank, step, axis));
        if (rows.empty()) continue;
        const auto [place, is_new] = known.try_emplace(rows.dump(), calls.size());
        if (is_new)
          calls.push_back({{"axis", name_of(axis)}, {"at", json::array()}, {"rows", rows}});
        calls[place->second]["at"].push_back(json::array({step, rank}));
      }
    }
  }
  return {{"subject", subject}, {"mesh", detail::to_json(mesh)}, {"calls", std::move(calls)}};
}

std::vector<RunCalls> run_calls_of(const json& list, const std::filesystem::path& origin) {
  try {
    std::vector<RunCalls> runs;
    if (!list.is_array()) throw UsageError("it must be a list");
    for (const json& object : list) runs.push_back(read(object, origin));
    return runs;
  } catch (const FileError&) {
    throw;
  } catch (const Error& error) {
    detail::refuse_form(origin, fmt::format("settings: collectives: {}", error.what()));
  } catch (const json::exception& error) {
    detail::refuse_form(origin, fmt::format("settings: collectives: {}", error.what()));
  }
}

CollectiveTable table_of(RunCalls run) {
  return [calls = std::move(run.calls)](int rank, int step, Axis axis) {
    const auto found = calls.find({step, rank, axis});
    return found == calls.end() ? std::vector<ExpectedCall>() : found->second;
  };
}

}  // namespace isoshard
