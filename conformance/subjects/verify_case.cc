// SPDX-License-Identifier: Apache-2.0
// Which reference when, and what follows from two comparisons.
#include "conformance/subjects/verify_case.h"

#include <utility>

#include "conformance/subjects/registry.h"
#include "conformance/subjects/run_case.h"
#include "fixtures/cases/inputs.h"
#include "fixtures/reference/emulated_reference.h"
#include "fixtures/reference/lattice_guard.h"
#include "fixtures/reference/reference.h"

namespace isoshard {
namespace {

constexpr int kAllResponses = 3;

}  // namespace

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

CaseJudge::CaseJudge(ReferenceKind kind, Hooks hooks, bool all_responses)
    : kind_(kind), hooks_(std::move(hooks)), first_responses_(all_responses ? kAllResponses : 1) {}

CaseJudgement CaseJudge::judge_case(const Case& item) {
  switch (kind_) {
    case ReferenceKind::kPlain:
      return against_plain(item);
    case ReferenceKind::kEmulated:
      return against_emulated(item);
    case ReferenceKind::kBoth:
      return against_both(item);
    case ReferenceKind::kAuto:
      break;
  }
  return declares_arithmetic(item) && !is_lattice(item) ? against_both(item) : against_plain(item);
}

const Reference& CaseJudge::plain(const Case& item, int responses) {
  if (item.reference_slug() != slug_) {
    plain_ = Reference();  // frees the last one's memory before the next is made
    slug_.clear();
    plain_ = make_reference(item, {.responses = responses});
    slug_ = item.reference_slug();
    if (hooks_.on_plain) hooks_.on_plain(item, plain_);
  }
  add_responses(item, plain_, responses);
  return plain_;
}

Verdict CaseJudge::exact(const Case& item, Trace emulated) {
  const Reference reference = reference_of_emulated(emulated);
  emulated = Trace();  // its memory is free for the subject
  if (hooks_.on_emulated) hooks_.on_emulated(item, reference);
  return judge(reference, hooks_.run(item, reference), exact_options(item));
}

CaseJudgement CaseJudge::against_plain(const Case& item) {
  const Reference& reference = plain(item, kAllResponses);
  return {judge(reference, hooks_.run(item, reference), judge_options(item)), ReferenceKind::kPlain};
}

CaseJudgement CaseJudge::against_emulated(const Case& item) {
  return {exact(item, emulate(item, arithmetic_of(item))), ReferenceKind::kEmulated};
}

CaseJudgement CaseJudge::against_both(const Case& item) {
  const Arithmetic arithmetic = arithmetic_of(item);
  const auto emulated_against = [&](const Reference& reference) { return emulate(item, arithmetic, {.compare_with = &reference}); };
  const Reference& first = plain(item, first_responses_);
  Trace emulated = emulated_against(first);
  Verdict record = judge(first, emulated, judge_options(item));
  if (record.status == Status::kDiverges && first.response_runs() < kAllResponses) {
    const Reference& all = plain(item, kAllResponses);
    emulated = emulated_against(all);
    record = judge(all, emulated, judge_options(item));
  }
  Verdict to_the_bit = exact(item, std::move(emulated));
  if (to_the_bit.status == Status::kConforms) {
    record.subject = item.subject;
    return {verdict_through_record(std::move(record), to_the_bit), ReferenceKind::kBoth};
  }
  if (to_the_bit.status == Status::kDiverges) {
    CaseJudgement judgement = against_plain(item);
    if (judgement.verdict.status == Status::kDiverges) return judgement;
  }
  return {std::move(to_the_bit), ReferenceKind::kEmulated};
}

}  // namespace isoshard
