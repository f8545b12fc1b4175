// SPDX-License-Identifier: Apache-2.0
/// Patterns of divergence. Everything is compared in fp64 on the kept bytes of the ranks concerned.
#include "harness/compare/diagnosis.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "harness/trace/parts.h"

namespace isoshard::detail {
namespace {

constexpr std::int64_t kMaxElements = std::int64_t{1} << 26;  ///< larger tensors are judged, but not diagnosed
constexpr std::int64_t kMaxShift = 64;

double norm_of(const at::Tensor& t) {
  return std::sqrt(t.square().sum().item<double>());
}

/// What one rank holds and what it should hold, in fp64, with grad_scale divided out.
struct View {
  int rank;
  Box box;
  at::Tensor actual;
  at::Tensor expected;
};

class Diagnosis {
 public:
  Diagnosis(const Reference& reference, const Record& wanted, const Trace& actual, const std::vector<Held>& held,
            const TensorResult& result)
      : reference_(reference), wanted_(wanted), actual_(actual), held_(held), result_(result) {}

  std::string run() {
    if (result_.findings.empty() || result_.findings.front().ranks.empty()) return "";
    const Stats& stats = result_.comparison.stats;
    if (stats.nonfinite_mismatch != 0) return fmt::format("{} values not finite", stats.nonfinite_mismatch);
    if (std::string text = not_updated(); !text.empty()) return text;
    const bool small = numel_of(wanted_.layout.global_shape) <= kMaxElements;
    if (small && collect_views()) {
      if (std::string text = stale(); !text.empty()) return text;
      if (std::string text = rank_local(); !text.empty()) return text;
    }
    if (std::string text = scale(); !text.empty()) return text;
    if (!views_.empty()) {
      if (std::string text = moved_slices(); !text.empty()) return text;
      if (std::string text = offset(); !text.empty()) return text;
      if (std::string text = same_values_elsewhere(); !text.empty()) return text;
    }
    return result_.differing_axes.empty() ? "" : fmt::format("copies differ over {}", join_axes(result_.differing_axes));
  }

 private:
  /// Whether a candidate explains what was seen: it is near in itself, and much nearer than the reference was.
  bool explains(const at::Tensor& candidate, const at::Tensor& target, double error) const {
    const double left = norm_of(candidate - target);
    const double size = norm_of(target);
    return left <= tolerance() * size && left <= 0.25 * error;
  }
  double tolerance() const { return std::max(4 * result_.comparison.allowed_relative_error, 1e-6); }

  const Held* held_by(int rank) const {
    for (const Held& h : held_) {
      if (h.rank->rank == rank) return &h;
    }
    return nullptr;
  }

  bool collect_views() {
    const at::Tensor whole = reference_.tensor(wanted_.key).to(at::kDouble);
    for (const Held& h : held_) {
      const Record& record = *h.record;
      if (!record.kept || h.rank->arena == nullptr || is_flat(record.layout) || is_partial(record.layout) || record.parts.size() != 1)
        continue;
      View view{h.rank->rank, record.parts[0].box, h.rank->tensor(record).to(at::kDouble).div(record.grad_scale), whole};
      for (std::size_t d = 0; d < view.box.size.size(); ++d) {
        const auto dim = static_cast<std::int64_t>(d);
        view.actual = view.actual.narrow(dim, view.box.local_offset[d], view.box.size[d]);
        view.expected = view.expected.narrow(dim, view.box.global_offset[d], view.box.size[d]);
      }
      if (!at::isfinite(view.actual).all().item<bool>()) continue;
      views_.push_back(std::move(view));
    }
    whole_ = whole;
    return !views_.empty();
  }

  const View* view_of(int rank) const {
    for (const View& view : views_) {
      if (view.rank == rank) return &view;
    }
    return nullptr;
  }

  const View* first_bad_view() const {
    for (const int rank : result_.findings.front().ranks) {
      const View* view = view_of(rank);
      if (view != nullptr && norm_of(view->actual - view->expected) > 0) return view;
    }
    return nullptr;
  }

  /// A parameter whose bytes are those of its record before, on every rank where it diverges.
  std::string not_updated() const {
    if (wanted_.key.kind != RecordKind::kParam || stage_of(wanted_.key) != Stage::kParameterAfterStep) return "";
    RecordKey before = wanted_.key;
    if (before.call > 0) {
      --before.call;
    } else {
      --before.step;
      before.call = before.step == 0 ? 1 : 0;
    }
    for (const int rank : result_.findings.front().ranks) {
      const Held* h = held_by(rank);
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
    const View* bad = first_bad_view();
    if (bad == nullptr) return "";
    const double error = norm_of(bad->actual - bad->expected);
    for (int back = 1; back <= std::min(wanted_.key.step, 4); ++back) {
      RecordKey key = wanted_.key;
      key.step -= back;
      const Record* old = reference_.find(key);
      if (old == nullptr || old->layout.global_shape != wanted_.layout.global_shape) continue;
      at::Tensor expected = reference_.tensor(key).to(at::kDouble);
      for (std::size_t d = 0; d < bad->box.size.size(); ++d)
        expected = expected.narrow(static_cast<std::int64_t>(d), bad->box.global_offset[d], bad->box.size[d]);
      if (explains(bad->actual, expected, error)) return fmt::format("stale by {} step{}", back, back == 1 ? "" : "s");
    }
    return "";
  }

  /// The copies along an axis, if they hold the same place and are not all equal.
  std::vector<const View*> copies_along(const View& first, Axis axis) const {
    std::vector<const View*> copies;
    bool differ = false;
    for (const int rank : actual_.mesh.group_of(first.rank, axis)) {
      const View* view = view_of(rank);
      if (view == nullptr || view->box.global_offset != first.box.global_offset || view->box.size != first.box.size) return {};
      differ = differ || !at::equal(view->actual, first.actual);
      copies.push_back(view);
    }
    return differ ? copies : std::vector<const View*>{};
  }

  /// Each copy is one rank's share of the value: the sum over the axis, or a combination of all copies, gives the reference.
  std::string rank_local() const {
    const View* bad = first_bad_view();
    if (bad == nullptr) return "";
    double error = norm_of(bad->actual - bad->expected);
    for (const AxisDegree& axis : actual_.mesh.axes()) {
      const std::vector<const View*> copies = axis.degree > 1 ? copies_along(*bad, axis.axis) : std::vector<const View*>{};
      if (copies.empty()) continue;
      at::Tensor sum = at::zeros_like(bad->expected);
      for (const View* copy : copies) sum += copy->actual;
      if (explains(sum, bad->expected, error)) {
        return fmt::format("rank-local partial over {} ({} copies differ, their sum equals the reference)", name_of(axis.axis),
                           copies.size());
      }
      for (const View* copy : copies) error = std::max(error, norm_of(copy->actual - copy->expected));
      if (const auto combined = best_combination(copies); combined.has_value() && explains(*combined, bad->expected, error)) {
        return fmt::format("rank-local over {} ({} copies differ; combined they give the reference)", name_of(axis.axis), copies.size());
      }
    }
    return "";
  }

  /// The combination of copies, all with clearly positive weights, that is nearest to the reference.
  static std::optional<at::Tensor> best_combination(const std::vector<const View*>& copies) {
    const auto n = static_cast<std::int64_t>(copies.size());
    const at::Tensor target = copies.front()->expected.reshape({-1});
    std::vector<at::Tensor> rows;
    for (const View* copy : copies) rows.push_back(copy->actual.reshape({-1}));
    const at::Tensor mean = at::stack(rows).mean(0);
    if (target.numel() < 4 * n) return mean.reshape(copies.front()->expected.sizes());
    const at::Tensor matrix = at::stack(rows);
    const at::Tensor weights = at::linalg_pinv(at::mm(matrix, matrix.t())).mv(matrix.mv(target));
    if ((weights > 0.02 / static_cast<double>(n)).all().item<bool>())
      return matrix.t().mv(weights).reshape(copies.front()->expected.sizes());
    return mean.reshape(copies.front()->expected.sizes());
  }

  /// One factor for everything: needs no bytes.
  std::string scale() const {
    const Stats& s = result_.comparison.stats;
    const std::vector<int>& ranks = result_.findings.front().ranks;
    if (const auto factor = explained_factor(s)) {
      if (ranks.size() >= held_.size()) return scale_words(*factor);
      return fmt::format("{} on rank {}", scale_words(*factor), fmt::join(ranks, ", "));
    }
    const Held* h = held_by(ranks.front());
    if (h == nullptr || actual_.mesh.world_size() == 1 || h->record->parts.empty()) return "";
    Stats own;
    for (const PartStats& part : h->record->parts) merge(own, part.stats);
    if (const auto factor = explained_factor(own)) return fmt::format("{} on rank {}", scale_words(*factor), h->rank->rank);
    return "";
  }

  std::optional<double> explained_factor(const Stats& s) const {
    if (s.sum_sq_reference == 0 || s.sum_sq_actual == 0 || s.numel < 2) return std::nullopt;
    const double factor = s.scale();
    const double residual = std::sqrt(std::max(0.0, s.sum_sq_actual - s.dot * factor));
    const double actual_norm = std::sqrt(s.sum_sq_actual);
    if (residual > tolerance() * actual_norm || residual > 0.25 * std::sqrt(s.sum_sq_diff)) return std::nullopt;
    return factor;
  }

  std::string scale_words(double factor) const {
    struct Formula {
      double value;
      std::string words;
    };
    std::vector<Formula> formulas;
    const auto axes = actual_.mesh.axes();
    for (const AxisDegree& a : axes) {
      if (a.degree == 1) continue;
      const double d = a.degree;
      formulas.push_back({d, std::string(name_of(a.axis))});
      formulas.push_back({1 / d, fmt::format("1/{}", name_of(a.axis))});
      formulas.push_back({(d - 1) / d, fmt::format("({0}-1)/{0}", name_of(a.axis))});
      formulas.push_back({d * d, fmt::format("{0}^2", name_of(a.axis))});
      formulas.push_back({1 / (d * d), fmt::format("1/{0}^2", name_of(a.axis))});
    }
    for (std::size_t i = 0; i < axes.size(); ++i) {
      for (std::size_t j = 0; j < axes.size(); ++j) {
        if (i == j || axes[i].degree == 1 || axes[j].degree == 1) continue;
        const double a = axes[i].degree, b = axes[j].degree;
        if (i < j) formulas.push_back({a * b, fmt::format("{} x {}", name_of(axes[i].axis), name_of(axes[j].axis))});
        if (i < j) formulas.push_back({1 / (a * b), fmt::format("1/({} x {})", name_of(axes[i].axis), name_of(axes[j].axis))});
        if (a != b) formulas.push_back({a / b, fmt::format("{}/{}", name_of(axes[i].axis), name_of(axes[j].axis))});
      }
    }
    for (const Formula& formula : formulas) {
      if (std::fabs(factor - formula.value) <= 0.02 * formula.value) return fmt::format("scale {:.4g} = {}", factor, formula.words);
    }
    if (std::fabs(factor + 1) <= 0.02) return "scale -1 = sign";
    return fmt::format("scale {:.4g}", factor);
  }

  /// Slices along one dim stand at other positions: repeated, shifted or permuted. Said for the ranks that share the first
  /// bad rank's place, because their copies should be equal.
  std::string moved_slices() const {
    const View* bad = first_bad_view();
    if (bad == nullptr) return "";
    std::vector<std::string> words;
    for (const View& view : views_) {
      if (view.box.global_offset != bad->box.global_offset || view.box.size != bad->box.size) continue;
      if (std::string text = moved_on(view); !text.empty() && words.size() < 4) words.push_back(std::move(text));
    }
    if (words.empty()) return "";
    std::string text = result_.differing_axes.empty() ? "" : fmt::format("copies differ over {}; ", join_axes(result_.differing_axes));
    return text + fmt::format("{}", fmt::join(words, "; "));
  }

  std::string moved_on(const View& view) const {
    const double error = norm_of(view.actual - view.expected);
    if (!(error > tolerance() * norm_of(view.expected))) return "";
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
  at::Tensor line_of(const View& view, std::int64_t dim) const {
    at::Tensor line = whole_;
    for (std::size_t d = 0; d < view.box.size.size(); ++d) {
      if (static_cast<std::int64_t>(d) != dim)
        line = line.narrow(static_cast<std::int64_t>(d), view.box.global_offset[d], view.box.size[d]);
    }
    return line;
  }

  std::string repeated(const View& view, std::int64_t dim, double error) const {
    const std::int64_t size = view.actual.size(dim);
    const at::Tensor line = line_of(view, dim);
    for (std::int64_t times = 2; times <= std::min<std::int64_t>(size, 16); ++times) {
      if (size % times != 0) continue;
      const std::int64_t length = size / times;
      for (std::int64_t begin = 0; begin + length <= line.size(dim); begin += length) {
        const at::Tensor slice = line.narrow(dim, begin, length);
        std::vector<at::Tensor> copies(static_cast<std::size_t>(times), slice);
        if (!explains(at::cat(copies, dim), view.actual, error)) continue;
        const std::string often = times == 2 ? "twice" : fmt::format("{} times", times);
        const std::string where =
            length == 1 ? fmt::format("position {}", begin) : fmt::format("positions {}..{}", begin, begin + length - 1);
        return fmt::format("rank {} holds {} {}", view.rank, where, often);
      }
    }
    return "";
  }

  std::string shifted(const View& view, std::int64_t dim) const {
    const std::int64_t size = view.actual.size(dim);
    const at::Tensor line = line_of(view, dim);
    const std::int64_t offset = view.box.global_offset[static_cast<std::size_t>(dim)];
    for (std::int64_t distance = 1; distance <= std::min(kMaxShift, line.size(dim) - 1); ++distance) {
      for (const std::int64_t shift : {distance, -distance}) {
        // Position p holds what belongs to p - shift.
        const std::int64_t begin = std::max(offset, shift);
        const std::int64_t end = std::min(offset + size, line.size(dim) + shift);
        if (2 * (end - begin) <= size) continue;
        const at::Tensor mine = view.actual.narrow(dim, begin - offset, end - begin);
        const at::Tensor theirs = line.narrow(dim, begin - shift, end - begin);
        const double error = norm_of(mine - line.narrow(dim, begin, end - begin));
        if (error > 0 && explains(mine, theirs, error)) return fmt::format("shift {} along dim {} on rank {}", shift, dim, view.rank);
      }
    }
    return "";
  }

  std::string permuted(const View& view, std::int64_t dim, double error) const {
    const at::Tensor mine = view.actual.movedim(dim, 0).reshape({view.actual.size(dim), -1}).contiguous();
    const at::Tensor line = line_of(view, dim);
    const at::Tensor theirs = line.movedim(dim, 0).reshape({line.size(dim), -1}).contiguous();
    if (mine.size(0) < 2 || mine.size(0) * theirs.size(0) * mine.size(1) > (std::int64_t{1} << 28)) return "";
    const at::Tensor nearest = at::cdist(mine, theirs).argmin(1);
    if (!std::get<0>(nearest.sort()).diff().gt(0).all().item<bool>()) return "";  // a slice stands twice
    if (!explains(theirs.index_select(0, nearest), mine, error)) return "";
    return fmt::format("permuted along dim {} on rank {}", dim, view.rank);
  }

  std::string offset() const {
    const View* bad = first_bad_view();
    if (bad == nullptr) return "";
    const at::Tensor difference = bad->actual - bad->expected;
    if (wanted_.key.kind == RecordKind::kScalar) return log_offset(difference.mean().item<double>());
    if (bad->actual.numel() < 4) return "";
    const double error = norm_of(difference);
    const at::Tensor mean = difference.mean();
    if (norm_of(difference - mean) <= 0.05 * error) return fmt::format("constant offset {:.4g} on rank {}", mean.item<double>(), bad->rank);
    if (difference.dim() < 2) return "";
    const at::Tensor rows = difference.reshape({-1, difference.size(-1)});
    if (rows.size(0) >= 4 && norm_of(rows - rows.mean(0, true)) <= 0.05 * error)
      return fmt::format("off by the same row everywhere on rank {}", bad->rank);
    return "";
  }

  /// A mean of logarithms that is too large by the logarithm of a degree, or of how much wider a padded dim is than the true one.
  std::string log_offset(double value) const {
    for (const AxisDegree& axis : actual_.mesh.axes()) {
      const double whole = std::log(static_cast<double>(axis.degree));
      if (axis.degree > 1 && std::fabs(value - whole) <= 1e-3 * whole)
        return fmt::format("constant offset {:.4g} = log({})", value, name_of(axis.axis));
    }
    for (const Record& record : actual_.ranks.front().records) {
      const Layout& layout = record.layout;
      if (record.key.kind != RecordKind::kActivation || !layout.explicit_parts || record.local_shape.empty()) continue;
      const std::int64_t padded = record.local_shape.back() * actual_.mesh.degree(Axis::kTp), whole = layout.global_shape.back();
      const double share = std::log(static_cast<double>(padded) / static_cast<double>(whole));
      if (padded > whole && std::fabs(value - share) <= 0.02 * share)
        return fmt::format("constant offset {:.4g} = log({}/{}), the padded over the true width of {}", value, padded, whole,
                           record.key.name);
    }
    return "";
  }

  std::string same_values_elsewhere() const {
    const View* bad = first_bad_view();
    if (bad == nullptr || bad->actual.numel() < 8) return "";
    const at::Tensor mine = std::get<0>(bad->actual.reshape({-1}).sort());
    const at::Tensor theirs = std::get<0>(bad->expected.reshape({-1}).sort());
    const double left = norm_of(mine - theirs);
    // Sorting alone brings any two tensors of one distribution near: only equality up to rounding counts.
    if (left > std::min(tolerance(), 1e-3) * norm_of(theirs) || left > 0.01 * norm_of(bad->actual - bad->expected)) return "";
    return fmt::format("permuted (the same values at other places) on rank {}", bad->rank);
  }

  const Reference& reference_;
  const Record& wanted_;
  const Trace& actual_;
  const std::vector<Held>& held_;
  const TensorResult& result_;
  std::vector<View> views_;
  at::Tensor whole_;
};

}  // namespace

std::string diagnose(const Reference& reference, const Record& reference_record, const Trace& actual, const std::vector<Held>& held,
                     const TensorResult& result) {
  const at::NoGradGuard no_grad;
  return Diagnosis(reference, reference_record, actual, held, result).run();
}

}  // namespace isoshard::detail
