// SPDX-License-Identifier: Apache-2.0
// Placements, numbers side by side, calls, curves and where a report comes from.
#include "harness/report/json/evidence_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "harness/report/json/json_number.h"

namespace isoshard {
namespace {

using nlohmann::json;

json key_of(const RecordKey& key) {
  return {{"step", key.step}, {"kind", name_of(key.kind)}, {"name", key.name}, {"call", key.call}};
}

json held_json(const HeldTensor& held) {
  json parts = json::array();
  for (const HeldPart& part : held.parts) {
    parts.push_back({{"rank", part.rank},
                     {"begin", part.begin},
                     {"size", part.size},
                     {"compared", part.compared},
                     {"unequal", part.unequal},
                     {"relative_error", json_number(part.relative_error)},
                     {"max_abs", json_number(part.max_abs)}});
  }
  json j = key_of(held.key);
  j["stage"] = name_of(held.stage);
  j["shape"] = held.shape;
  j["placement"] = held.placement;
  j["flat"] = held.is_flat;
  j["parts"] = std::move(parts);
  j["cut"] = held.is_cut;
  return j;
}

json side_json(const NumbersBeside::Side& side) {
  json rows = json::array();
  for (const auto& row : side.rows) {
    json numbers = json::array();
    for (const auto& number : row)
      numbers.push_back(number.has_value() ? json_number(*number) : json(nullptr));
    rows.push_back(std::move(numbers));
  }
  return {{"rank", side.rank < 0 ? json(nullptr) : json(side.rank)}, {"rows", std::move(rows)}};
}

json numbers_json(const NumbersBeside& numbers) {
  json sides = json::array();
  for (const auto& side : numbers.sides) sides.push_back(side_json(side));
  json j = key_of(numbers.key);
  j["shape"] = numbers.shape;
  j["row"] = numbers.row;
  j["column"] = numbers.column;
  j["whole"] = numbers.is_whole;
  j["summands"] = numbers.are_summands;
  j["sides"] = std::move(sides);
  return j;
}

json calls_json(const RankCalls& calls) {
  json runs = json::array();
  for (const RankCalls::Run& run : calls.runs) {
    runs.push_back(
        {{"op", run.op}, {"purpose", run.purpose}, {"bytes", run.bytes}, {"repeat", run.repeat}});
  }
  return {{"rank", calls.rank},
          {"axis", name_of(calls.axis)},
          {"runs", std::move(runs)},
          {"cut", calls.is_cut}};
}

}  // namespace

json evidence_json(const Evidence& evidence) {
  json placements = json::array(), around = json::array(), calls = json::array();
  for (const HeldTensor& held : evidence.placements) placements.push_back(held_json(held));
  for (const HeldTensor& held : evidence.around) around.push_back(held_json(held));
  for (const RankCalls& item : evidence.calls) calls.push_back(calls_json(item));
  return {
      {"placements", std::move(placements)},
      {"around", std::move(around)},
      {"numbers", evidence.numbers.has_value() ? numbers_json(*evidence.numbers) : json(nullptr)},
      {"calls", std::move(calls)},
      {"digests", evidence.digests}};
}

json provenance_json(const Provenance& provenance) {
  return {{"command", provenance.command},
          {"settings", provenance.settings},
          {"versions", provenance.versions}};
}

json schedule_json(const std::vector<ReportAction>& schedule) {
  json actions = json::array();
  for (const ReportAction& action : schedule) {
    actions.push_back({{"rank", action.rank},
                       {"start", action.start},
                       {"end", action.end},
                       {"label", action.label}});
  }
  return actions;
}

json collectives_json(const std::vector<ReportCollective>& rows) {
  constexpr double kMs = 1000;
  json all = json::array();
  for (const ReportCollective& row : rows) {
    const auto& hidden = row.hidden_seconds_per_rank;
    all.push_back({{"purpose", row.purpose},
                   {"calls_per_step_and_rank", row.calls_per_rank},
                   {"bytes_per_step_all_ranks", row.bytes},
                   {"ms_per_step_and_rank", kMs * row.seconds_per_rank},
                   {"median_call_ms", kMs * row.median_call_seconds},
                   {"hidden_ms_per_step_and_rank", hidden ? json(kMs * *hidden) : json(nullptr)}});
  }
  return all;
}

json points_json(const ReportCurve& item) {
  constexpr std::size_t kMost = 500;
  const std::vector<CurveStep>& steps = item.curve.steps;
  if (steps.empty()) return nullptr;
  json j = {{"steps", json::array()}, {"loss", json::array()}, {"grad_norm", json::array()}};
  const std::size_t stride = (steps.size() + kMost - 1) / kMost;
  const auto add = [&](std::size_t i) {
    j["steps"].push_back(steps[i].step);
    j["loss"].push_back(json_number(steps[i].loss));
    j["grad_norm"].push_back(json_number(steps[i].grad_norm));
    if (i < item.curve.spreads.size())
      j["spread"].push_back(json_number(item.curve.spreads[i].loss));
    if (item.verdict.has_value() && i < item.verdict->allowed_losses.size())
      j["allowed"].push_back(json_number(item.verdict->allowed_losses[i]));
  };
  std::size_t last = 0;
  for (std::size_t i = 0; i < steps.size(); i += stride) add(last = i);
  if (last + 1 < steps.size()) add(steps.size() - 1);
  return j;
}

}  // namespace isoshard
