// SPDX-License-Identifier: Apache-2.0
// Tables of a case, made at the first question.
#include "suite/record/expected_calls.h"

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "harness/bundle/run_calls.h"
#include "subjects/model/model.h"
#include "suite/record/make_subject.h"
#include "suite/record/step_table.h"

namespace isoshard {
namespace {

/// Made at the first question, and kept.
struct Tables {
  explicit Tables(const Case& of) : item(of) {}
  const Case item;
  std::unique_ptr<Model> model;
  NumericsSpec numerics;
  std::map<std::pair<int, int>, std::map<Axis, std::vector<ExpectedCall>>> by_rank_and_step;
};

}  // namespace

CollectiveTable collective_table(const Case& item) {
  if (!declares_numerics(item)) return {};
  return [tables = std::make_shared<Tables>(item)](int rank, int step, Axis axis) {
    if (tables->model == nullptr) {
      tables->model = make_model(tables->item.config, tables->item.attention);
      tables->numerics = numerics_of(tables->item);
    }
    const auto [entry, is_new] = tables->by_rank_and_step.try_emplace({rank, step});
    if (is_new)
      entry->second = StepTable(tables->item, tables->numerics, *tables->model, rank, step).calls();
    return entry->second[axis];
  };
}

std::string with_calls_of(std::string_view settings, std::span<const Case> cases) {
  nlohmann::json all = nlohmann::json::parse(settings), tables = nlohmann::json::array();
  for (const Case& item : cases) {
    const CollectiveTable table = collective_table(item);
    if (table && item.world_size() > 1)
      tables.push_back(calls_json(item.subject, item.mesh(), item.first_step(), item.steps, table));
  }
  if (!tables.empty()) all["judging"]["collectives"] = std::move(tables);
  return all.dump();
}

JudgePolicy with_collectives(JudgePolicy policy, const Case& item) {
  policy.collectives = collective_table(item);
  return policy;
}

}  // namespace isoshard
