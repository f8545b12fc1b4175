// SPDX-License-Identifier: Apache-2.0
/// Causes of wrong data ids and scalars.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <set>

#include "core/base/error.h"
#include "harness/causes/run_causes.h"

namespace isoshard::detail {
namespace {

/// Of an integer tensor; empty if its parts cannot be put together.
at::Tensor assembled(const Trace& trace, const RecordKey& key) {
  try {
    return trace.assemble(key);
  } catch (const Error&) {
    return {};
  }
}

std::map<std::int64_t, std::int64_t> count_ids(const at::Tensor& ids) {
  std::map<std::int64_t, std::int64_t> counts;
  const at::Tensor flat = ids.to(at::kLong).reshape({-1}).contiguous();
  for (std::int64_t i = 0; i < flat.numel(); ++i) ++counts[flat.const_data_ptr<std::int64_t>()[i]];
  return counts;
}

std::string fraction(std::int64_t part, std::int64_t whole) {
  const std::int64_t divisor = std::gcd(part, whole);
  return fmt::format("{}/{}", part / divisor, whole / divisor);
}

std::string fewer_valid_tokens(const at::Tensor& expected, const at::Tensor& actual) {
  const at::Tensor wanted = expected.ge(0), counted = actual.ge(0);
  const std::int64_t before = wanted.sum().item<std::int64_t>(),
                     after = counted.sum().item<std::int64_t>();
  if (before == after)
    return at::equal(wanted, counted)
               ? ""
               : "valid tokens: as many as the reference, at other positions";
  std::string text = fmt::format("valid tokens: {} {} than the reference", std::abs(before - after),
                                 after < before ? "fewer" : "more");
  if (after > before || expected.dim() != 2) return text;
  const at::Tensor lost = wanted.logical_and(counted.logical_not());
  const at::Tensor lost_B = lost.sum(1);
  if (lost_B.min().item<std::int64_t>() != lost_B.max().item<std::int64_t>()) return text;
  const auto each = lost_B[0].item<std::int64_t>();
  text += fmt::format(", {} per sample", each == 1 ? "one" : std::to_string(each));
  if (each != 1) return text;
  const at::Tensor place = lost.to(at::kLong).argmax(1);
  if (at::equal(place, wanted.to(at::kLong).argmax(1))) return text + " at the first valid token";
  if (at::equal(place, expected.size(1) - 1 - wanted.flip(1).to(at::kLong).argmax(1)))
    return text + " at the last valid token";
  return text;
}

std::string repeated_ids(const Evidence& e, const at::Tensor& expected, const at::Tensor& actual) {
  const auto wanted = count_ids(expected), seen = count_ids(actual);
  if (wanted == seen) return "the same ids in another order";
  const auto is_alike = [](const auto& counts) {
    return std::all_of(counts.begin(), counts.end(),
                       [&](const auto& entry) { return entry.second == counts.begin()->second; });
  };
  const bool known = std::all_of(seen.begin(), seen.end(),
                                 [&](const auto& entry) { return wanted.contains(entry.first); });
  if (!is_alike(wanted) || !is_alike(seen) || seen.empty() || !known) return "";
  const double times =
      static_cast<double>(seen.begin()->second) / static_cast<double>(wanted.begin()->second);
  if (times <= 1) return "";
  const auto formula = e.formula_of(times, 1e-6);
  const auto all = static_cast<std::int64_t>(wanted.size()),
             missed = all - static_cast<std::int64_t>(seen.size());
  return fmt::format("each id seen appears {} times; {} of the ids are never seen",
                     formula.value_or(fmt::format("{:g}", times)), fraction(missed, all));
}

/// The counted targets of each of `n` equal runs of rows of the labels; empty if there are no
/// labels.
std::vector<double> counted_targets(const Evidence& e, std::int64_t n) {
  std::vector<double> counts(static_cast<std::size_t>(n), 0);
  bool any = false;
  for (const Record& record : e.reference.trace().ranks.at(0).records) {
    if (record.key.step != e.wanted.key.step || record.key.kind != RecordKind::kDataId ||
        record.key.name != "labels")
      continue;
    const at::Tensor labels = e.reference.tensor(record.key);
    if (labels.dim() != 2 || labels.size(0) % n != 0) return {};
    // the first token is nobody's target
    const at::Tensor per_row = labels.slice(1, 1).ge(0).sum(1).reshape({n, -1}).sum(1);
    for (std::int64_t i = 0; i < n; ++i)
      counts[static_cast<std::size_t>(i)] += per_row[i].item<double>();
    any = true;
  }
  return any ? counts : std::vector<double>{};
}

std::string mean_of_means(const Evidence& e, double actual) {
  for (const Record& record : e.reference.trace().ranks.at(0).records) {
    const bool fits = record.key.step == e.wanted.key.step &&
                      record.key.kind == RecordKind::kScalar &&
                      record.key.name.starts_with(e.wanted.key.name + "_per_");
    const at::Tensor parts = fits ? assembled(e.actual, record.key) : at::Tensor();
    if (!parts.defined() || parts.numel() < 2) continue;
    const at::Tensor means = parts.to(at::kDouble).reshape({-1}),
                     right = e.reference.tensor(record.key).to(at::kDouble);
    if (!is_near(means.mean().item<double>(), actual, e.tolerance())) continue;
    // Where the right run's mean of means is its value, too (equally many tokens), it says nothing.
    if (is_near(right.mean().item<double>(), e.whole.item<double>(), e.tolerance())) continue;
    std::string tokens;
    if (const std::vector<double> counts = counted_targets(e, means.numel()); !counts.empty()) {
      const at::Tensor weights = at::tensor(counts, at::kDouble);
      // The counts are believed if they give the reference's value.
      if (is_near((means * weights).sum().item<double>() / weights.sum().item<double>(),
                  e.whole.item<double>(), 1e-4)) {
        tokens = fmt::format(" ({:g} tokens)", fmt::join(counts, ", "));
      }
    }
    return fmt::format("equals the mean of {} rank means{}, not the token mean", means.numel(),
                       tokens);
  }
  return "";
}

/// Squared gradient norms of the run's own gradients: of parameters of which the coordinates of an
/// axis hold different parts, by coordinate, and of those of which each of them holds the same.
struct Squares {
  double replicated = 0;
  std::vector<double> split;
};

/// Where a part lies in the whole tensor.
Shape place_of(const PartStats& part, bool flat) {
  if (flat) return {part.range.global_begin, part.range.count};
  Shape place = part.box.global_offset;
  place.insert(place.end(), part.box.size.begin(), part.box.size.end());
  return place;
}

/// Adds one parameter. Along other axes than `axis` ranks hold copies or other parts; what several
/// ranks hold counts once.
void add_squares(const Evidence& e, Axis axis, const RecordKey& key, Squares& squares) {
  std::vector<std::map<Shape, double>> by_coordinate(squares.split.size());
  for (const RankTrace& rank : e.actual.ranks) {
    const Record* record = rank.find(key);
    if (record == nullptr) continue;
    auto& parts =
        by_coordinate.at(static_cast<std::size_t>(e.actual.mesh.coordinate(rank.rank, axis)));
    for (const PartStats& part : record->parts)
      parts.emplace(place_of(part, is_flat(record->layout)), part.stats.sum_sq_actual);
  }
  const auto same_places = [&](const auto& parts) {
    return std::equal(parts.begin(), parts.end(), by_coordinate.front().begin(),
                      by_coordinate.front().end(),
                      [](const auto& a, const auto& b) { return a.first == b.first; });
  };
  const bool is_replicated = std::all_of(by_coordinate.begin(), by_coordinate.end(), same_places);
  std::set<Shape> seen;
  for (std::size_t c = 0; c < by_coordinate.size(); ++c) {
    for (const auto& [place, sum] : by_coordinate[c]) {
      if (seen.insert(place).second) (is_replicated ? squares.replicated : squares.split[c]) += sum;
    }
  }
}

Squares squares_along(const Evidence& e, Axis axis) {
  Squares squares{0, std::vector<double>(static_cast<std::size_t>(e.actual.mesh.degree(axis)), 0)};
  for (const Record& wanted : e.reference.trace().ranks.at(0).records) {
    if (wanted.key.kind == RecordKind::kGrad && wanted.key.step == e.wanted.key.step)
      add_squares(e, axis, wanted.key, squares);
  }
  return squares;
}

std::string norm_of_other_squares(const Evidence& e, double actual) {
  constexpr double kNear = 1e-4;
  const double expected = e.whole.item<double>();
  const std::string size = actual < expected ? "too small" : "too large";
  for (const AxisDegree& axis : e.actual.mesh.axes()) {
    if (axis.degree == 1) continue;
    const Squares squares = squares_along(e, axis.axis);
    const double split = std::accumulate(squares.split.begin(), squares.split.end(), 0.0);
    if (split == 0) continue;
    if (is_near(actual, std::sqrt(split + axis.degree * squares.replicated), kNear)) {
      return fmt::format("{}; fits sqrt(split + {} x replicated), {} = {}", size, axis.degree,
                         axis.degree, name_of(axis.axis));
    }
    for (std::size_t r = 0; r < squares.split.size(); ++r) {
      if (is_near(actual, std::sqrt(squares.split[r] + squares.replicated), kNear)) {
        return fmt::format("{}; equals the norm over {} rank {} alone", size, name_of(axis.axis),
                           r);
      }
    }
    if (is_near(actual, std::sqrt(split), kNear))
      return fmt::format("{}; replicated weights are left out", size);
  }
  return "";
}

/// Copies that differ along an axis and whose squares add up to the reference's.
std::string squares_add_up(const Evidence& e, const View& bad) {
  for (const Axis axis : e.result.differing_axes) {
    double sum = 0;
    for (const int rank : e.actual.mesh.group_of(bad.rank, axis)) {
      const View* view = e.view_of(rank);
      if (view == nullptr) return "";
      sum += view->actual.square().item<double>();
    }
    if (is_near(std::sqrt(sum), e.whole.item<double>(), 1e-4)) {
      return fmt::format("differs over {0}; squares summed over {0} give the reference",
                         name_of(axis));
    }
  }
  return "";
}

/// What `columns` more logits of 0 would add to the reference's mean loss of each of `n` equal runs
/// of samples: the mean over counted targets of log(1 + columns / sum of exp). Empty if logits and
/// labels do not fit.
std::vector<double> offsets_of_padding(const Evidence& e, const std::string& head,
                                       std::int64_t columns, std::int64_t n) {
  std::vector<double> sums(static_cast<std::size_t>(n), 0), counts = sums;
  for (int m = 0; m < e.num_micro_batches(); ++m) {
    const RecordKey logits_key{e.wanted.key.step, RecordKind::kActivation, head, m};
    const RecordKey labels_key{e.wanted.key.step, RecordKind::kDataId, "labels", m};
    if (e.reference.find(logits_key) == nullptr || e.reference.find(labels_key) == nullptr)
      return {};
    const at::Tensor logits = e.reference.tensor(logits_key),
                     labels = e.reference.tensor(labels_key);
    if (logits.dim() != 3 || labels.dim() != 2 || labels.size(0) != logits.size(0) ||
        labels.size(1) != logits.size(1))
      return {};
    if (labels.size(0) % n != 0 || labels.size(1) < 2) return {};
    const at::Tensor lse = logits.slice(1, 0, -1).to(at::kDouble).logsumexp(2);
    const at::Tensor counted = labels.slice(1, 1).ge(0).to(at::kDouble);
    const at::Tensor added = lse.neg()
                                 .exp()
                                 .mul(static_cast<double>(columns))
                                 .log1p()
                                 .mul(counted)
                                 .sum(1)
                                 .reshape({n, -1})
                                 .sum(1);
    const at::Tensor tokens = counted.sum(1).reshape({n, -1}).sum(1);
    for (std::int64_t i = 0; i < n; ++i) {
      sums[static_cast<std::size_t>(i)] += added[i].item<double>();
      counts[static_cast<std::size_t>(i)] += tokens[i].item<double>();
    }
  }
  for (std::size_t i = 0; i < sums.size(); ++i) sums[i] /= std::max(counts[i], 1.0);
  return sums;
}

/// A loss that is too large by what the padding of a head's outputs adds, if its logits are 0.
std::string softmax_over_padding(const Evidence& e, const View& bad) {
  for (const Record& record : e.actual.ranks.front().records) {
    const Layout& layout = record.layout;
    if (record.key.kind != RecordKind::kActivation || record.key.step != e.wanted.key.step ||
        record.key.call != 0)
      continue;
    if (!layout.explicit_parts || record.local_shape.empty()) continue;
    const std::int64_t padded = record.local_shape.back() * e.actual.mesh.degree(Axis::kTp),
                       whole = layout.global_shape.back();
    if (padded <= whole) continue;
    const std::vector<double> offsets =
        offsets_of_padding(e, record.key.name, padded - whole, e.whole.numel());
    if (offsets.empty()) continue;
    const std::int64_t first = bad.box.global_offset.empty() ? 0 : bad.box.global_offset[0];
    const at::Tensor seen = (bad.actual - bad.expected).reshape({-1});
    bool fits = true;
    for (std::int64_t i = 0; i < seen.numel(); ++i) {
      fits = fits &&
             is_near(seen[i].item<double>(), offsets[static_cast<std::size_t>(first + i)], 0.01);
    }
    if (!fits) continue;
    return fmt::format(
        "offset {:.4g}: {} columns of padding with logits of 0 take part in the softmax (the "
        "padded width of {} is {}, the "
        "true one {})",
        seen[0].item<double>(), padded - whole, record.key.name, padded, whole);
  }
  return "";
}

/// A mean of logarithms that is too large by the logarithm of a degree, or of how much wider a
/// padded dim is than the true one.
std::string logarithmic_offset(const Evidence& e, double offset) {
  for (const AxisDegree& axis : e.actual.mesh.axes()) {
    if (axis.degree > 1 && is_near(offset, std::log(static_cast<double>(axis.degree)), 1e-3)) {
      return fmt::format("constant offset {:.4g} = log({})", offset, name_of(axis.axis));
    }
  }
  for (const Record& record : e.actual.ranks.front().records) {
    const Layout& layout = record.layout;
    if (record.key.kind != RecordKind::kActivation || !layout.explicit_parts ||
        record.local_shape.empty())
      continue;
    const std::int64_t padded = record.local_shape.back() * e.actual.mesh.degree(Axis::kTp),
                       whole = layout.global_shape.back();
    if (padded > whole &&
        is_near(offset, std::log(static_cast<double>(padded) / static_cast<double>(whole)), 0.02)) {
      return fmt::format(
          "constant offset {:.4g} = log({}/{}), the padded over the true width of {}", offset,
          padded, whole, record.key.name);
    }
  }
  return "";
}

}  // namespace

std::string cause_in_data(const Evidence& e) {
  if (e.wanted.key.kind != RecordKind::kDataId || !e.whole.defined()) return "";
  const at::Tensor actual = assembled(e.actual, e.wanted.key);
  if (!actual.defined() || actual.sizes() != e.whole.sizes()) return "";
  const bool has_masked = e.whole.lt(0).any().item<bool>() || actual.lt(0).any().item<bool>();
  if (has_masked) return fewer_valid_tokens(e.whole, actual);
  return repeated_ids(e, e.whole, actual);
}

std::string cause_in_scalars(const Evidence& e) {
  const View* bad =
      e.wanted.key.kind == RecordKind::kScalar && !e.views.empty() ? e.first_bad_view() : nullptr;
  if (bad == nullptr) return "";
  if (e.whole.numel() != 1) {
    const std::string offset =
        logarithmic_offset(e, (bad->actual - bad->expected).mean().item<double>());
    return offset.empty() ? softmax_over_padding(e, *bad) : offset;
  }
  const double actual = bad->actual.item<double>(), expected = e.whole.item<double>();
  if (std::string text = mean_of_means(e, actual); !text.empty()) return text;
  if (e.result.comparison.stage == Stage::kGradNorm) {
    if (std::string text = squares_add_up(e, *bad); !text.empty()) return text;
    if (std::string text = norm_of_other_squares(e, actual); !text.empty()) return text;
  }
  if (const auto formula = expected != 0 ? e.formula_of(actual / expected, 1e-3) : std::nullopt)
    return "scale " + *formula;
  if (e.wanted.key.name == "learning_rate" && expected != 0)
    return e.scale_words(actual / expected);
  const std::string offset = logarithmic_offset(e, actual - expected);
  return offset.empty() ? softmax_over_padding(e, *bad) : offset;
}

}  // namespace isoshard::detail
