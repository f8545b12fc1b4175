// SPDX-License-Identifier: Apache-2.0
/// The verdict on a run: is every rank there, is every tensor there, and what does each say.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <tuple>

#include "core/base/error.h"
#include "harness/causes/diagnosis.h"
#include "harness/evidence/evidence.h"
#include "harness/judge/first_cause.h"
#include "harness/judge/judge.h"
#include "harness/judge/noted_taps.h"
#include "harness/judge/own_records.h"
#include "harness/judge/records/presence.h"
#include "harness/judge/rules/conclusions.h"
#include "harness/judge/rules/no_evidence.h"
#include "harness/judge/rules/replayed_steps.h"
#include "harness/judge/rules/witnesses.h"
#include "harness/judge/steps/nonfinite.h"
#include "harness/judge/steps/skipped_steps.h"
#include "harness/judge/steps/unseen_errors.h"
#include "harness/trace/collective_calls.h"
#include "harness/trace/numbers.h"
#include "harness/trace/run_view.h"
#include "harness/trace/stage.h"
#include "harness/trace/wanted_record.h"
#include "harness/verdict/judged_share.h"
#include "harness/verdict/neighbours.h"
#include "harness/verdict/parts/dtypes.h"
#include "harness/verdict/parts/summed.h"
#include "harness/verdict/pooled.h"
#include "harness/verdict/tensor_judge.h"
#include "harness/verdict/verdict.h"
#include "harness/verdict/would_miss.h"

namespace isoshard {
namespace {

using detail::Counted;
using detail::Held;
using detail::OrderedFinding;
using detail::TensorResult;

class Judge {
 public:
  Judge(const Reference& reference, const Trace& actual, const JudgePolicy& options)
      : reference_(reference),
        actual_(actual),
        options_(options),
        optional_(reference, actual, options),
        nonfinite_(reference, options) {
    verdict_.subject = actual.subject;
    verdict_.case_slug = actual.case_slug;
    verdict_.mesh = actual.mesh;
  }

  Verdict run() {
    for (const detail::Admission& admission : detail::admissions()) {
      if (Rule rule = admission.broken(reference_, actual_); !rule.empty()) {
        end(admission.status, std::move(rule));
        return std::move(verdict_);
      }
    }
    held_ = detail::held_by_ranks(actual_);
    find_parting();
    for (const Record& wanted : reference_.trace().ranks[0].records) {
      if (is_own_repetition(wanted.key) || role_of(wanted.key) == NameRole::kCollectives) continue;
      if (optional_.may_be_left_out(wanted.key) && !held_.contains(wanted.key)) {
        verdict_.not_recorded.push_back(describe(wanted.key));
        if (role_of(wanted.key) == NameRole::kMicroBatch && optional_.has_between_micro_batches())
          left_out_.add(wanted.key);
      } else {
        judge_one(wanted);
      }
    }
    for (const auto& [key, held] : held_) {
      if (is_own_repetition(key) || role_of(key) == NameRole::kCollectives) continue;
      if (parting_.has_value() && follows_parting(key, *parting_)) continue;
      if (role_of(key) == NameRole::kRecomputed) judge_recomputed(key);
      if (reference_.find(key) != nullptr) continue;
      if (const auto wanted = wanted_of(reference_, key, options_); wanted.has_value()) {
        judge_or_tell(*wanted, held);
      } else if (!is_clipped_by_no_number(key) && !optional_.may_be_added(key)) {
        add_coverage_finding(key, held.front().record->order, FindingId::kExtra,
                             {held.front().rank->rank}, verdict_.extra);
      }
    }
    require_optional();
    judge_infinities();
    judge_own();
    sort_findings();
    note_taps();
    verdict_.weak = std::count_if(verdict_.tensors.begin(), verdict_.tensors.end(),
                                  [](const auto& t) { return !t.weakness.empty(); });
    verdict_.judged = judged_share_of(verdict_.tensors);
    verdict_.published =
        published_bounds(verdict_.tensors, options_.coarsest, [this](const RecordKey& key) {
          const Response* const response = reference_.response(key);
          return response == nullptr ? 0 : response->relative_error;
        });
    replay();
    check_published();
    check_pools();
    if (num_other_dtypes_ > 0)
      verdict_.notes.push_back(
          fmt::format("{} of {} tensors have another dtype than in the reference, first {}",
                      num_other_dtypes_, verdict_.tensors.size(), first_other_dtype_));
    if (excused_.number > 0)
      verdict_.notes.push_back(
          detail::note_on_skipped(verdict_.compared, excused_.number, excused_.first));
    sort_findings();
    const detail::Causes causes = detail::diagnose_findings(findings_, run_);
    for (OrderedFinding& ordered : findings_)
      verdict_.findings.push_back(std::move(ordered.finding));
    detail::summarise_first(verdict_, causes);
    detail::stop_at_wrong_data(verdict_);
    verdict_.witnesses = detail::witnesses_of(actual_, held_, options_.may_be_unused);
    conclude();
    tell_left_out();
    verdict_.zero_tensors = detail::zero_tensors(verdict_.tensors);
    verdict_.constant_parameters = detail::constant_parameters(reference_);
    tell_missed();
    add_evidence();
    return std::move(verdict_);
  }

 private:
  /// Where the reference's own norm is not finite, nothing says what clipping must give.
  bool is_clipped_by_no_number(const RecordKey& key) const {
    if (role_of(key) != NameRole::kClipped || reference_.find(base_of(key)) == nullptr)
      return false;
    return !std::isfinite(RunView(reference_).grad_norm(key.step).value_or(0));
  }

  void add_coverage_finding(const RecordKey& key, std::int64_t order, FindingId id,
                            std::vector<int> ranks, std::vector<std::string>& list) {
    list.push_back(describe(key));
    Finding finding = make_finding(
        key, id, {NamedValue::words("absent", fmt::format("{}", fmt::join(ranks, ", ")))});
    finding.ranks = std::move(ranks);
    finding.confirmed = true;
    findings_.push_back({order, std::move(finding)});
  }

  /// A mask that backward drew again must be the one that forward had.
  void judge_recomputed(const RecordKey& key) {
    const Record* first = reference_.find(key);
    if (first == nullptr) return;
    Record wanted = *first;
    wanted.key = key;
    judge_one(wanted);
  }

  void judge_one(const Record& wanted) { judge_one(wanted, wanted.key); }

  /// Summands of which the reference does not say what they add up to are no findings.
  void judge_or_tell(const WantedRecord& wanted, const std::vector<Held>& held) {
    const RecordKey& key = wanted.record.key;
    const bool is_summand =
        key.kind == RecordKind::kActivation && role_of(key) == NameRole::kSummand;
    if (is_summand &&
        (!is_partial(held.front().record->layout) || !detail::has_known_sum(reference_, key))) {
      summands_.add(key);
      return;
    }
    judge_one(wanted.record, wanted.response_of);
  }

  /// What the run lacks of records that it need not have, but has in part.
  void require_optional() {
    for (const RecordKey& key : optional_.missing()) {
      if (parting_.has_value() && follows_parting(key, *parting_)) continue;
      const std::int64_t order = wanted_of(reference_, key, options_)->record.order;
      add_coverage_finding(key, order, FindingId::kMissingBesideLikes,
                           detail::ranks_near(actual_, key), verdict_.missing);
    }
  }

  void tell_missed() {
    std::vector<std::string> missed;
    const auto add = [&missed](std::string words) {
      if (!words.empty()) missed.push_back(std::move(words));
    };
    add(would_miss(verdict_, options_));
    if (verdict_.compared > 0) add(unseen_.words(verdict_.judged));
    if (verdict_.compared > 0 && !detail::reads_updated_weights(reference_))
      add("what a forward pass makes of updated weights, as none was recorded after a step");
    for (const AxisWitness& witness : verdict_.witnesses) {
      if (witness.alike.has_value() && !witness.is_demanded)
        add(fmt::format("equal work of the ranks along {}, as nothing recorded shows their samples",
                        name_of(witness.axis)));
    }
    verdict_.would_miss = fmt::format("{}", fmt::join(missed, "; "));
  }

  /// A verdict says what it would have missed.
  void tell_left_out() {
    if (verdict_.status != Status::kConforms) return;
    if (left_out_.number > 0)
      verdict_.reason += "; " + left_out_.words("gradient", "between micro-batches ", "recorded");
    if (summands_.number > 0)
      verdict_.reason += "; " + summands_.words("summand", "whose sum is not known ", "judged");
    if (sums_ > 0)
      verdict_.reason +=
          fmt::format("; {} sums of summands only as near as their order allows", sums_);
    if (const std::string words = detail::words_of_no_step(reference_); !words.empty())
      verdict_.reason += "; " + words;
  }

  /// What the run says of itself alone.
  void judge_own() {
    OwnRecords own = judge_own_records(actual_, options_);
    verdict_.collectives = std::move(own.collectives);
    constexpr std::int64_t kBehindOthers = std::int64_t{1} << 48;
    for (Finding& finding : own.findings) {
      const auto found = held_.find(finding.key);
      const std::int64_t order = found == held_.end() ? 0 : found->second.front().record->order;
      findings_.push_back({kBehindOthers + order, std::move(finding)});
    }
  }

  /// A run that overflows in another step than the reference is another training from there on.
  void find_parting() {
    const std::optional<int> step = reference_.parting_step(actual_);
    const bool is_within_tolerance = options_.level == Level::kPerturbed;
    if (is_within_tolerance && step.has_value() && reference_.may_part(actual_, *step))
      parting_ = step;
  }

  /// Of a parameter after a step, what ranks held before it; null for others.
  const std::vector<Held>* before_step_of(const RecordKey& key) const {
    if (stepped_parameter(key).empty()) return nullptr;
    const auto found = held_.find(before_step(key));
    return found == held_.end() ? nullptr : &found->second;
  }

  void judge_one(const Record& wanted, const RecordKey& response_of) {
    if (parting_.has_value() && follows_parting(wanted.key, *parting_)) {
      ++verdict_.skipped;
      return;
    }
    const auto found = held_.find(wanted.key);
    if (found == held_.end()) {
      if (matches_any(options_.not_recorded, wanted.key) ||
          options_.left_out.contains(wanted.key)) {
        verdict_.not_recorded.push_back(describe(wanted.key));
        return;
      }
      add_coverage_finding(wanted.key, wanted.order, FindingId::kMissing,
                           detail::ranks_near(actual_, wanted.key), verdict_.missing);
      Finding& missing = findings_.back().finding;
      missing.cause = detail::cause_of_missing(reference_, actual_, wanted.key);
      missing.diagnosis = missing.cause.text;
      return;
    }
    const std::vector<Held>& held = found->second;
    const std::vector<int> absent = detail::absent_ranks(actual_, held);
    if (!absent.empty() && !optional_.may_be_left_out(wanted.key)) {
      add_coverage_finding(wanted.key, wanted.order, FindingId::kMissingOnRanks, absent,
                           verdict_.missing);
    }
    TensorResult result = detail::judge_tensor(reference_, wanted, actual_, held, options_,
                                               response_of, before_step_of(wanted.key));
    const Stats& stats = result.comparison.stats;
    if (is_of_skipped_step(wanted.key) && has_nonfinite(stats)) {
      result.not_judged = {};
      if (options_.level != Level::kExact) {
        excuse(wanted, held, std::move(result));
        return;
      }
    }
    // Inputs and masks may hide by infinities, and are compared bit by bit.
    const bool may_hold_anything =
        wanted.key.kind == RecordKind::kMask || wanted.key.kind == RecordKind::kDataId;
    if (result.not_judged.empty() && !may_hold_anything && !is_of_skipped_step(wanted.key) &&
        stats.nan_reference + stats.inf_reference > 0) {
      Rule rule = said(RuleId::kReferenceNotFinite, {{"nans", stats.nan_reference},
                                                     {"infinities", stats.inf_reference},
                                                     {"elements", stats.numel},
                                                     {"tensor", describe(wanted.key)}});
      const bool may_be_mask = wanted.key.kind == RecordKind::kActivation &&
                               stats.nan_reference == 0 && stats.nonfinite_mismatch == 0;
      if (may_be_mask)
        infinities_.emplace(wanted.key.step, std::move(rule));
      else
        result.not_judged = std::move(rule);
    }
    note_dtype(wanted, held);
    if (!result.not_judged.empty() && not_judged_.empty()) not_judged_ = result.not_judged;
    if (!result.findings.empty()) {
      const auto shared = std::make_shared<const TensorResult>(result);
      for (Finding& finding : result.findings)
        findings_.push_back({wanted.order, std::move(finding), shared});
    }
    unseen_.add(wanted.key, result.hides_step, is_partial(held.front().record->layout));
    if (result.comparison.level == Level::kBounded) ++sums_;
    if (wanted.key.kind == RecordKind::kScalar) add_values(result.comparison, wanted);
    if (stats.numel > 0 && result.not_judged.empty()) ++verdict_.compared;
    verdict_.tensors.push_back(std::move(result.comparison));
  }

  /// What stands for a record that the reference has not has no dtype of its own.
  void note_dtype(const Record& wanted, const std::vector<Held>& held) {
    if (reference_.find(wanted.key) == nullptr) return;
    const Held* const other = detail::with_other_dtype(held, wanted.dtype);
    if (other == nullptr || num_other_dtypes_++ > 0) return;
    first_other_dtype_ =
        fmt::format("{}: {} on rank {}, {} in the reference", describe(wanted.key),
                    name_of(other->record->dtype), other->rank->rank, name_of(wanted.dtype));
  }

  /// Where the reference overflows another run may not, and the other way round; nothing is done
  /// with either. But all of the run's copies are of one tensor, whatever its numbers are.
  void excuse(const Record& wanted, const std::vector<Held>& held, TensorResult result) {
    ++verdict_.skipped;
    excused_.add(wanted.key);
    std::vector<Finding> findings = std::move(result.findings);
    std::erase_if(findings, [](const Finding& finding) { return !detail::is_of_form(finding); });
    if (auto finding = detail::differing_copies(wanted.key, actual_, held); finding.has_value())
      findings.push_back(std::move(*finding));
    if (wanted.key.step != parting_) {
      NamedValues problem = nonfinite_.problem_of(wanted, held, result.comparison.stats);
      if (!problem.empty())
        findings.push_back(detail::far_from_overflow(wanted.key, held, std::move(problem)));
    }
    for (Finding& finding : findings) findings_.push_back({wanted.order, std::move(finding)});
  }

  /// Infinities that both sides have hide scores of attention if the gradients of their step are
  /// finite. If none was compared, or one is not finite, nothing behind them was judged.
  void judge_infinities() {
    if (!not_judged_.empty()) return;
    for (const auto& [step, rule] : infinities_) {
      bool any = false, finite = true;
      for (const TensorComparison& t : verdict_.tensors) {
        if (t.key.step != step || t.stage != Stage::kParameterGrad) continue;
        any = true;
        finite = finite && t.stats.nan_reference + t.stats.inf_reference == 0;
      }
      if (any && finite) continue;
      not_judged_ = rule;
      return;
    }
  }

  /// Gradients, and their norm, of a step that the reference skipped because they were not finite.
  bool is_of_skipped_step(const RecordKey& key) const {
    const bool is_gradient =
        key.kind == RecordKind::kActivationGrad || key.kind == RecordKind::kGrad;
    if (!is_gradient && role_of(key) != NameRole::kGradNorm) return false;
    return key.step == parting_ || RunView(reference_).is_skipped(key.step);
  }

  static bool has_nonfinite(const Stats& stats) {
    return stats.nan_reference + stats.inf_reference + stats.nan_actual + stats.inf_actual > 0;
  }

  void add_values(TensorComparison& comparison, const Record& wanted) const {
    const std::int64_t numel = numel_of(wanted.layout.global_shape);
    if (numel > 64) return;
    for (std::int64_t i = 0; i < numel; ++i)
      comparison.reference_values.push_back(value_at(reference_.bytes(wanted), wanted.dtype, i) /
                                            wanted.grad_scale);
    try {
      std::vector<double> actual = numbers_of(actual_.assemble(wanted.key, wanted.grad_scale));
      for (double& number : actual) number /= wanted.grad_scale;
      if (static_cast<std::int64_t>(actual.size()) != numel) return;
      comparison.actual_values = std::move(actual);
    } catch (const Error&) {
      // Not kept, or its parts do not tile: there are no numbers to show, and the findings say why.
    }
  }

  /// What differs in a foreign run's activation gradients alone may say where they were recorded.
  void note_taps() {
    if (!options_.taps_may_differ || !not_judged_.empty()) return;
    std::vector<const Finding*> findings;
    for (const OrderedFinding& ordered : findings_) findings.push_back(&ordered.finding);
    std::string note = detail::note_on_taps(reference_, actual_.mesh, verdict_.tensors, findings);
    if (note.empty()) return;
    verdict_.notes.push_back(std::move(note));
    findings_.clear();
  }

  /// A tensor that is outside of its tolerance needs no second finding.
  void replay() {
    if (options_.level != Level::kPerturbed) return;
    for (OrderedFinding& replayed : detail::replay_steps(run_)) {
      const bool is_known = std::ranges::any_of(findings_, [&](const OrderedFinding& known) {
        return known.finding.key == replayed.finding.key;
      });
      if (!is_known) findings_.push_back(std::move(replayed));
    }
  }

  /// A published bound is looser than any tolerance of a training that does not blow up: where it
  /// alone is broken, the tolerance was too wide.
  void check_published() {
    if (!findings_.empty()) return;
    for (const PublishedBound& bound : verdict_.published) {
      if (bound.holds) continue;
      findings_.push_back({0, make_finding(bound.key, FindingId::kOutsidePublishedBound, {},
                                           {{"bound", bound.what},
                                            {"measured", bound.measured},
                                            {"published", bound.limit}})});
    }
  }

  /// Where a tensor alone is outside, pools show the same once more.
  void check_pools() {
    const std::vector<PooledComparison> pools =
        pooled_comparisons(reference_, verdict_.tensors, actual_, options_);
    verdict_.pools.assign(pools.begin(), pools.end());
    if (!findings_.empty()) return;
    for (Finding& finding : pooled_findings(pools, reference_)) {
      const std::int64_t order = reference_.find(finding.key)->order;
      findings_.push_back({order, std::move(finding)});
    }
  }

  void sort_findings() {
    std::stable_sort(findings_.begin(), findings_.end(),
                     [](const OrderedFinding& a, const OrderedFinding& b) {
                       return std::tuple(a.finding.key.step, a.finding.stage, a.order) <
                              std::tuple(b.finding.key.step, b.finding.stage, b.order);
                     });
  }

  void conclude() {
    if (!verdict_.findings.empty()) {
      verdict_.status = Status::kDiverges;
      verdict_.reason = words_of_first(verdict_.findings.front(), actual_.mesh);
      return;
    }
    detail::Conclusion conclusion = detail::conclusion_of({run_, verdict_, not_judged_, parting_});
    if (!conclusion.rule.empty()) {
      verdict_.parted = conclusion.rule.id == RuleId::kOverflowParts;
      verdict_.shows_too_little = conclusion.shows_too_little;
      return end(Status::kVacuous, std::move(conclusion.rule));
    }
    verdict_.status = Status::kConforms;
    verdict_.strength =
        options_.level == Level::kExact ? Strength::kExact : Strength::kWithinTolerance;
    if (options_.level == Level::kExact) {
      verdict_.reason =
          fmt::format("{} tensors compared with no tolerance, all equal", verdict_.compared);
      return;
    }
    double worst = 0;
    for (const TensorComparison& t : verdict_.tensors) {
      if (t.within && t.level != Level::kExact && !t.insensitive && t.allowed_relative_error > 0)
        worst = std::max(worst, t.stats.relative_error() / t.allowed_relative_error);
    }
    verdict_.reason =
        fmt::format("{} tensors compared, the largest error is {:.2g} of what is allowed",
                    verdict_.compared, worst);
    if (const std::string judged = judged_words(verdict_.judged); !judged.empty())
      verdict_.reason += "; parameters after the step: " + judged;
  }

  void end(Status status, Rule rule) {
    verdict_.status = status;
    verdict_.reason = rule.text;
    verdict_.rule = std::move(rule);
  }

  void add_evidence() {
    constexpr std::ptrdiff_t kEachSide = 4;
    std::vector<RecordKey> around;
    std::optional<RecordKey> first;
    if (!verdict_.findings.empty()) {
      first = verdict_.findings.front().key;
      const auto found = std::ranges::find(verdict_.tensors, *first, &TensorComparison::key);
      for (auto near = found; near != verdict_.tensors.end() && near - found <= kEachSide; ++near)
        around.push_back(near->key);
      for (auto near = found; found != verdict_.tensors.end() && near != verdict_.tensors.begin() &&
                              found - near < kEachSide;) {
        around.insert(around.begin(), (--near)->key);
      }
    }
    verdict_.evidence = evidence_of(reference_, actual_, around, first);
  }

  const Reference& reference_;
  const Trace& actual_;
  const JudgePolicy& options_;
  Verdict verdict_;
  std::map<RecordKey, std::vector<Held>> held_;
  const detail::JudgedRun run_{reference_, actual_, held_, verdict_.tensors, options_};
  std::vector<OrderedFinding> findings_;
  Rule not_judged_;
  std::map<int, Rule> infinities_;  ///< by step, of the first activation that has some
  detail::OptionalRecords optional_;
  detail::NonfiniteGradients nonfinite_;
  detail::UnseenErrors unseen_;
  Counted excused_;   ///< gradients of skipped steps
  Counted left_out_;  ///< gradients between micro-batches, beside others that were recorded
  Counted summands_;  ///< of which nothing says what they add up to
  std::int64_t num_other_dtypes_ = 0;  ///< tensors with another dtype than the reference's
  std::string first_other_dtype_;      ///< the first of them, and both dtypes
  std::int64_t sums_ = 0;              ///< of summands, where everything else must be equal
  std::optional<int> parting_;         ///< the step in which the run becomes another training
};

}  // namespace

Verdict judge(const Reference& reference, const Trace& actual, const JudgePolicy& options) {
  return Judge(reference, actual, options).run();
}

}  // namespace isoshard
