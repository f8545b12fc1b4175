// SPDX-License-Identifier: Apache-2.0
// One recorded run and one training run for each composition.
#include "suite/study/study.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "core/base/error.h"
#include "fixtures/cases/setting.h"
#include "harness/judge/judge.h"
#include "harness/judge/own_records.h"
#include "harness/trace/collective_calls.h"
#include "harness/verdict/equal_runs.h"
#include "harness/world/interrupt.h"
#include "suite/emulation/emulated_reference.h"
#include "suite/record/expected_calls.h"
#include "suite/record/make_subject.h"
#include "suite/reference/policy.h"
#include "suite/reference/redrawn_run.h"
#include "suite/reference/reference.h"
#include "suite/reference/warm_up_training.h"
#include "suite/train/train_case.h"

namespace isoshard {
namespace {

constexpr int kRecordedSteps = 2;
constexpr int kMostDraws = 50;  // of a composition that changes something

/// What all runs of one case are compared with.
struct Known {
  Case item;
  Reference reference;
  Trace emulated;
  Curve curve;
  StudyTags tags;
};

StudyTags tags_of(const Case& item, const Reference& reference, const Trace& clean) {
  StudyTags tags;
  std::set<CalledFor> called;
  for (const Record& record : reference.trace().ranks.front().records) {
    if (record.key.step != 0 || record.key.call != 0) continue;
    if (record.key.kind == RecordKind::kActivation) tags.forward.push_back(record.key.name);
    if (record.key.kind == RecordKind::kActivationGrad) tags.backward.push_back(record.key.name);
    if (record.key.kind == RecordKind::kParam) tags.parameters.push_back(record.key.name);
  }
  for (const RankTrace& rank : clean.ranks) {
    for (const Record& record : rank.records) {
      if (role_of(record.key) != NameRole::kCollectives || !record.kept) continue;
      for (const CollectiveCall& call : calls_of(rank.tensor(record).bytes)) {
        const bool has_result = call.op != CollectiveOp::kSend &&
                                call.op != CollectiveOp::kBarrier && is_floating(call.dtype);
        if (has_result) called.insert({call.op, call.purpose, call.axis});
      }
    }
  }
  tags.collectives.assign(called.begin(), called.end());
  if (tags.collectives.empty())
    throw InfrastructureError(fmt::format("{}: no collective of it is known", item.slug()));
  return tags;
}

Case trained_for(Case item, int steps) {
  item.steps = steps;
  return item;
}

class Study {
 public:
  explicit Study(const StudyPlan& plan) : plan_(plan) {
    for (Case item : plan.cases) {
      item.steps = kRecordedSteps;
      cases_.push_back(std::move(item));
    }
  }

  [[nodiscard]] const std::vector<Case>& cases() const noexcept { return cases_; }

  [[nodiscard]] StudyRow clean(std::size_t number) {
    const Known& known = known_of(cases_[number]);
    StudyRow row{.index = -1 - static_cast<std::int64_t>(number)};
    judge_run(known, {}, std::nullopt, row);
    return row;
  }

  /// Compositions that change no bit are drawn again.
  [[nodiscard]] StudyRow composed(std::int64_t index) {
    StudyRow row{.index = index};
    for (int draw = 0; draw < kMostDraws && interrupt_signal() == 0; ++draw) {
      Draws draws(plan_.seed,
                  fmt::format("{}.{}.{}", plan_.is_noise ? "noise" : "study", index, draw));
      const Known& known = known_of(draws.one_of(std::span<const Case>(cases_)));
      const auto drawn = plan_.is_noise ? draw_noise : draw_composition;
      judge(known, drawn(draws, known.item, known.tags), row);
      if (row.fired) return row;
    }
    return row;
  }

  [[nodiscard]] StudyRow composed(const Injection& c) {
    StudyRow row{.index = 0};
    judge(known_of(cases_.front()), c, row);
    return row;
  }

 private:
  const Known& known_of(const Case& item) {
    const std::string slug = item.slug();
    if (const auto found = known_.find(slug); found != known_.end()) return *found->second;
    auto known = std::make_unique<Known>();
    known->item = item;
    known->reference = make_reference(item);
    add_redrawn_runs(item, known->reference);
    known->emulated = emulate(item, numerics_of(item), {.keep = Keep::kNothing});
    if (!plan_.is_noise)
      known->curve = curve_of(trained_for(reference_case(item), plan_.curve_steps), {});
    known->tags = tags_of(item, known->reference,
                          run_case(item, known->reference, {.keep = Keep::kEverything}));
    return *known_.emplace(slug, std::move(known)).first->second;
  }

  /// One that ends early has fewer steps.
  static Curve curve_of(const Case& item, const RunOptions& run) {
    return train_case(item, {.run = run, .check_interval = item.steps}).curve;
  }

  void judge(const Known& known, const Injection& c, StudyRow& row) const {
    row.composition = study_words(c);
    row.bug = c;
    row.bug_ranks.clear();
    const MeshShape mesh = known.item.mesh();
    for (int rank = 0; rank < mesh.world_size(); ++rank)
      if (c.is_on(mesh, rank)) row.bug_ranks.push_back(rank);
    const FaultProbe probe;
    judge_run(known, inject({}, c, known.item, probe), place_of(c), row);
    row.fired = probe.count() > 0;
  }

  void judge_run(const Known& known, RunOptions options, const std::optional<StudyPlace>& place,
                 StudyRow& row) const {
    const Case& item = known.item;
    row.case_slug = item.slug();
    std::optional<TrainingRun> training;
    if (!plan_.is_noise)
      training.emplace(trained_for(item, plan_.curve_steps),
                       TrainOptions{.run = options, .check_interval = plan_.curve_steps});
    options.keep = Keep::kEverything;
    const Trace run = run_case(item, known.reference, options);
    const JudgePolicy policy = with_collectives(policy_of(item), item);
    const RunEquality equality = equality_of(known.emulated, run);
    const Verdict verdict = isoshard::judge(known.reference, run, policy);
    row.within = verdict.status == Status::kDiverges;
    const bool breaks_own = !judge_own_records(run, policy).findings.empty();
    row.is_visible = !equality.holds() || breaks_own;
    row.exact = row.is_visible || row.within;
    if (place.has_value() && equality.first.has_value() && equality.first->key.has_value())
      row.exact_place = is_at(*place, *equality.first->key);
    if (place.has_value() && row.within)
      row.within_place = is_at(*place, verdict.findings.front().key);
    if (row.within) blame(verdict.findings.front(), row);
    if (training.has_value())
      row.weak = weak_alarms(known.reference, run, known.curve, training->wait().curve,
                             item.coarsest_dtype());
  }

  static void blame(const Finding& first, StudyRow& row) {
    row.blame = {.at_place = row.within_place, .ranks = first.ranks, .cause = first.cause};
    row.diagnosis = first.diagnosis;
    // where the first tensor has no cause of its own, that of another one is given
    const RecordKey own = final_of(first.key);
    const IdValue* const of = find_value(first.cause.values, "of");
    if (of != nullptr && *of != IdValue(describe(own)) && row.within_place.has_value())
      row.blame.at_place = false;
  }

  static bool is_at(const StudyPlace& place, const RecordKey& key) {
    const std::string_view stepped = stepped_parameter(key);
    if (place.stage == Stage::kParameterAfterStep) return stepped == place.name;
    return stage_of(key) == place.stage && key.name == place.name;
  }

  StudyPlan plan_;
  std::vector<Case> cases_;
  std::map<std::string, std::unique_ptr<Known>> known_;
};

}  // namespace

CauseGrade StudyRow::grade() const {
  return index >= 0 && fired && within ? grade_of(bug, bug_ranks, blame) : CauseGrade::kNotGraded;
}

StudyRow judge_composition(const Case& item, const std::optional<Injection>& composition,
                           int curve_steps) {
  Study study({.curve_steps = curve_steps, .cases = {item}});
  return composition.has_value() ? study.composed(*composition) : study.clean(0);
}

void run_study(const StudyPlan& plan, const std::vector<StudyRow>& known,
               const std::function<void(const StudyRow&)>& add) {
  if (plan.first < 0 || plan.count < 1 || plan.curve_steps < kRecordedSteps)
    throw UsageError(fmt::format(
        "--first must be at least 0, --count at least 1 and --curve-steps at least {}, got {}, {} "
        "and {}",
        kRecordedSteps, plan.first, plan.count, plan.curve_steps));
  std::set<std::int64_t> done;
  for (const StudyRow& row : known) done.insert(row.index);
  Study study(plan);
  warm_up_training({study.cases().front()});
  for (std::size_t i = 0; i < study.cases().size() && interrupt_signal() == 0; ++i)
    if (!done.contains(-1 - static_cast<std::int64_t>(i))) add(study.clean(i));
  for (std::int64_t i = plan.first; i < plan.first + plan.count && interrupt_signal() == 0; ++i)
    if (!done.contains(i)) add(study.composed(i));
}

}  // namespace isoshard
