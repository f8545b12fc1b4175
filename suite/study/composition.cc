// SPDX-License-Identifier: Apache-2.0
// Draws, words and expected places.
#include "suite/study/composition.h"

#include <fmt/format.h>

#include <span>

#include "fixtures/cases/presets.h"
#include "subjects/registry/subject_spec.h"

namespace isoshard {
namespace {

bool is_reduction(const std::optional<CollectiveOp>& op) {
  return op == CollectiveOp::kAllReduce || op == CollectiveOp::kReduceScatter ||
         op == CollectiveOp::kReduceScatterUneven;
}

/// Gradients are reduced parameter by parameter.
bool names_parameters(const CalledFor& called) {
  return called.purpose == Purpose::kGradReduce && is_reduction(called.op);
}

void draw_place(Draws& draws, const StudyTags& tags, Injection& c) {
  c.point = draws.one_of({FaultPoint::kForward, FaultPoint::kBackward, FaultPoint::kCollective,
                          FaultPoint::kCollective, FaultPoint::kUpdate});
  switch (c.point) {
    case FaultPoint::kForward:
      c.name = draws.one_of(std::span(tags.forward));
      return;
    case FaultPoint::kBackward:
      c.name = draws.one_of(std::span(tags.backward));
      return;
    case FaultPoint::kUpdate:
      c.name = draws.one_of(std::span(tags.parameters));
      return;
    case FaultPoint::kCollective:
      c.called = draws.one_of(std::span(tags.collectives));
      if (names_parameters(c.called) && !draws.one_in(3))
        c.name = draws.one_of(std::span(tags.parameters));
      return;
    default:
      return;
  }
}

void draw_size(Draws& draws, Injection& c) {
  c.magnitude = draws.one_of(std::span<const double>(kMagnitudes));
  c.extent = draws.one_of({FaultExtent::kAll, FaultExtent::kPart, FaultExtent::kElement});
}

void draw_change(Draws& draws, Dtype dtype, Injection& c) {
  if (draws.one_in(5)) {
    const bool can_skip = c.point == FaultPoint::kCollective && is_reduction(c.called.op);
    const bool can_round = dtype == Dtype::kFloat32;
    do {
      c.change = draws.one_of(
          {FaultChange::kZero, FaultChange::kRoll, FaultChange::kRound, FaultChange::kSkip});
    } while ((c.change == FaultChange::kSkip && !can_skip) ||
             (c.change == FaultChange::kRound && !can_round));
    if (c.change != FaultChange::kSkip && draws.one_in(2))
      c.extent = c.change == FaultChange::kRoll || draws.one_in(2) ? FaultExtent::kPart
                                                                   : FaultExtent::kElement;
    return;
  }
  c.change = draws.one_of({FaultChange::kScale, FaultChange::kShift, FaultChange::kNoise});
  draw_size(draws, c);
}

void draw_ranks(Draws& draws, const MeshShape& mesh, Injection& c) {
  // a reduction is skipped by all of its ranks, or none could end
  if (c.change == FaultChange::kSkip || draws.one_in(3)) return;
  std::vector<AxisDegree> axes;
  for (const AxisDegree& axis : mesh.axes())
    if (axis.degree > 1) axes.push_back(axis);
  const AxisDegree& axis = draws.one_of(std::span<const AxisDegree>(axes));
  c.ranks = FaultRanks{axis.axis, static_cast<int>(draws.between(0, axis.degree - 1))};
}

double drawn_position(Draws& draws) {
  constexpr std::int64_t kSteps = 1 << 20;
  return static_cast<double>(draws.between(0, kSteps)) / kSteps;
}

}  // namespace

bool has_magnitude(FaultChange change) noexcept {
  return change <= FaultChange::kNoise;
}

std::string study_words(const Injection& composition) {
  const Injection& c = composition;
  std::string text(name_of(c.change));
  if (has_magnitude(c.change)) text += fmt::format(" {:g}", c.magnitude);
  text += fmt::format(" of {} at {}", name_of(c.extent), name_of(c.point));
  if (c.point == FaultPoint::kCollective)
    text += fmt::format(" {} {} over {}", name_of(c.called.op.value_or(CollectiveOp::kAllReduce)),
                        name_of(c.called.purpose), name_of(c.called.axis));
  if (!c.name.empty()) text += " of " + c.name;
  if (c.ranks.has_value())
    text += fmt::format(" on {} rank {}", name_of(c.ranks->axis), c.ranks->coordinate);
  return text;
}

std::optional<StudyPlace> place_of(const Injection& composition) {
  switch (composition.point) {
    case FaultPoint::kForward:
      return StudyPlace{Stage::kForward, composition.name};
    case FaultPoint::kBackward:
      return StudyPlace{Stage::kActivationGrad, composition.name};
    case FaultPoint::kUpdate:
      return StudyPlace{Stage::kParameterAfterStep, composition.name};
    case FaultPoint::kCollective:
      if (composition.name.empty()) return std::nullopt;
      return StudyPlace{Stage::kParameterGrad, composition.name};
    default:
      break;
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

Injection draw_composition(Draws& draws, const Case& item, const StudyTags& tags) {
  Injection c;
  draw_place(draws, tags, c);
  draw_change(draws, item.dtype, c);
  draw_ranks(draws, item.mesh(), c);
  c.position = drawn_position(draws);
  return c;
}

Injection draw_noise(Draws& draws, const Case& item, const StudyTags& tags) {
  Injection c{.change = FaultChange::kNoise};
  draw_place(draws, tags, c);
  draw_size(draws, c);
  draw_ranks(draws, item.mesh(), c);
  c.position = drawn_position(draws);
  return c;
}

}  // namespace isoshard
