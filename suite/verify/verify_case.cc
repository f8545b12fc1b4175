// SPDX-License-Identifier: Apache-2.0
// Which reference when, and what follows from two comparisons.
#include "suite/verify/verify_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <span>
#include <utility>

#include "core/base/error.h"
#include "fixtures/inputs/inputs.h"
#include "harness/fault/random_delays.h"
#include "harness/judge/judge.h"
#include "harness/judge/own_records.h"
#include "harness/judge/rules/witnesses.h"
#include "harness/verdict/equal_runs.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/interrupt.h"
#include "harness/world/machine.h"
#include "subjects/registry/subject_spec.h"
#include "suite/clock/collective_times.h"
#include "suite/emulation/emulated_reference.h"
#include "suite/faults/fault.h"
#include "suite/record/expected_calls.h"
#include "suite/record/make_subject.h"
#include "suite/record/run_case.h"
#include "suite/reference/lattice_guard.h"
#include "suite/reference/redrawn_run.h"
#include "suite/reference/reference.h"

namespace isoshard {
namespace {

constexpr int kAllResponses = 3;

/// Processes that verify together must decide alike.
std::size_t agreed_memory() {
  static const std::size_t bytes = [] {
    std::int64_t own = this_machine().memory_bytes;
    if (Peers* const peers = default_launcher().peers(); peers != nullptr)
      peers->broadcast(std::as_writable_bytes(std::span(&own, 1)), 0);
    return static_cast<std::size_t>(own);
  }();
  return bytes;
}

/// Whether the memory that the emulated ranks and the real ones take together is nothing to speak
/// of.
bool is_small(const Case& item) {
  constexpr std::size_t kShareOfMemory = 64;
  return trace_bytes(item) * static_cast<std::size_t>(item.world_size()) <
         agreed_memory() / kShareOfMemory;
}

/// A record that cannot be carried out: it contradicts itself, or leaves copies that differ.
class RecordError : public InfrastructureError {
 public:
  using InfrastructureError::InfrastructureError;
};

Trace emulation_of(RunningEmulation& running) {
  try {
    return running.wait();
  } catch (const Error& error) {
    throw RecordError(error.what());
  }
}

void require_equal_copies_of_record(const Trace& emulated) {
  try {
    require_equal_copies(emulated);
  } catch (const Error& error) {
    throw RecordError(error.what());
  }
}

void require_same_run(const Trace& first, const Trace& again, const Case& item,
                      std::string_view what) {
  const RunEquality equality = equality_of(first, again);
  if (equality.holds()) return;
  throw InfrastructureError(
      fmt::format("{}: two {} differ: {}", item.slug(), what, equality.difference));
}

/// Anything on a tensor's path: a tolerance hides much there.
bool is_rounded_to_16_bits(const Case& item) {
  return size_of(item.coarsest_dtype()) < size_of(Dtype::kFloat32);
}

/// Whether the first finding of one verdict stands before that of another in the order in which the
/// plain run computes: an emulation has all ranks in it, in an order of its own.
bool begins_earlier(const Verdict& verdict, const Verdict& other, const Reference& plain) {
  if (verdict.findings.empty() || other.findings.empty()) return true;
  const Finding &a = verdict.findings.front(), &b = other.findings.front();
  if (a.key.step != b.key.step) return a.key.step < b.key.step;
  if (a.stage != b.stage) return a.stage < b.stage;
  const Record *first = plain.find(a.key), *second = plain.find(b.key);
  return first == nullptr || second == nullptr || first->order < second->order;
}

}  // namespace

bool references_fit_together(const Case& a, const Case& b) {
  constexpr std::size_t kShareOfMemory = 4;
  return trace_bytes(a) + trace_bytes(b) < agreed_memory() / kShareOfMemory;
}

std::string_view name_of(ReferenceKind kind) noexcept {
  switch (kind) {
    case ReferenceKind::kAuto:
      return "auto";
    case ReferenceKind::kPlain:
      return "plain";
    case ReferenceKind::kEmulated:
      return "emulated";
    case ReferenceKind::kBoth:
      return "both";
  }
  return "unknown";
}

CaseJudge::CaseJudge(JudgePlan plan) : plan_(std::move(plan)), observer_(&nobody_) {
  inject(plan_.fault);
}

void CaseJudge::inject(std::string fault) {
  if (!fault.empty()) (void)find_fault(fault);
  plan_.fault = std::move(fault);
}

CaseJudge::CaseJudge(JudgePlan plan, VerifyObserver& observer) : CaseJudge(std::move(plan)) {
  observer_ = &observer;
}

CaseJudgement CaseJudge::judge_case(const Case& item) {
  runs_ = SubjectRuns();
  collective_times_.clear();
  num_emulations_ = 0;
  CaseJudgement judgement = judged(item);
  repeat_runs(item);
  runs_.settle(judgement.verdict);
  judgement.verdict.copy_of = subject_spec(item.subject).copy_of;
  judgement.collective_times = collective_times_;
  if (plan_.tables) side_by_side_.add(item, judgement);
  return judgement;
}

Trace CaseJudge::run_subject(const Case& item, const Reference& reference, RunDetail detail) {
  RunOptions options = plan_.run;
  if (detail == RunDetail::kDigests) options = digests_only(std::move(options));
  if (plan_.retention == Retention::kWhole) options.keep = Keep::kEverything;
  const FaultProbe probe;
  if (!plan_.fault.empty()) options = with_fault(options, find_fault(plan_.fault), item, probe);
  if (plan_.tables) options = side_by_side_.observed(item, reference, std::move(options));
  Trace trace = next_run(item, reference, std::move(options));
  if (!plan_.fault.empty()) require_fired(probe, plan_.fault, item.slug());
  observer_->on_run(item, trace);
  return trace;
}

Trace CaseJudge::next_run(const Case& item, const Reference& reference, RunOptions options) {
  options.number = runs_.num_runs() + 1;
  // ranks that meet at other times, others for each number of a run
  if (plan_.repeat > 1 && options.number > 1)
    options.decorate = with_random_delays(std::move(options.decorate), item.seed, options.number);
  // calls on a device only ask for what they do, and ends of steps do not wait for it
  if (plan_.times && options.number == 1 && item.device == Device::Kind::kCpu)
    options.times = std::make_shared<CollectiveTimes>(item.world_size());
  Trace trace = run_case(item, reference, options);
  if (options.times != nullptr) collective_times_ = options.times->rows(default_launcher());
  runs_.add(trace);
  return trace;
}

// Listeners are not told of them: they are the first run again, or a reason to diverge.
void CaseJudge::repeat_runs(const Case& item) {
  while (runs_.num_runs() < plan_.repeat && !runs_.difference().has_value()) {
    RunOptions options = digests_only(plan_.run);
    const FaultProbe probe;
    if (!plan_.fault.empty()) options = with_fault(options, find_fault(plan_.fault), item, probe);
    (void)next_run(item, Reference(), std::move(options));
  }
}

CaseJudgement CaseJudge::judged(const Case& item) {
  keep_needed_plains(item);
  switch (plan_.reference) {
    case ReferenceKind::kPlain:
      return against_plain(item);
    case ReferenceKind::kEmulated:
      return against_emulated(item);
    case ReferenceKind::kBoth:
      return against_both_or_plain(item);
    case ReferenceKind::kAuto:
      break;
  }
  return declares_numerics(item) && !is_lattice(item) ? against_both_or_plain(item)
                                                      : against_plain(item);
}

// Subjects and their records share plans, partitions and buckets: one mistake there breaks the
// record, and the run is wrong as well.
CaseJudgement CaseJudge::against_both_or_plain(const Case& item) {
  try {
    return plan_.expects_divergence ? against_plain_first(item) : against_both(item);
  } catch (const RecordError&) {
    if (interrupt_signal() != 0) throw;
    CaseJudgement judgement = against_plain(item);
    if (judgement.verdict.status != Status::kDiverges && !runs_.difference().has_value()) throw;
    return judgement;
  }
}

void CaseJudge::announce(std::vector<Case> cases) {
  announced_ = std::move(cases);
}

std::vector<Case>::const_iterator CaseJudge::announced(const Case& item) const {
  return std::find_if(announced_.begin(), announced_.end(),
                      [slug = item.slug()](const Case& c) { return c.slug() == slug; });
}

void CaseJudge::keep_needed_plains(const Case& item) {
  std::set<std::string> needed{item.reference_slug()};
  for (auto next = announced(item); next != announced_.end(); ++next)
    needed.insert(next->reference_slug());
  std::erase_if(plains_, [&](const auto& entry) { return !needed.contains(entry.first); });
}

// And the next one beside it.
void CaseJudge::make_plain(const Case& item, int responses) {
  const std::string slug = item.reference_slug();
  std::vector<Case> together{item};
  const auto next = std::find_if(announced(item), announced_.cend(), [&](const Case& c) {
    return c.reference_slug() != slug && !plains_.contains(c.reference_slug()) &&
           references_fit_together(item, c);
  });
  if (next != announced_.end()) together.push_back(*next);
  const auto earlier = plains_.find(slug);
  const int number = earlier == plains_.end() ? 1 : earlier->second.num_runs + 1;
  std::vector<Reference> made =
      make_references(together, {.responses = responses, .number = number});
  if (earlier != plains_.end())
    require_same_run(earlier->second.reference.trace(), made.front().trace(), item, "references");
  for (std::size_t i = 0; i < together.size(); ++i)
    plains_[together[i].reference_slug()] = {.reference = std::move(made[i]),
                                             .num_runs = i == 0 ? number : 1};
}

// The subject of a large case needs the memory.
const Reference& CaseJudge::plain_records(const Case& item) {
  Reference& reference = plain(item, 1);
  const std::string slug = item.reference_slug();
  const auto last = std::find_if(announced_.rbegin(), announced_.rend(),
                                 [&](const Case& c) { return c.reference_slug() == slug; });
  if (last != announced_.rend() && last->slug() == item.slug()) {
    reference.discard_bytes();
    plains_.at(slug).redrawn = {};
  }
  return reference;
}

Reference& CaseJudge::plain(const Case& item, int responses) {
  const auto made = plains_.find(item.reference_slug());
  if (made == plains_.end() || !made->second.reference.has_bytes()) make_plain(item, responses);
  Plain& known = plains_.at(item.reference_slug());
  if (plan_.retention == Retention::kWhole && responses >= kAllResponses)
    add_redrawn_runs(item, known.reference);
  if (!known.is_seen) {
    if (plan_.tables) side_by_side_.add_plain(item, known.reference);
    observer_->on_plain(item, known.reference);
  }
  known.is_seen = true;
  add_responses(item, known.reference, responses);
  return known.reference;
}

const Reference& CaseJudge::plain_with_redrawn(const Case& item) {
  Plain& known = plains_.at(item.reference_slug());
  if (known.reference.redrawn().runs >= kRedrawnRuns) return known.reference;
  if (!known.redrawn.has_bytes()) {
    known.redrawn = Reference(known.reference.trace());
    known.redrawn.set_responses(known.reference.responses(), known.reference.response_runs());
    add_redrawn_runs(item, known.redrawn);
  }
  return known.redrawn;
}

Verdict CaseJudge::exact(const Case& item, Trace emulated) {
  const Reference reference = reference_of_emulated(emulated);
  emulated = without_bytes(emulated);  // their memory is free for the subject
  observer_->on_emulated(item, reference);
  const Trace run = run_subject(item, reference, RunDetail::kComparison);
  Verdict verdict = judge(reference, run, with_collectives(exact_policy_of(item), item));
  const RunEquality equality = equality_of(emulated, run);
  if (equality.first.has_value()) {
    if (runs_.num_runs() == 1) runs_.first_is_not_emulated(*equality.first);
    if (verdict.status == Status::kConforms) diverge_in_bits(verdict, *equality.first);
  }
  return verdict;
}

bool is_benign_variation(const std::string& fault) {
  return !fault.empty() && !find_fault(fault).expected.has_value();
}

JudgePolicy CaseJudge::plain_policy_of(const Case& item) const {
  return is_benign_variation(plan_.fault) || plan_.makes_own_calls
             ? policy_of(item)
             : with_collectives(policy_of(item), item);
}

Trace CaseJudge::emulated_again(const Case& item, const NumericsSpec& numerics,
                                const Trace& first) {
  Trace again = emulate(item, numerics, {.number = ++num_emulations_});
  require_same_run(first, again, item, "emulations");
  return again;
}

/// Whether redrawn runs may show that a run is right that diverges without them: it does so first
/// after an optimizer's step.
bool may_be_explained(const Verdict& verdict) {
  return verdict.status == Status::kDiverges && !verdict.findings.empty() &&
         verdict.findings.front().key.step > 0;
}

CaseJudgement CaseJudge::against_plain(const Case& item) {
  Reference& reference = plain(item, kAllResponses);
  const Trace run = run_subject(item, reference, RunDetail::kComparison);
  Verdict verdict = judge(reference, run, plain_policy_of(item));
  // Pools say nothing of a run that diverges without them, or that an exact verdict follows.
  const bool is_last_word = plan_.reference == ReferenceKind::kPlain || !declares_numerics(item);
  const bool asks = verdict.status == Status::kDiverges ? may_be_explained(verdict) : is_last_word;
  if (asks && has_redrawn_runs(item))
    verdict = judge(plain_with_redrawn(item), run, plain_policy_of(item));
  return {std::move(verdict), ReferenceKind::kPlain};
}

CaseJudgement CaseJudge::against_emulated(const Case& item) {
  return {exact(item, emulate(item, numerics_of(item), {.number = ++num_emulations_})),
          ReferenceKind::kEmulated};
}

std::pair<Verdict, Trace> CaseJudge::on_record(const Case& item, const NumericsSpec& numerics,
                                               const std::function<void()>& meanwhile) {
  const Keep keep = plan_.retention == Retention::kWhole ? Keep::kEverything : Keep::kWhatDiffers;
  const auto judged = [&](const Reference& reference, const std::function<void()>& beside) {
    RunningEmulation running(
        item, numerics, {.compare_with = &reference, .keep = keep, .number = ++num_emulations_});
    beside();
    Trace emulated = emulation_of(running);
    Verdict verdict = judge(reference, emulated, policy_of(item));
    verdict.subject = item.subject;
    return std::pair(std::move(verdict), std::move(emulated));
  };
  const Reference& first = plain(item, plan_.retention == Retention::kWhole ? kAllResponses : 1);
  auto result = judged(first, meanwhile);
  if (result.first.status != Status::kDiverges || first.response_runs() >= kAllResponses)
    return result;
  // The emulation again, on bounds that are known better: its memory must be free for it.
  const auto judged_again = [&] {
    for (RankTrace& rank : result.second.ranks) rank.arena = nullptr;
    auto again = judged(plain(item, kAllResponses), [] {});
    require_same_run(result.second, again.second, item, "emulations");
    result = std::move(again);
  };
  judged_again();
  if (!may_be_explained(result.first) || !has_redrawn_runs(item)) return result;
  result.first = judge(plain_with_redrawn(item), result.second, policy_of(item));
  result.first.subject = item.subject;
  return result;
}

CaseJudgement CaseJudge::against_both(const Case& item) {
  const NumericsSpec numerics = plan_.numerics ? plan_.numerics(item) : numerics_of(item);
  const bool is_beside = plan_.retention == Retention::kLean && is_small(item);
  Trace run;
  auto [record, emulated] = on_record(item, numerics, [&] {
    if (is_beside) run = run_subject(item, plain(item, 1), RunDetail::kDigests);
  });
  require_equal_copies_of_record(emulated);
  if (plan_.retention == Retention::kWhole) {
    Verdict to_the_bit = exact(item, std::move(emulated));
    record.collectives = to_the_bit.collectives;
    record.evidence.calls = to_the_bit.evidence.calls;
    record.witnesses = std::move(to_the_bit.witnesses);
    if (to_the_bit.status == Status::kConforms || to_the_bit.rule.id == RuleId::kAxisWithoutWitness)
      return as_emulated(item, std::move(record), to_the_bit.compared);
    return not_emulated(item, [&] { return std::move(to_the_bit); });
  }
  if (!is_beside) run = run_subject(item, plain_records(item), RunDetail::kDigests);
  const RunEquality equality = equality_of(emulated, run);
  OwnRecords own = judge_own_records(run, plain_policy_of(item));
  if (equality.holds() && own.findings.empty()) {
    record.collectives = std::move(own.collectives);
    record.evidence.calls = rank_calls_of(run);
    record.witnesses =
        detail::witnesses_of(run, detail::held_by_ranks(run), plain_policy_of(item).may_be_unused);
    return as_emulated(item, std::move(record), equality.tensors);
  }
  if (equality.first.has_value()) runs_.first_is_not_emulated(*equality.first);
  emulated = without_bytes(emulated);
  return not_emulated(item, [&] { return exact(item, emulated_again(item, numerics, emulated)); });
}

Trace CaseJudge::emulated_whole(const Case& item) {
  const std::string slug = item.slug();
  if (const auto known = emulated_.find(slug); known != emulated_.end()) return known->second;
  Trace emulated = emulate(item, numerics_of(item), {.number = ++num_emulations_});
  const auto times = std::ranges::count(announced_, slug, &Case::slug);
  if (times > 1) emulated_.emplace(slug, emulated);
  return emulated;
}

CaseJudgement CaseJudge::against_plain_first(const Case& item) {
  CaseJudgement within = against_plain(item);
  if (within.verdict.status != Status::kDiverges) return against_both(item);
  if (!is_rounded_to_16_bits(item)) return within;
  return not_emulated(item, std::move(within), [&] { return exact(item, emulated_whole(item)); });
}

CaseJudgement CaseJudge::as_emulated(const Case& item, Verdict record, std::int64_t num_equal) {
  if (record.weak > 0 || record.shows_too_little) require_repeatable_plain(item);
  return {verdict_through_record(std::move(record), num_equal), ReferenceKind::kBoth};
}

// Bounds that are wide because the case is are wide again.
void CaseJudge::require_repeatable_plain(const Case& item) {
  Plain& known = plains_.at(item.reference_slug());
  if (known.is_repeated) return;
  const Reference again = make_reference(
      item, {.responses = known.reference.response_runs(), .number = ++known.num_runs});
  require_same_run(known.reference.trace(), again.trace(), item, "references");
  for (const auto& [key, response] : known.reference.responses()) {
    const Response* const other = again.response(key);
    if (other != nullptr && other->absolute_norm == response.absolute_norm &&
        other->max_abs == response.max_abs)
      continue;
    throw InfrastructureError(fmt::format("{}: the same perturbed runs, made twice, differ: {}",
                                          item.slug(), describe(key)));
  }
  known.is_repeated = true;
}

CaseJudgement CaseJudge::not_emulated(const Case& item, const std::function<Verdict()>& exactly) {
  return not_emulated(item, against_plain(item), exactly);
}

CaseJudgement CaseJudge::not_emulated(const Case& item, CaseJudgement within,
                                      const std::function<Verdict()>& exactly) {
  if (runs_.difference().has_value()) return within;
  const bool diverges = within.verdict.status == Status::kDiverges;
  if (diverges && !is_rounded_to_16_bits(item)) return within;
  Verdict to_the_bit = exactly();
  if (to_the_bit.status == Status::kConforms && !runs_.difference().has_value())
    throw InfrastructureError(fmt::format(
        "{}: a run that differs from the emulated one was found equal to it", item.slug()));
  if (diverges) {
    // Patterns need a tolerance: of one tensor the plain reference says more.
    const Reference& records = plains_.at(item.reference_slug()).reference;
    if (name_same_tensor(to_the_bit, within.verdict) ||
        !begins_earlier(to_the_bit, within.verdict, records))
      return within;
    to_the_bit = with_cause_of(std::move(to_the_bit), within.verdict);
  }
  return {std::move(to_the_bit), ReferenceKind::kEmulated};
}

}  // namespace isoshard
