// SPDX-License-Identifier: Apache-2.0
/// A gradient norm whose square is the right one less, or more, the squares of some parameters or
/// of some ranks.
#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/observe/layer_name.h"
#include "harness/causes/class_causes.h"

namespace isoshard::detail {
namespace {

/// Squares of one parameter in the run's own gradients: of the whole, and of each rank's part.
struct ParameterSquares {
  std::string name;
  double all = 0;
  std::map<int, double> of_rank;
  bool is_split = false;
  bool is_vector = false;
  std::map<int, std::set<Shape>> places;  ///< by rank
};

/// A group of squares that may be missing or counted twice.
struct Group {
  std::string words;
  double squares = 0;
  std::set<std::string> members;
  CauseId too_often = CauseId::kSquaresCountedTwice;
  NamedValues more = {};  ///< data
};

std::vector<ParameterSquares> squares_of(const Evidence& e) {
  std::vector<ParameterSquares> found;
  for (const Record& wanted : e.reference.trace().ranks.at(0).records) {
    if (stage_of(wanted.key) != Stage::kParameterGrad || is_gradient_besides(wanted.key) ||
        wanted.key.step != e.wanted.key.step)
      continue;
    const bool is_vector = wanted.layout.global_shape.size() == 1;
    ParameterSquares own{wanted.key.name, 0, {}, false, is_vector, {}};
    std::set<Shape> seen;
    for (const RankTrace& rank : e.actual.ranks) {
      const Record* record = rank.find(wanted.key);
      if (record == nullptr) continue;
      // of summands the squares say nothing
      if (is_partial(record->layout)) return {};
      double sum = 0;
      for (const PartStats& part : record->parts) {
        sum += part.stats.sum_sq_actual;
        own.places[rank.rank].insert(place_of(part, is_flat(record->layout)));
        if (seen.insert(place_of(part, is_flat(record->layout))).second)
          own.all += part.stats.sum_sq_actual;
      }
      own.of_rank[rank.rank] = sum;
    }
    own.is_split = seen.size() > 1;
    found.push_back(std::move(own));
  }
  return found;
}

/// "down_proj.weight" of "model.layers.1.mlp.down_proj.weight".
std::string kind_of(const std::string& name) {
  const std::string module = parent_of(name);
  return name.substr(parent_of(module).empty() ? 0 : parent_of(module).size() + 1);
}

void add_to(std::vector<Group>& groups, const std::string& words, const ParameterSquares& own) {
  auto found = std::ranges::find(groups, words, &Group::words);
  if (found == groups.end()) found = groups.insert(groups.end(), {words, 0, {}});
  found->squares += own.all;
  found->members.insert(own.name);
}

/// How many coordinates of an axis hold each part of a parameter that is cut along it; 1 if each
/// holds another one, or all hold the same, or parts are not held equally often.
int copies_of_parts(const ParameterSquares& own, const MeshShape& mesh, Axis axis) {
  std::map<std::set<Shape>, std::set<int>> holders;
  for (const auto& [rank, places] : own.places) holders[places].insert(mesh.coordinate(rank, axis));
  const std::size_t copies = holders.empty() ? 1 : holders.begin()->second.size();
  const bool is_even = std::ranges::all_of(
      holders, [&](const auto& entry) { return entry.second.size() == copies; });
  return is_even && holders.size() > 1 ? static_cast<int>(copies) : 1;
}

/// What a sum over an axis has too much if each rank adds its copy of a part that some share.
void add_shared_parts(std::vector<Group>& groups, const std::vector<ParameterSquares>& parameters,
                      const MeshShape& mesh, Axis axis) {
  Group shared{phrase(PhraseId::kPartsThatSeveralHold, {{"axis", name_of(axis)}}),
               0,
               {},
               CauseId::kSquaresOfCopiesCounted,
               {{"axis", name_of(axis)}}};
  for (const ParameterSquares& own : parameters) {
    const int copies = copies_of_parts(own, mesh, axis);
    if (copies == 1) continue;
    shared.squares += (copies - 1) * own.all;
    shared.members.insert(own.name);
  }
  if (!shared.members.empty()) groups.push_back(std::move(shared));
}

/// Of vectors that an axis cuts, the parts of all ranks but the first.
void add_vectors_behind_first(std::vector<Group>& groups,
                              const std::vector<ParameterSquares>& parameters,
                              const MeshShape& mesh, Axis axis) {
  Group behind{phrase(PhraseId::kPartsOfVectors, {{"axis", name_of(axis)}}), 0, {}};
  behind.more = {{"axis", name_of(axis)}};
  for (const ParameterSquares& own : parameters) {
    if (!own.is_vector || !own.is_split) continue;
    // copies of a part count once
    std::set<std::set<Shape>> counted;
    for (const auto& [rank, places] : own.places)
      if (mesh.coordinate(rank, axis) == 0) counted.insert(places);
    for (const auto& [rank, places] : own.places)
      if (counted.insert(places).second) behind.squares += own.of_rank.at(rank);
    behind.members.insert(own.name);
  }
  if (behind.squares > 0) groups.push_back(std::move(behind));
}

std::vector<Group> groups_of(const std::vector<ParameterSquares>& parameters,
                             const MeshShape& mesh) {
  std::vector<Group> groups;
  // of two groups of the same parameters the first one counts, which says why
  for (const AxisDegree& axis : mesh.axes()) {
    if (axis.degree > 2) add_shared_parts(groups, parameters, mesh, axis.axis);
  }
  for (const ParameterSquares& own : parameters) {
    add_to(groups, own.name, own);
    add_to(groups, phrase(PhraseId::kAll, {{"kind", kind_of(own.name)}}), own);
    if (own.name.find("norm") != std::string::npos)
      add_to(groups, phrase(PhraseId::kAllNorms), own);
    if (own.name.ends_with(".bias")) add_to(groups, phrase(PhraseId::kAllBiases), own);
    const auto layer = layer_in(own.name);
    add_to(groups,
           layer.has_value()
               ? phrase(PhraseId::kAllParametersOf, {{"layer", own.name.substr(0, layer->end)}})
               : phrase(PhraseId::kAllOutsideOfLayers),
           own);
  }
  for (const AxisDegree& axis : mesh.axes()) {
    if (axis.degree > 1) add_vectors_behind_first(groups, parameters, mesh, axis.axis);
    // elsewhere ranks of other axes hold copies of a part, or parts of it
    if (axis.degree == 1 || mesh.world_size() != axis.degree) continue;
    for (int c = 0; c < axis.degree; ++c) {
      const NamedValues place = {{"axis", name_of(axis.axis)}, {"coordinate", c}};
      Group part{phrase(PhraseId::kPartsOfRank, place), 0, {}};
      part.more = place;
      for (const ParameterSquares& own : parameters) {
        double of_coordinate = 0;
        for (const auto& [rank, squares] : own.of_rank) {
          if (mesh.coordinate(rank, axis.axis) == c) of_coordinate += squares;
        }
        if (!own.is_split) continue;
        part.squares += of_coordinate;
        part.members.insert(own.name);
      }
      if (part.squares > 0) groups.push_back(std::move(part));
    }
  }
  return groups;
}

}  // namespace

Cause cause_norm_squares(const Evidence& e) {
  // the norm is added up in fp64, or rounded to fp32 at the end
  constexpr double kRounding = 4e-7, kLeastTold = 50;
  const View* bad = e.first_bad_view();
  if (bad == nullptr || role_of(e.wanted.key) != NameRole::kGradNorm || e.whole.numel() != 1)
    return {};
  const std::vector<ParameterSquares> parameters = squares_of(e);
  double all = 0;
  for (const ParameterSquares& own : parameters) all += own.all;
  const double expected = e.whole.item(), actual = bad->actual.item();
  // the gradients must be right, and the norm one of all of them
  if (all == 0 || !is_near(std::sqrt(all), expected, std::clamp(e.tolerance(), 1e-4, 0.02)))
    return {};
  const double off = actual * actual - all, noise = kRounding * all;
  if (std::fabs(off) < kLeastTold * noise) return {};
  std::vector<Group> fitting;
  for (Group& group : groups_of(parameters, e.actual.mesh)) {
    if (std::fabs(std::fabs(off) - group.squares) > 2 * noise) continue;
    const bool is_known = std::ranges::any_of(
        fitting, [&](const Group& known) { return known.members == group.members; });
    if (!is_known) fitting.push_back(std::move(group));
  }
  if (fitting.size() != 1) return {};  // none, or more than one by chance
  const Group& group = fitting.front();
  constexpr std::size_t kMostListed = 64;
  NamedValues values = group.more;
  values.push_back(NamedValue::words("group", group.words));
  values.emplace_back("num_parameters", group.members.size());
  if (group.members.size() < kMostListed) values.emplace_back("parameters", group.members);
  if (group.members.size() > 1)
    values.push_back(NamedValue::words(
        "count", phrase(PhraseId::kParameterCount, {{"count", group.members.size()}})));
  return make_cause(off < 0 ? CauseId::kSquaresLeftOut : group.too_often, std::move(values));
}

}  // namespace isoshard::detail
