// SPDX-License-Identifier: Apache-2.0
/// One tensor: structure first (shapes, declared scale, tiling), then copies, then errors against
/// the tolerance.
#include "harness/verdict/tensor_judge.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <tuple>

#include "core/base/error.h"
#include "harness/ids/phrase.h"
#include "harness/stats/tolerance.h"
#include "harness/trace/numbers.h"
#include "harness/trace/parts.h"
#include "harness/trace/run_view.h"
#include "harness/verdict/broken_steps.h"
#include "harness/verdict/parts/dtypes.h"
#include "harness/verdict/parts/first_bad_element.h"
#include "harness/verdict/parts/summed.h"
#include "harness/verdict/tensor_tolerance.h"

namespace isoshard::detail {
namespace {

struct Copy {
  Held held;
  const PartStats* part;
};
using Place = std::tuple<Shape, Shape, std::int64_t, std::int64_t>;

/// Frobenius norm of the ranks' errors, of the worst copy of each part.
double error_of(const std::vector<Held>& held) {
  std::map<Place, double> squares;
  for (const Held& h : held) {
    for (const PartStats& part : h.record->parts) {
      double& worst = squares[{part.box.global_offset, part.box.size, part.range.global_begin,
                               part.range.count}];
      worst = std::max(worst, part.stats.sum_sq_diff);
    }
  }
  double sum = 0;
  for (const auto& [place, square] : squares) sum += square;
  return std::sqrt(sum);
}

/// Of floating dtypes by their roundings: fp16 and bf16 are of one size.
bool is_coarser(Dtype dtype, Dtype than) {
  if (!is_floating(dtype) || !is_floating(than)) return size_of(dtype) < size_of(than);
  return unit_roundoff(dtype) > unit_roundoff(than);
}

class TensorJudge {
 public:
  TensorJudge(const Reference& reference, const Record& reference_record, const Trace& actual,
              const std::vector<Held>& held, const JudgePolicy& options,
              const RecordKey& response_of, const std::vector<Held>* before)
      : reference_(reference),
        wanted_(reference_record),
        actual_(actual),
        held_(held),
        options_(options),
        response_of_(response_of),
        before_(before) {
    TensorComparison& c = result_.comparison;
    c.key = wanted_.key;
    c.stage = stage_of(wanted_.key);
    c.ranks = static_cast<int>(held.size());
  }

  TensorResult run() {
    if (!structure_fits()) {
      result_.comparison.within = false;
      return std::move(result_);
    }
    const bool is_mixed = !has_one_dtype();
    if (is_partial(held_.front().record->layout)) {
      if (is_mixed) return std::move(result_);
      assemble_partial();
      check_copies_of_summands();
    } else {
      collect_places();
      check_tiling();
      // other dtypes have other bits, whatever the values are
      if (!is_mixed) check_copies();
    }
    if (result_.not_judged.empty()) judge_error();
    return std::move(result_);
  }

 private:
  void add_finding(FindingId id, NamedValues values, NamedValues measured, std::vector<int> ranks,
                   Stage stage, bool confirmed) {
    Finding finding = make_finding(wanted_.key, id, std::move(values), std::move(measured));
    finding.stage = stage;
    finding.ranks = std::move(ranks);
    finding.confirmed = confirmed;
    result_.findings.push_back(std::move(finding));
  }

  /// Adds a finding about what the rank's record declares. Always returns false.
  bool refuse_form(FindingId id, int rank, NamedValues measured) {
    measured.emplace_back("rank", rank);
    add_finding(id, {}, std::move(measured), {rank}, result_.comparison.stage, true);
    return false;
  }

  bool structure_fits() {
    for (const Held& h : held_) {
      const Record& record = *h.record;
      const int rank = h.rank->rank;
      if (record.layout.global_shape != wanted_.layout.global_shape)
        return refuse_form(
            FindingId::kOtherShape, rank,
            {{"reference", wanted_.layout.global_shape}, {"actual", record.layout.global_shape}});
      if (record.layout.placements != held_.front().record->layout.placements)
        return refuse_form(FindingId::kLayoutsDiffer, rank,
                           {{"first_layout", describe(held_.front().record->layout)},
                            {"first_rank", held_.front().rank->rank},
                            {"layout", describe(record.layout)}});
      if (record.key.kind == RecordKind::kOptimizer && is_coarser(record.dtype, wanted_.dtype))
        return refuse_form(
            FindingId::kCoarserDtype, rank,
            {{"declared", name_of(wanted_.dtype)}, {"actual", name_of(record.dtype)}});
      const std::optional<double> scale = demanded_scale();
      if (scale.has_value() && record.grad_scale != *scale)
        return refuse_form(FindingId::kOtherGradientScale, rank,
                           {{"declared", record.grad_scale}, {"demanded", *scale}});
      if (is_partial(record.layout) && !may_be_partial(record))
        return refuse_form(FindingId::kUnexpectedPartialSum, rank,
                           {{"layout", describe(record.layout)}});
    }
    return true;
  }

  /// Ranks that hold one tensor must hold it in one dtype: what one of them rounds, the others
  /// must round, too.
  bool has_one_dtype() {
    const std::optional<MixedDtypes> mixed = mixed_dtypes(held_, wanted_.dtype);
    if (!mixed.has_value()) return true;
    add_finding(FindingId::kDtypesOfRanksDiffer, {},
                {{"usual", name_of(mixed->usual)},
                 {"odd_ranks", mixed->odd_ranks()},
                 {"reference", name_of(wanted_.dtype)},
                 NamedValue::words("dtypes", mixed->words())},
                mixed->odd_ranks(), result_.comparison.stage, true);
    result_.comparison.within = false;
    return false;
  }

  /// What a run's record of this tensor must declare as its gradient scale; none: what it likes.
  std::optional<double> demanded_scale() const {
    if (wanted_.key.kind == RecordKind::kActivationGrad) {
      if (!options_.activation_grad_scale.has_value()) return std::nullopt;
      return *options_.activation_grad_scale * loss_scale();
    }
    if (wanted_.key.kind == RecordKind::kGrad) {
      if (!is_between_micro_batches() || !options_.grad_scale.has_value())
        return options_.grad_scale;
      return *options_.grad_scale * loss_scale();  // which is divided out at the end
    }
    if (is_backward_value(wanted_.key)) return loss_scale();
    return 1;
  }

  /// What backward starts from: each dp rank has its part of the mean, times the loss scale.
  static bool is_backward_value(const RecordKey& key) {
    return role_of(key) == NameRole::kLossBackward;
  }

  bool is_between_micro_batches() const { return role_of(wanted_.key) == NameRole::kMicroBatch; }

  /// Whatever is final, and whatever nobody trusted says so of, is no sum that is still to be made.
  bool may_be_partial(const Record& record) const {
    const RecordKey& key = wanted_.key;
    if (is_backward_value(key)) {
      return std::ranges::all_of(record.layout.placements, [](const Placement& placement) {
        return placement.kind != Placement::Kind::kPartial ||
               ((placement.axis == Axis::kDp || placement.axis == Axis::kCp) &&
                placement.reduction == Reduction::kAvg);
      });
    }
    if (is_maximum(record.layout))
      return may_be_maximum(options_.partial.value_or(std::vector<std::string>()), key);
    if (key.kind == RecordKind::kActivation && role_of(key) == NameRole::kSummand) return true;
    if (is_between_micro_batches()) return true;
    if (options_.partial.has_value()) return matches_any(*options_.partial, key);
    return key.kind == RecordKind::kActivation || key.kind == RecordKind::kActivationGrad;
  }

  /// Of the tensor's step; 1 if there is none.
  double loss_scale() const { return RunView(reference_).loss_scale(wanted_.key.step).value_or(1); }

  void assemble_partial() {
    TensorComparison& c = result_.comparison;
    c.sharded = true;
    try {
      // in units of the reference's: what ranks declare is divided out
      const auto [whole, order_error] = summed(reference_, wanted_, actual_, held_);
      order_error_ = order_error;
      accumulate(c.stats, reference_.bytes(wanted_), wanted_.dtype, whole.bytes.data(), whole.dtype,
                 whole.numel(), 0);
    } catch (const VacuousError& error) {
      const Rule* const rule = rule_of(error);
      result_.not_judged = rule == nullptr ? said(RuleId::kNotJudgeable,
                                                  {NamedValue::words("problem", error.what())})
                                           : *rule;
    } catch (const MeshError& error) {
      c.within = false;
      add_finding(FindingId::kPartsDoNotTile, {}, {NamedValue::words("problem", error.what())}, {},
                  c.stage, true);
    }
  }

  /// Ranks that add the same summand hold copies of it, of which only one is added.
  void check_copies_of_summands() {
    std::map<std::pair<std::vector<int>, Place>, const Copy> first;
    for (const Held& h : held_) {
      const auto summand = summand_of(h.record->layout, actual_.mesh, h.rank->rank);
      for (const PartStats& part : h.record->parts) {
        const Place place{part.box.global_offset, part.box.size, part.range.global_begin,
                          part.range.count};
        const auto [known, is_first] = first.insert({{summand, place}, Copy{h, &part}});
        if (is_first || known->second.part->digest == part.digest) continue;
        result_.comparison.within = false;
        const int other = known->second.held.rank->rank;
        add_finding(FindingId::kSummandCopiesDiffer, {},
                    {{"first_rank", other}, {"second_rank", h.rank->rank}}, {h.rank->rank},
                    result_.comparison.stage, false);
        return;
      }
    }
  }

  void collect_places() {
    for (const Held& h : held_) {
      if (h.record->local_shape != wanted_.layout.global_shape) result_.comparison.sharded = true;
      const bool flat = is_flat(h.record->layout);
      any_flat_ = any_flat_ || flat;
      for (const PartStats& part : h.record->parts) {
        if (numel_of(part, flat) == 0) continue;
        places_[{part.box.global_offset, part.box.size, part.range.global_begin, part.range.count}]
            .push_back({h, &part});
      }
    }
  }

  void check_tiling() {
    std::vector<Box> boxes;
    std::vector<FlatRange> ranges;
    for (const auto& [place, copies] : places_) {
      boxes.push_back(copies.front().part->box);
      ranges.push_back(copies.front().part->range);
    }
    const Shape& shape = wanted_.layout.global_shape;
    std::string problem;
    try {
      problem = any_flat_ ? tiling_problem(shape, ranges) : tiling_problem(shape, boxes);
    } catch (const MeshError& error) {
      problem = error.what();
    }
    if (problem.empty()) return;
    result_.comparison.within = false;
    add_finding(FindingId::kPartsDoNotTile, {}, {NamedValue::words("problem", problem)}, {},
                result_.comparison.stage, true);
  }

  /// Copies with different bits that all equal the reference in value differ in signed zeros only.
  static bool only_zeros_differ(const std::vector<Copy>& copies) {
    return std::all_of(copies.begin(), copies.end(), [](const Copy& c) {
      return c.part->stats.numel > 0 && c.part->stats.unequal_values == 0;
    });
  }

  void check_copies() {
    std::set<Axis> axes;
    std::set<int> odd;
    std::size_t most_copies = 0;
    for (auto& [place, copies] : places_) {
      std::map<std::uint64_t, int> votes;
      for (const Copy& copy : copies) ++votes[copy.part->digest];
      if (votes.size() == 1 || only_zeros_differ(copies)) continue;
      most_copies = std::max(most_copies, votes.size());
      // The value that most copies have is taken as right; of several, the nearest to the
      // reference.
      const Copy& usual = *std::ranges::max_element(copies, {}, [&](const Copy& copy) {
        const Stats& s = copy.part->stats;
        return std::tuple(votes[copy.part->digest], -static_cast<double>(s.nonfinite_mismatch),
                          -s.sum_sq_diff);
      });
      for (const Copy& copy : copies) {
        if (copy.part->digest != usual.part->digest) odd.insert(copy.held.rank->rank);
        for (const Copy& other : copies) collect_axis(copy, other, axes);
      }
    }
    if (odd.empty()) return;
    result_.differing_axes.assign(axes.begin(), axes.end());
    num_copies_ = most_copies;
    odd_ranks_.assign(odd.begin(), odd.end());
  }

  void collect_axis(const Copy& a, const Copy& b, std::set<Axis>& axes) const {
    if (a.part->digest == b.part->digest) return;
    std::vector<Axis> apart;
    for (const AxisDegree& axis : actual_.mesh.axes()) {
      if (actual_.mesh.coordinate(a.held.rank->rank, axis.axis) !=
          actual_.mesh.coordinate(b.held.rank->rank, axis.axis))
        apart.push_back(axis.axis);
    }
    if (apart.size() == 1) axes.insert(apart.front());
  }

  /// The copy farthest from the reference.
  static const Copy& worst_of(const std::vector<Copy>& copies) {
    return *std::max_element(copies.begin(), copies.end(), [](const Copy& a, const Copy& b) {
      return std::tuple(a.part->stats.nonfinite_mismatch, a.part->stats.sum_sq_diff) <
             std::tuple(b.part->stats.nonfinite_mismatch, b.part->stats.sum_sq_diff);
    });
  }

  void judge_error() {
    TensorComparison& c = result_.comparison;
    std::int64_t unmasked = -1;
    for (const auto& [place, copies] : places_) {
      const Copy& worst = worst_of(copies);
      merge(c.stats, worst.part->stats);
      if (worst.held.record->unmasked >= 0) {
        unmasked =
            std::max<std::int64_t>(unmasked, 0) + worst.part->stats.numel + worst.part->untouched;
      }
    }
    c.elements = numel_of(wanted_.layout.global_shape);
    if (unmasked >= 0 && c.elements > 0)
      c.unmasked_share = static_cast<double>(unmasked) / static_cast<double>(c.elements);
    const std::optional<BrokenSteps> broken = broken_steps(reference_, wanted_, held_, options_);
    if (broken.has_value() && !broken->of_rows) report_broken_steps(c, *broken);
    if (!set_tolerance(c)) return;
    const bool within = within_tolerance(c, c.stats, 1);
    if (!within) {
      c.within = false;
      report_error(c);  // where the whole is outside, rows show the same once more
    } else if (broken.has_value() && broken->of_rows) {
      report_broken_steps(c, *broken);
    } else if (!odd_ranks_.empty()) {
      c.within = false;
      const Stage stage = c.stage == Stage::kParameterAfterStep ? Stage::kReplicaDrift : c.stage;
      add_finding(FindingId::kCopiesDiffer, over_axes(),
                  {{"values", num_copies_}, {"odd_ranks", odd_ranks_}}, odd_ranks_, stage, false);
    }
  }

  /// Of every copy, not of the worst alone: a mask leaves these elements out of what makes one
  /// worst.
  void report_broken_steps(TensorComparison& c, const BrokenSteps& broken) {
    c.within = false;
    add_finding(broken.problem, {}, broken.measured, broken.ranks, c.stage, broken.confirmed);
  }

  NamedValues over_axes() const {
    if (result_.differing_axes.empty()) return {};
    const NamedValue axes("axes", names_of(result_.differing_axes));
    return {axes, NamedValue::words("over", phrase(PhraseId::kOverAxes, {axes}))};
  }

  bool set_tolerance(TensorComparison& c) {
    const bool is_masked = std::any_of(held_.begin(), held_.end(),
                                       [](const Held& h) { return h.record->unmasked >= 0; });
    auto [not_judged, hides_step] = detail::set_tolerance(
        c, {reference_, wanted_, response_of_, options_, *held_.front().record, is_masked,
            order_error_,
            before_ == nullptr ? std::numeric_limits<double>::infinity() : error_of(*before_)});
    result_.not_judged = std::move(not_judged);
    result_.hides_step = hides_step;
    return result_.not_judged.empty();
  }

  std::vector<int> exceeding_ranks(const TensorComparison& c) const {
    std::set<int> ranks;
    const double share = places_.empty() ? 1 : 1 / static_cast<double>(places_.size());
    for (const auto& [place, copies] : places_) {
      for (const Copy& copy : copies) {
        if (!within_tolerance(c, copy.part->stats, share)) ranks.insert(copy.held.rank->rank);
      }
    }
    if (ranks.empty()) {
      for (const Held& h : held_) ranks.insert(h.rank->rank);
    }
    return {ranks.begin(), ranks.end()};
  }

  void report_error(TensorComparison& c) {
    std::vector<int> ranks = exceeding_ranks(c);
    const Held* first = nullptr;
    for (const Held& h : held_) {
      if (h.rank->rank == ranks.front()) first = &h;
    }
    const bool confirmed = first != nullptr && is_confirmed(*first);
    const bool drift = c.stage == Stage::kParameterAfterStep && !odd_ranks_.empty();
    const FindingId id =
        odd_ranks_.empty() ? FindingId::kDiffers : FindingId::kCopiesDifferFromReference;
    add_finding(id, odd_ranks_.empty() ? NamedValues() : over_axes(), evidence(c, first),
                std::move(ranks), drift ? Stage::kReplicaDrift : c.stage, confirmed);
  }

  NamedValues evidence(const TensorComparison& c, const Held* first) const {
    const Stats& s = c.stats;
    NamedValues measured = {{"relative_error", s.relative_error()},
                            {"max_abs", s.max_abs},
                            {"unequal", s.unequal_values},
                            {"elements", s.numel}};
    const auto add = [&](std::string_view name, PhraseId id, const NamedValues& values) {
      measured.insert(measured.end(), values.begin(), values.end());
      measured.push_back(NamedValue::words(name, phrase(id, measured)));
    };
    if (c.level == Level::kExact) {
      add("allowed", PhraseId::kMustBeEqual, {});
    } else if (c.insensitive) {
      add("allowed", PhraseId::kAllowedNorm,
          {{"error_norm", std::sqrt(s.sum_sq_diff)}, {"allowed_error_norm", c.allowed_absolute}});
    } else {
      add("allowed", PhraseId::kAllowedError,
          {{"allowed_relative_error", c.allowed_relative_error},
           {"scale", s.scale()},
           {"allowed_scale_error", c.allowed_scale_error}});
    }
    if (s.nonfinite_mismatch != 0)
      add("nonfinite", PhraseId::kNotFiniteOnOneSide,
          {{"not_finite", s.nonfinite_mismatch},
           {"nan_reference", s.nan_reference},
           {"inf_reference", s.inf_reference},
           {"nan_actual", s.nan_actual},
           {"inf_actual", s.inf_actual}});
    if (first != nullptr) add_first_bad_element(measured, reference_, wanted_, *first);
    return measured;
  }

  /// A comparer (harness/stats/comparer.h) may have added in another order.
  static bool is_same_sum(double a, double b) {
    constexpr double kOfOrder = 1e-12;
    return a == b || std::fabs(a - b) <= kOfOrder * std::fabs(b);
  }

  /// Repeats the rank's comparison on the kept bytes.
  bool is_confirmed(const Held& h) const {
    if (!h.record->kept || h.rank->arena == nullptr) return false;
    if (is_partial(h.record->layout)) return true;  // the controller made the comparison itself
    const HostTensor local = h.rank->tensor(*h.record);
    const bool flat = is_flat(h.record->layout);
    std::vector<std::byte> scratch;
    for (const PartStats& recorded : h.record->parts) {
      const std::int64_t numel = numel_of(recorded, flat);
      if (numel == 0) continue;
      PartStats repeated = recorded;
      const std::byte* bytes = packed(*h.record, recorded, local.bytes.data(), scratch);
      if (digest_of_part(bytes, h.record->dtype, numel) != recorded.digest) return false;
      if (h.record->unmasked >= 0) continue;  // the mask was the rank's own
      compare_part(repeated, *h.record, bytes, reference_.bytes(wanted_), wanted_.dtype,
                   wanted_.grad_scale, nullptr);
      if (repeated.stats.unequal_values != recorded.stats.unequal_values ||
          repeated.stats.nonfinite_mismatch != recorded.stats.nonfinite_mismatch ||
          !is_same_sum(repeated.stats.sum_sq_diff, recorded.stats.sum_sq_diff)) {
        return false;
      }
    }
    return true;
  }

  const Reference& reference_;
  const Record& wanted_;
  const Trace& actual_;
  const std::vector<Held>& held_;
  const JudgePolicy& options_;
  const RecordKey& response_of_;
  const std::vector<Held>* before_;
  TensorResult result_;
  std::map<Place, std::vector<Copy>> places_;
  bool any_flat_ = false;
  std::vector<int> odd_ranks_;
  std::size_t num_copies_ = 0;  ///< different ones of one part
  double order_error_ = 0;      ///< Summed::order_error
};

}  // namespace

std::vector<std::string_view> names_of(const std::vector<Axis>& axes) {
  std::vector<std::string_view> names;
  for (const Axis axis : axes) names.push_back(name_of(axis));
  return names;
}

TensorResult judge_tensor(const Reference& reference, const Record& reference_record,
                          const Trace& actual, const std::vector<Held>& held,
                          const JudgePolicy& options, const RecordKey& response_of,
                          const std::vector<Held>* before) {
  return TensorJudge(reference, reference_record, actual, held, options, response_of, before).run();
}

}  // namespace isoshard::detail
