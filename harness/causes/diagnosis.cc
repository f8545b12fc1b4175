// SPDX-License-Identifier: Apache-2.0
/// Patterns of divergence. Everything is compared in fp64 on the kept bytes of the ranks concerned.
#include "harness/causes/diagnosis.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <set>
#include <utility>

#include "harness/causes/evidence.h"
#include "harness/causes/run_causes.h"
#include "harness/trace/parts.h"

namespace isoshard::detail {
namespace {

constexpr std::int64_t kMaxShift = 64;

/// The patterns that need nothing but the tensor itself on all ranks.
class Diagnosis {
 public:
  explicit Diagnosis(Evidence evidence) : e_(std::move(evidence)) {}

  std::string run() {
    if (e_.result.findings.empty() || e_.bad_ranks().empty()) return "";
    const Stats& stats = e_.result.comparison.stats;
    if (stats.nonfinite_mismatch != 0)
      return fmt::format("{} values not finite", stats.nonfinite_mismatch);
    // what stands for a record that the reference has not: its values are nowhere
    if (e_.reference.find(e_.wanted.key) == nullptr) return scale();
    if (std::string text = not_updated(); !text.empty()) return text;
    for (const auto& pattern :
         {cause_in_loading, cause_in_progress, cause_in_dtype, cause_in_data, cause_in_targets,
          cause_in_rank_means, cause_in_scalars, cause_in_masks, cause_in_shards}) {
      if (std::string text = pattern(e_); !text.empty()) return text;
    }
    for (const auto& pattern : patterns_of_bytes()) {
      if (e_.views.empty()) break;
      if (std::string text = pattern(); !text.empty()) return text;
    }
    if (e_.views.empty()) {
      if (std::string text = scale(); !text.empty()) return text;
    }
    for (const auto& pattern : {cause_in_places, cause_in_order_of_parts, cause_in_tokens,
                                cause_in_scores, cause_in_handover}) {
      if (std::string text = pattern(e_); !text.empty()) return text;
    }
    return e_.result.differing_axes.empty()
               ? ""
               : fmt::format("copies differ over {}", join_axes(e_.result.differing_axes));
  }

 private:
  /// In the order in which they are tried: what explains more comes first.
  std::vector<std::function<std::string()>> patterns_of_bytes() const {
    return {[this] { return stale(); },
            [this] { return cause_in_update(e_); },
            [this] { return cause_in_buffer(e_); },
            [this] { return cause_in_other_gradients(e_); },
            [this] { return cause_in_weights_read(e_); },
            [this] { return cause_in_micro_batches(e_); },
            [this] { return rank_local(); },
            [this] { return mean_of_shards(); },
            [this] { return scale(); },
            [this] { return cause_in_rows(e_); },
            [this] { return cause_in_order_of_parts(e_); },
            [this] { return moved_slices(); },
            [this] { return offset(); },
            [this] { return same_values_elsewhere(); }};
  }

  /// A parameter whose bytes are those of its record before, on every rank where it diverges.
  std::string not_updated() const {
    if (e_.wanted.key.kind != RecordKind::kParam ||
        stage_of(e_.wanted.key) != Stage::kParameterAfterStep)
      return "";
    RecordKey before = e_.wanted.key;
    if (before.call > 0) {
      --before.call;
    } else {
      --before.step;
      before.call = before.step == 0 ? 1 : 0;
    }
    for (const int rank : e_.bad_ranks()) {
      const Held* h = e_.held_by(rank);
      const Record* old = h == nullptr ? nullptr : h->rank->find(before);
      if (old == nullptr || old->parts.size() != h->record->parts.size()) return "";
      for (std::size_t i = 0; i < old->parts.size(); ++i) {
        if (old->parts[i].digest != h->record->parts[i].digest) return "";
      }
    }
    return "not updated (bitwise as before)";
  }

  /// Equal to the reference's value of an earlier step.
  std::string stale() const {
    const View* bad = e_.first_bad_view();
    if (bad == nullptr) return "";
    const double error = distance(bad->actual, bad->expected);
    for (int back = 1; back <= std::min(e_.wanted.key.step, 4); ++back) {
      RecordKey key = e_.wanted.key;
      key.step -= back;
      const Record* old = e_.reference.find(key);
      if (old == nullptr || old->layout.global_shape != e_.wanted.layout.global_shape) continue;
      const Values expected =
          e_.reference_value(key).cut(bad->box.global_offset, bad->box.size) / old->grad_scale;
      if (e_.explains(bad->actual, expected, error))
        return fmt::format("stale by {} step{}", back, back == 1 ? "" : "s");
    }
    return "";
  }

  static bool holds_the_same(const Record& a, const Record& b) {
    if (is_flat(a.layout) || is_flat(b.layout)) return a.layout.flat == b.layout.flat;
    return a.parts[0].box.global_offset == b.parts[0].box.global_offset &&
           a.parts[0].box.size == b.parts[0].box.size;
  }

  /// The copies along an axis that hold the first one's place, if they are not all equal.
  std::vector<const View*> copies_along(const View& first, Axis axis) const {
    std::vector<const View*> copies;
    bool differ = false;
    for (const int rank : e_.actual.mesh.group_of(first.rank, axis)) {
      const Held* held = e_.held_by(rank);
      if (held == nullptr || held->record->parts.size() != 1) return {};
      if (!holds_the_same(*held->record, *e_.held_by(first.rank)->record)) continue;
      const View* view = e_.view_of(rank);
      if (view == nullptr) return {};
      differ = differ || !equal(view->actual, first.actual);
      copies.push_back(view);
    }
    return differ ? copies : std::vector<const View*>{};
  }

  /// "tp", or "the tp ranks that share a part" if only some ranks of the group hold the same place.
  std::string holders_in_words(Axis axis, std::size_t copies) const {
    const std::string name(name_of(axis));
    return static_cast<int>(copies) == e_.actual.mesh.degree(axis)
               ? name
               : fmt::format("the {} ranks that share a part", name);
  }

  /// Each copy is one rank's share of the value: the sum over the axis, or a combination of all
  /// copies, gives the reference.
  std::string rank_local() const {
    const View* bad = e_.first_bad_view();
    if (bad == nullptr) return "";
    double error = distance(bad->actual, bad->expected);
    for (const AxisDegree& axis : e_.actual.mesh.axes()) {
      const std::vector<const View*> copies =
          axis.degree > 1 ? copies_along(*bad, axis.axis) : std::vector<const View*>{};
      if (copies.empty()) continue;
      const std::string holders = holders_in_words(axis.axis, copies.size());
      Values sum = Values::zeros(bad->expected.shape());
      for (const View* copy : copies) sum = sum + copy->actual;
      if (e_.explains(sum, bad->expected, error)) {
        return fmt::format(
            "rank-local partial over {} ({} copies differ, their sum equals the reference)",
            holders, copies.size());
      }
      for (const View* copy : copies)
        error = std::max(error, distance(copy->actual, copy->expected));
      if (e_.explains(best_combination(copies), bad->expected, error)) {
        return fmt::format(
            "rank-local over {} ({} copies differ; combined they give the reference)", holders,
            copies.size());
      }
    }
    return "";
  }

  /// Ranks hold different parts, and each of them the mean of all parts.
  std::string mean_of_shards() const {
    const View* bad = e_.first_bad_view();
    if (bad == nullptr) return "";
    const double error = distance(bad->actual, bad->expected);
    for (const AxisDegree& axis : e_.actual.mesh.axes()) {
      Values sum = Values::zeros(bad->expected.shape());
      bool fits = axis.degree > 1;
      for (const int rank : e_.actual.mesh.group_of(bad->rank, axis.axis)) {
        const View* view = e_.view_of(rank);
        fits = fits && view != nullptr && view->box.size == bad->box.size;
        fits = fits && (rank == bad->rank || view->box.global_offset != bad->box.global_offset);
        if (!fits) break;
        sum = sum + view->expected;
      }
      if (fits && e_.explains(sum / axis.degree, bad->actual, error)) {
        return fmt::format("every shard is the mean of the {} shards over {} (best fit {:.2g})",
                           axis.degree, name_of(axis.axis), e_.result.comparison.stats.scale());
      }
    }
    return "";
  }

  /// The combination of copies, all with clearly positive weights, that is nearest to the
  /// reference.
  static Values best_combination(const std::vector<const View*>& copies) {
    const auto n = static_cast<std::int64_t>(copies.size());
    const Values& target = copies.front()->expected;
    std::vector<Values> rows;
    for (const View* copy : copies) rows.push_back(copy->actual);
    const Values matrix = stacked(rows);
    if (target.numel() >= 4 * n) {
      const std::vector<double> weights = best_weights(matrix, target);
      const double least = 0.02 / static_cast<double>(n);
      if (std::ranges::all_of(weights, [least](double weight) { return weight > least; }))
        return weighted_sum(matrix, weights).reshape(target.shape());
    }
    return matrix.mean(0).reshape(target.shape());
  }

  /// One factor for everything: needs no bytes.
  std::string scale() const {
    const Stats& s = e_.result.comparison.stats;
    const std::vector<int>& ranks = e_.bad_ranks();
    if (const auto factor = explained_factor(s)) {
      if (ranks.size() >= e_.held.size()) return e_.scale_words(*factor);
      return fmt::format("{} on rank {}", e_.scale_words(*factor), fmt::join(ranks, ", "));
    }
    const Held* h = e_.held_by(ranks.front());
    if (h == nullptr || e_.actual.mesh.world_size() == 1 || h->record->parts.empty()) return "";
    Stats own;
    for (const PartStats& part : h->record->parts) merge(own, part.stats);
    if (const auto factor = explained_factor(own))
      return fmt::format("{} on rank {}", e_.scale_words(*factor), h->rank->rank);
    return "";
  }

  std::optional<double> explained_factor(const Stats& s) const {
    if (s.sum_sq_reference == 0 || s.sum_sq_actual == 0 || s.numel < 2) return std::nullopt;
    // sums of squares in fp64 do not tell smaller differences from a factor
    constexpr double kLeast = 0x1p-48;
    if (s.sum_sq_diff < kLeast * s.sum_sq_reference) return std::nullopt;
    const double factor = s.scale();
    const double residual = std::sqrt(std::max(0.0, s.sum_sq_actual - s.dot * factor));
    const double actual_norm = std::sqrt(s.sum_sq_actual);
    if (residual > e_.tolerance() * actual_norm || residual > 0.25 * std::sqrt(s.sum_sq_diff))
      return std::nullopt;
    return factor;
  }

  /// Slices along one dim stand at other positions: repeated, shifted or permuted. Said for the
  /// ranks that share the first bad rank's place, because their copies should be equal.
  std::string moved_slices() const {
    const View* bad = e_.first_bad_view();
    if (bad == nullptr) return "";
    std::vector<std::string> words;
    for (const View& view : e_.views) {
      if (view.box.global_offset != bad->box.global_offset || view.box.size != bad->box.size)
        continue;
      if (std::string text = moved_on(view); !text.empty() && words.size() < 4)
        words.push_back(std::move(text));
    }
    if (words.empty()) return "";
    std::string text =
        e_.result.differing_axes.empty()
            ? ""
            : fmt::format("copies differ over {}; ", join_axes(e_.result.differing_axes));
    return text + fmt::format("{}", fmt::join(words, "; "));
  }

  std::string moved_on(const View& view) const {
    const double error = distance(view.actual, view.expected);
    if (!(error > e_.tolerance() * norm_of(view.expected))) return "";
    for (std::int64_t dim = 0; dim < view.actual.dim(); ++dim) {
      if (std::string text = repeated(view, dim, error); !text.empty()) return text;
    }
    for (std::int64_t dim = 0; dim < view.actual.dim(); ++dim) {
      if (std::string text = shifted(view, dim); !text.empty()) return text;
    }
    for (std::int64_t dim = 0; dim < view.actual.dim(); ++dim) {
      if (std::string text = permuted(view, dim, error); !text.empty()) return text;
    }
    return "";
  }

  /// The whole reference along `dim`, cut to the view's box in every other dim.
  Values line_of(const View& view, std::int64_t dim) const {
    Values line = e_.whole;
    for (std::size_t d = 0; d < view.box.size.size(); ++d) {
      if (static_cast<std::int64_t>(d) != dim)
        line =
            line.narrow(static_cast<std::int64_t>(d), view.box.global_offset[d], view.box.size[d]);
    }
    return line;
  }

  std::string repeated(const View& view, std::int64_t dim, double error) const {
    const std::int64_t size = view.actual.size(dim);
    const Values line = line_of(view, dim);
    for (std::int64_t times = 2; times <= std::min<std::int64_t>(size, 16); ++times) {
      if (size % times != 0) continue;
      const std::int64_t length = size / times;
      for (std::int64_t begin = 0; begin + length <= line.size(dim); begin += length) {
        const Values slice = line.narrow(dim, begin, length);
        const std::vector<Values> copies(static_cast<std::size_t>(times), slice);
        if (!e_.explains(concatenated(copies, dim), view.actual, error)) continue;
        const std::string often = times == 2 ? "twice" : fmt::format("{} times", times);
        const std::string where = length == 1
                                      ? fmt::format("position {}", begin)
                                      : fmt::format("positions {}..{}", begin, begin + length - 1);
        return fmt::format("rank {} holds {} {}", view.rank, where, often);
      }
    }
    return "";
  }

  std::string shifted(const View& view, std::int64_t dim) const {
    const std::int64_t size = view.actual.size(dim);
    const Values line = line_of(view, dim);
    const std::int64_t offset = view.box.global_offset[static_cast<std::size_t>(dim)];
    for (std::int64_t by = 1; by <= std::min(kMaxShift, line.size(dim) - 1); ++by) {
      for (const std::int64_t shift : {by, -by}) {
        // Position p holds what belongs to p - shift.
        const std::int64_t begin = std::max(offset, shift);
        const std::int64_t end = std::min(offset + size, line.size(dim) + shift);
        if (2 * (end - begin) <= size) continue;
        const Values mine = view.actual.narrow(dim, begin - offset, end - begin);
        const Values theirs = line.narrow(dim, begin - shift, end - begin);
        const double error = distance(mine, line.narrow(dim, begin, end - begin));
        if (error > 0 && e_.explains(mine, theirs, error))
          return fmt::format("shift {} along dim {} on rank {}", shift, dim, view.rank);
      }
    }
    return "";
  }

  std::string permuted(const View& view, std::int64_t dim, double error) const {
    const Values mine = view.actual.to_front(dim).reshape({view.actual.size(dim), -1});
    const Values line = line_of(view, dim);
    const Values theirs = line.to_front(dim).reshape({line.size(dim), -1});
    if (mine.size(0) < 2 || mine.size(0) * theirs.size(0) * mine.size(1) > (std::int64_t{1} << 28))
      return "";
    const std::vector<std::int64_t> nearest = nearest_rows(mine, theirs);
    // a slice stands twice
    if (std::set<std::int64_t>(nearest.begin(), nearest.end()).size() != nearest.size()) return "";
    if (!e_.explains(theirs.take(nearest), mine, error)) return "";
    return fmt::format("permuted along dim {} on rank {}", dim, view.rank);
  }

  std::string offset() const {
    const View* bad = e_.first_bad_view();
    if (bad == nullptr || bad->actual.numel() < 4) return "";
    const Values difference = bad->actual - bad->expected;
    const double error = norm_of(difference), mean = difference.mean();
    if (norm_of(difference - mean) <= 0.05 * error)
      return fmt::format("constant offset {:.4g} on rank {}", mean, bad->rank);
    if (difference.dim() < 2) return "";
    const Values rows = difference.rows();
    if (rows.size(0) < 4 || distance(rows, rows.mean(0)) > 0.05 * error) return "";
    if (std::string text = multiple_of_parameter(e_, rows.mean(0)); !text.empty()) return text;
    return fmt::format("off by the same row everywhere on rank {}", bad->rank);
  }

  std::string same_values_elsewhere() const {
    const View* bad = e_.first_bad_view();
    if (bad == nullptr || bad->actual.numel() < 8) return "";
    const Values theirs = bad->expected.sorted();
    const double left = distance(bad->actual.sorted(), theirs);
    // Sorting alone brings any two tensors of one distribution near: only equality up to rounding
    // counts.
    if (left > std::min(e_.tolerance(), 1e-3) * norm_of(theirs) ||
        left > 0.01 * distance(bad->actual, bad->expected))
      return "";
    if (tokens_stand_elsewhere(*bad))
      return fmt::format("tokens permuted between samples on rank {}", bad->rank);
    return fmt::format("permuted (the same values at other places) on rank {}", bad->rank);
  }

  /// Whether every token's features in [batch, sequence, features] are those of some token of the
  /// reference.
  bool tokens_stand_elsewhere(const View& view) const {
    if (view.actual.dim() != 3) return false;
    const Values mine = view.actual.rows(), theirs = view.expected.rows();
    if (mine.size(0) * mine.size(0) * mine.size(1) > (std::int64_t{1} << 28)) return false;
    return e_.explains(theirs.take(nearest_rows(mine, theirs)), mine, distance(mine, theirs));
  }

  Evidence e_;
};

}  // namespace

std::string diagnose(const Reference& reference, const Record& reference_record,
                     const Trace& actual, const std::vector<Held>& held, const TensorResult& result,
                     const JudgePolicy& options) {
  return Diagnosis(Evidence(reference, reference_record, actual, held, result, options)).run();
}

}  // namespace isoshard::detail
