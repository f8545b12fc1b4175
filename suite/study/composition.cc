// SPDX-License-Identifier: Apache-2.0
// Draws, words and expected places.
#include "suite/study/composition.h"

#include <fmt/format.h>

#include <span>

#include "fixtures/cases/presets.h"
#include "subjects/registry/subject_spec.h"

namespace isoshard {
namespace {

bool is_reduction(CollectiveOp op) {
  return op == CollectiveOp::kAllReduce || op == CollectiveOp::kReduceScatter ||
         op == CollectiveOp::kReduceScatterUneven;
}

/// Gradients are reduced parameter by parameter.
bool names_parameters(const CalledFor& called) {
  return called.purpose == Purpose::kGradReduce && is_reduction(called.op);
}

void draw_place(Draws& draws, const StudyTags& tags, Composition& c) {
  c.point = draws.one_of({StudyPoint::kForward, StudyPoint::kBackward, StudyPoint::kCollective,
                          StudyPoint::kCollective, StudyPoint::kUpdate});
  switch (c.point) {
    case StudyPoint::kForward:
      c.tag = draws.one_of(std::span(tags.forward));
      return;
    case StudyPoint::kBackward:
      c.tag = draws.one_of(std::span(tags.backward));
      return;
    case StudyPoint::kUpdate:
      c.tag = draws.one_of(std::span(tags.parameters));
      return;
    case StudyPoint::kCollective:
      c.called = draws.one_of(std::span(tags.collectives));
      if (names_parameters(c.called) && !draws.one_in(3))
        c.tag = draws.one_of(std::span(tags.parameters));
      return;
  }
}

void draw_change(Draws& draws, Dtype dtype, Composition& c) {
  if (draws.one_in(5)) {
    const bool can_skip = c.point == StudyPoint::kCollective && is_reduction(c.called.op);
    const bool can_round = dtype == Dtype::kFloat32;
    do {
      c.change = draws.one_of(
          {StudyChange::kZero, StudyChange::kRoll, StudyChange::kRound, StudyChange::kSkip});
    } while ((c.change == StudyChange::kSkip && !can_skip) ||
             (c.change == StudyChange::kRound && !can_round));
    if (c.change != StudyChange::kSkip && draws.one_in(2))
      c.extent = c.change == StudyChange::kRoll || draws.one_in(2) ? StudyExtent::kPart
                                                                   : StudyExtent::kElement;
    return;
  }
  c.change = draws.one_of({StudyChange::kScale, StudyChange::kShift, StudyChange::kNoise});
  c.magnitude = draws.one_of(std::span<const double>(kMagnitudes));
  c.extent = draws.one_of({StudyExtent::kAll, StudyExtent::kPart, StudyExtent::kElement});
}

void draw_ranks(Draws& draws, const MeshShape& mesh, Composition& c) {
  // a reduction is skipped by all of its ranks, or none could end
  if (c.change == StudyChange::kSkip || draws.one_in(3)) return;
  std::vector<AxisDegree> axes;
  for (const AxisDegree& axis : mesh.axes())
    if (axis.degree > 1) axes.push_back(axis);
  const AxisDegree& axis = draws.one_of(std::span<const AxisDegree>(axes));
  c.axis = axis.axis;
  c.coordinate = static_cast<int>(draws.between(0, axis.degree - 1));
}

}  // namespace

std::string_view name_of(StudyPoint point) noexcept {
  constexpr std::array kNames = {"forward", "backward", "collective", "update"};
  return kNames.at(static_cast<std::size_t>(point));
}

std::string_view name_of(StudyChange change) noexcept {
  constexpr std::array kNames = {"scale", "shift", "noise", "zero", "roll", "round", "skip"};
  return kNames.at(static_cast<std::size_t>(change));
}

bool has_magnitude(StudyChange change) noexcept {
  return change <= StudyChange::kNoise;
}

std::string_view name_of(StudyExtent extent) noexcept {
  constexpr std::array kNames = {"all", "part", "element"};
  return kNames.at(static_cast<std::size_t>(extent));
}

std::string Composition::words() const {
  std::string text(name_of(change));
  if (has_magnitude(change)) text += fmt::format(" {:g}", magnitude);
  text += fmt::format(" of {} at {}", name_of(extent), name_of(point));
  if (point == StudyPoint::kCollective)
    text += fmt::format(" {} {} over {}", name_of(called.op), name_of(called.purpose),
                        name_of(called.axis));
  if (!tag.empty()) text += " of " + tag;
  if (axis.has_value()) text += fmt::format(" on {} rank {}", name_of(*axis), coordinate);
  return text;
}

bool Composition::is_on(const MeshShape& mesh, int rank) const {
  return !axis.has_value() || mesh.coordinate(rank, *axis) == coordinate;
}

std::optional<StudyPlace> place_of(const Composition& composition) {
  switch (composition.point) {
    case StudyPoint::kForward:
      return StudyPlace{Stage::kForward, composition.tag};
    case StudyPoint::kBackward:
      return StudyPlace{Stage::kActivationGrad, composition.tag};
    case StudyPoint::kUpdate:
      return StudyPlace{Stage::kParameterAfterStep, composition.tag};
    case StudyPoint::kCollective:
      if (composition.tag.empty()) return std::nullopt;
      return StudyPlace{Stage::kParameterGrad, composition.tag};
  }
  return std::nullopt;
}

std::vector<Case> study_cases() {
  struct Row {
    std::string_view subject;
    Degrees degrees;
    bool is_split_more = false;  ///< ZeRO 2 or sequence parallelism, whichever it takes
  };
  std::vector<Case> cases;
  for (const Row& row :
       {Row{"ddp", {.dp = 3}, false}, Row{"autotp", {.dp = 2, .tp = 2}, false},
        Row{"autotp", {.dp = 2, .tp = 2}, true}, Row{"fsdp_tp", {.dp = 2, .tp = 2}, false},
        Row{"megatron", {.dp = 2, .tp = 2}, true}, Row{"nd", {.pp = 2, .dp = 2}, false},
        Row{"nd", {.dp = 2, .cp = 2}, false}}) {
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
      for (const auto kind : {OptimizerSettings::Kind::kSgd, OptimizerSettings::Kind::kAdamW}) {
        Case item = tiny_fault_case();
        item.subject = row.subject;
        const SubjectSpec& spec = subject_spec(item.subject);
        item.degrees = row.degrees;
        item.dtype = dtype;
        if (dtype == Dtype::kBFloat16) item.settings.master_dtype = Dtype::kFloat32;
        if (kind == OptimizerSettings::Kind::kAdamW)
          item.settings.optimizer = {.kind = kind, .learning_rate = 1e-3, .weight_decay = 0.01};
        if (row.is_split_more && spec.takes("zero_stage")) item.settings.zero_stage = 2;
        if (row.is_split_more && spec.takes("sequence_parallel"))
          item.settings.sequence_parallel = true;
        if (row.degrees.pp > 1) item.micro_batches = 2;
        item.validate();
        cases.push_back(std::move(item));
      }
    }
  }
  return cases;
}

Composition draw_composition(Draws& draws, const Case& item, const StudyTags& tags) {
  Composition c;
  draw_place(draws, tags, c);
  draw_change(draws, item.dtype, c);
  draw_ranks(draws, item.mesh(), c);
  constexpr std::int64_t kSteps = 1 << 20;
  c.position = static_cast<double>(draws.between(0, kSteps)) / kSteps;
  return c;
}

}  // namespace isoshard
