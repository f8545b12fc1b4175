// SPDX-License-Identifier: Apache-2.0
/// Rows of a vocabulary: what an embedding reads and what comes back to it; and the gradient of
/// logits.
#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "harness/causes/class_causes.h"
#include "harness/causes/view/targets.h"
#include "harness/ids/phrase.h"

namespace isoshard::detail {
namespace {

constexpr std::ptrdiff_t kLeastRows = 4;

/// Whether a row that should be 0 is wrong as a whole. An error of one element is as likely one of
/// another kind that happened to hit the row.
bool is_filled(const Values& row) {
  constexpr std::int64_t kFewest = 2;
  constexpr double kLeastShare = 0.25;
  const std::int64_t filled =
      std::ranges::count_if(row.contiguous().flat(), [](double value) { return value != 0; });
  return filled >= kFewest &&
         static_cast<double>(filled) >= kLeastShare * static_cast<double>(row.numel());
}

/// How often each id of a step's integer record occurs.
struct IdCounts {
  std::string name;
  std::map<std::int64_t, std::int64_t> counts;
  [[nodiscard]] std::int64_t of(std::int64_t id) const {
    const auto found = counts.find(id);
    return found == counts.end() ? 0 : found->second;
  }
};

/// The step's first integer record whose ids hold all of `rows`.
std::optional<IdCounts> ids_with(const Evidence& e, const std::set<std::int64_t>& rows) {
  std::vector<IdCounts> found;
  for (const Record& record : e.reference.trace().ranks.at(0).records) {
    if (record.key.kind != RecordKind::kDataId || record.key.step != e.wanted.key.step ||
        record.layout.global_shape.size() != 2 || is_floating(record.dtype))
      continue;
    auto own = std::ranges::find(found, record.key.name, &IdCounts::name);
    if (own == found.end()) own = found.insert(found.end(), {record.key.name, {}});
    const Values ids = e.reference_value(record.key).contiguous();
    for (const double id : ids.flat()) ++own->counts[static_cast<std::int64_t>(id)];
  }
  const auto holds = std::ranges::find_if(found, [&](const IdCounts& ids) {
    return std::ranges::all_of(rows, [&](std::int64_t row) { return ids.of(row) > 0; });
  });
  return holds == found.end() ? std::nullopt : std::optional(*holds);
}

/// The rows of a matrix on one rank, by how they are.
struct Rows {
  std::set<std::int64_t> wrong, right;  ///< of the vocabulary
  std::set<std::int64_t> expected;      ///< that are not 0 in the reference
  bool has_hidden = false;  ///< a row is not 0, and as far off could not be seen in another row
};

Rows rows_of(const Evidence& e, const View& view) {
  Rows rows;
  const double typical = norm_of(e.whole) / std::sqrt(static_cast<double>(e.whole.size(0)));
  for (std::int64_t row = 0; row < view.actual.size(0); ++row) {
    const std::int64_t id = row + view.box.global_offset[0];
    const Values right = view.expected.narrow(0, row, 1), seen = view.actual.narrow(0, row, 1);
    const double norm = norm_of(right), error = distance(seen, right);
    if (norm > 0) rows.expected.insert(id);
    // what a row is off by rounding depends on the largest summands, which a small sum hides
    const double hidden = 4 * e.noise() * std::max(norm, typical);
    const bool is_right = norm == 0 ? error == 0 : error <= hidden;
    (is_right ? rows.right : rows.wrong).insert(id);
    rows.has_hidden = rows.has_hidden || (!is_right && error <= hidden);
  }
  return rows;
}

Values row_of(const Values& matrix, const View& view, std::int64_t id) {
  return matrix.narrow(0, id - view.box.global_offset[0], 1);
}

/// One row has besides its own what belongs to all rows that the rank does not hold.
bool collects_foreign_rows(const Evidence& e, const View& view, std::int64_t id) {
  const std::int64_t begin = view.box.global_offset[0], end = begin + view.box.size[0];
  if (view.box.size[1] != e.whole.size(1) || view.box.size[0] == e.whole.size(0)) return false;
  const Values extra = row_of(view.actual, view, id) - row_of(view.expected, view, id);
  const Values all = e.whole.sum(0), own = e.whole.narrow(0, begin, end - begin).sum(0);
  const Values foreign = (all - own).reshape({1, all.numel()});
  return is_telling(foreign) && distance(extra, foreign) <= 1e-3 * norm_of(foreign);
}

/// The gradients of an embedding's outputs by id, over all micro-batches; empty if not recorded.
std::map<std::int64_t, std::vector<Values>> gradients_by_id(const Evidence& e,
                                                            const IdCounts& ids) {
  std::map<std::int64_t, std::vector<Values>> by_id;
  const std::string module = parent_of(e.wanted.key.name);
  for (int call = 0; call < e.num_micro_batches(); ++call) {
    const RecordKey output{e.wanted.key.step, RecordKind::kActivationGrad, module, call},
        read{e.wanted.key.step, RecordKind::kDataId, ids.name, call};
    const Record* record = e.reference.find(output);
    if (record == nullptr || e.reference.find(read) == nullptr) return {};
    const Values dy = (e.reference_value(output) / record->grad_scale).rows(),
                 own = e.reference_value(read).contiguous();
    if (dy.size(0) != own.numel()) return {};
    for (std::int64_t i = 0; i < own.numel(); ++i)
      by_id[static_cast<std::int64_t>(own.flat()[static_cast<std::size_t>(i)])].push_back(
          dy.narrow(0, i, 1));
  }
  return by_id;
}

/// Whether rows that must be 0 have the gradients of their ids' outputs, which are not 0. Rows
/// whose outputs have no gradient got theirs from a wrong tensor before.
bool have_gradients_of_outputs(const Evidence& e, const View& view,
                               const std::set<std::int64_t>& rows, const IdCounts& ids) {
  const auto by_id = gradients_by_id(e, ids);
  return !by_id.empty() && std::ranges::all_of(rows, [&](std::int64_t id) {
    const auto found = by_id.find(id);
    if (found == by_id.end()) return false;
    const Values seen = row_of(view.actual, view, id);
    Values sum = Values::zeros(seen.shape());
    for (const Values& one : found->second)
      sum = sum + one.narrow(1, view.box.global_offset[1], view.box.size[1]);
    return distance(seen, sum) <= std::max(4 * e.tolerance(), 1e-4) * norm_of(sum);
  });
}

/// Rows that no id of the batch, or none with a gradient, stands for.
Cause rows_that_should_be_zero(const Evidence& e, const View& view, const Rows& rows,
                               const IdCounts& ids) {
  if (rows.wrong.empty() || rows.has_hidden ||
      std::ranges::any_of(rows.wrong, [&](std::int64_t id) {
        return rows.expected.contains(id) || !is_filled(row_of(view.actual, view, id));
      }))
    return {};
  const auto absent =
      std::ranges::count_if(rows.wrong, [&](std::int64_t id) { return ids.of(id) == 0; });
  if (rows.wrong.size() == 1 && collects_foreign_rows(e, view, *rows.wrong.begin()))
    return make_cause(CauseId::kForeignIdsNotMasked,
                      {{"row", *rows.wrong.begin()}, e.on_bad_ranks()});
  if (rows.expected.empty()) return {};
  const auto present = std::ssize(rows.wrong) - absent;
  NamedValues values = {{"record", ids.name},
                        {"num_rows", rows.wrong.size()},
                        NamedValue::words("first_rows", some_of(rows.wrong)),
                        e.on_bad_ranks()};
  values.emplace_back("rows", rows.wrong);
  if (absent == 0)
    return have_gradients_of_outputs(e, view, rows.wrong, ids)
               ? make_cause(CauseId::kRowsWithoutGradient, std::move(values))
               : Cause();
  if (present != 0) {
    values.emplace_back("present", present);
    values.push_back(
        NamedValue::words("and_present", phrase(PhraseId::kAndPresent, {{"present", present}})));
  }
  return make_cause(CauseId::kRowsOfAbsentIds, std::move(values));
}

/// Rows of ids that occur once are right, and those of repeated ids have one occurrence's gradient,
/// or the mean over occurrences.
Cause rows_not_summed(const Evidence& e, const View& view, const Rows& rows, const IdCounts& ids) {
  if (std::ssize(rows.wrong) < kLeastRows) return {};
  if (std::ranges::any_of(rows.wrong, [&](std::int64_t id) { return ids.of(id) < 2; })) return {};
  const auto near = [&](const Values& a, const Values& b) {
    return distance(a, b) <= std::max(4 * e.tolerance(), 1e-4) * norm_of(b);
  };
  const bool is_mean = std::ranges::all_of(rows.wrong, [&](std::int64_t id) {
    const Values right = row_of(view.expected, view, id);
    return norm_of(right) > 0 &&
           near(row_of(view.actual, view, id), right / static_cast<double>(ids.of(id)));
  });
  NamedValues values = {{"num_rows", rows.wrong.size()}, {"record", ids.name}, e.on_bad_ranks()};
  values.emplace_back("rows", rows.wrong);
  if (is_mean) return make_cause(CauseId::kRepeatedIdsAveraged, std::move(values));
  const auto by_id = gradients_by_id(e, ids);
  if (by_id.empty()) return {};
  bool are_last = true;
  for (const std::int64_t id : rows.wrong) {
    const auto found = by_id.find(id);
    if (found == by_id.end()) return {};
    const Values seen = row_of(view.actual, view, id);
    const auto matches = [&](const Values& one) {
      const Values own = one.narrow(1, view.box.global_offset[1], view.box.size[1]);
      return norm_of(own) == 0 ? norm_of(seen) == 0 : near(seen, own);
    };
    if (std::ranges::none_of(found->second, matches)) return {};
    are_last = are_last && matches(found->second.back());
  }
  values.emplace_back("is_last_occurrence", are_last);
  values.push_back(
      NamedValue::words("which", phrase(are_last ? PhraseId::kTheLast : PhraseId::kAnyOne)));
  return make_cause(CauseId::kRepeatedIdsNotSummed, std::move(values));
}

/// The wrong tokens all have one row of the weight more than their own.
std::optional<std::int64_t> row_added(const Evidence& e, const Values& seen, const Values& right,
                                      const std::vector<std::int64_t>& tokens,
                                      const Values& weight) {
  const auto extra = [&](std::int64_t token) {
    return seen.narrow(0, token, 1) - right.narrow(0, token, 1);
  };
  if (std::ssize(tokens) < kLeastRows) return std::nullopt;
  const Values row = extra(tokens.front());
  const auto near = [&](const Values& a, double of) {
    return distance(a, row) <= std::max(4 * e.tolerance(), 1e-3) * of;
  };
  for (const std::int64_t token : tokens)
    if (!near(extra(token), norm_of(row) + norm_of(right.narrow(0, token, 1)))) return std::nullopt;
  for (std::int64_t id = 0; id < weight.size(0) && is_telling(row); ++id)
    if (near(weight.narrow(0, id, 1), norm_of(row))) return id;
  return std::nullopt;
}

/// Of an embedding's output: the tokens that are wrong have the row of another id, so many on, or
/// besides their own.
Cause other_ids_read(const Evidence& e, const View& view) {
  constexpr std::int64_t kMostAway = 8;
  const RecordKey weight_key{e.wanted.key.step == 0 ? 0 : e.wanted.key.step - 1, RecordKind::kParam,
                             e.wanted.key.name + ".weight", e.wanted.key.step == 1 ? 1 : 0};
  const Record* weight_record = e.reference.find(weight_key);
  if (weight_record == nullptr || view.box.size.size() != 3 ||
      weight_record->layout.global_shape.size() != 2 ||
      weight_record->layout.global_shape[1] != e.wanted.layout.global_shape[2])
    return {};
  const Shape &offset = view.box.global_offset, &size = view.box.size;
  const Values weight = e.reference_value(weight_key).narrow(1, offset[2], size[2]);
  const RecordKey ids_key{e.wanted.key.step, RecordKind::kDataId, "input_ids", e.wanted.key.call};
  const Record* const ids_record = e.reference.find(ids_key);
  if (ids_record == nullptr || is_floating(ids_record->dtype)) return {};
  const Values ids =
      e.reference_value(ids_key).cut({offset[0], offset[1]}, {size[0], size[1]}).flattened();
  const Values seen = view.actual.rows(), right = view.expected.rows();
  std::map<std::int64_t, std::int64_t> wrong;  // token by id
  std::vector<std::int64_t> tokens;
  for (std::int64_t i = 0; i < seen.size(0); ++i) {
    const Values own = right.narrow(0, i, 1);
    if (distance(seen.narrow(0, i, 1), own) <= 4 * e.tolerance() * norm_of(own)) continue;
    wrong.emplace(static_cast<std::int64_t>(ids.flat()[static_cast<std::size_t>(i)]), i);
    tokens.push_back(i);
  }
  if (const auto added = row_added(e, seen, right, tokens, weight))
    return make_cause(CauseId::kRowAddedToForeignIds, {{"num_tokens", tokens.size()},
                                                       {"num_ids", wrong.size()},
                                                       {"row", *added},
                                                       {"parameter", weight_key.name},
                                                       e.on_bad_ranks()});
  if (std::ssize(wrong) < kLeastRows) return {};
  for (std::int64_t by = 1; by <= kMostAway; ++by) {
    for (const std::int64_t away : {by, -by}) {
      std::ptrdiff_t fitting = 0, zero = 0;
      for (const auto& [id, token] : wrong) {
        const Values own = seen.narrow(0, token, 1);
        const bool is_in = id + away >= 0 && id + away < weight.size(0);
        // the last ids of a shard read beyond it, which is masked
        if (norm_of(own) == 0) ++zero;
        if (is_in && is_telling(own) &&
            distance(own, weight.narrow(0, id + away, 1)) <= 1e-3 * norm_of(own))
          ++fitting;
      }
      if (fitting < kLeastRows || fitting + zero < std::ssize(wrong) || zero > 2 * by) continue;
      return make_cause(CauseId::kRowsOfOtherIds, {{"num_ids", wrong.size()},
                                                   {"first", wrong.begin()->first},
                                                   {"last", wrong.rbegin()->first},
                                                   {"sign", away > 0 ? "+" : "-"},
                                                   {"away", by},
                                                   {"parameter", weight_key.name},
                                                   e.on_bad_ranks()});
    }
  }
  return {};
}

/// Whether a tensor [B,S,V] is what the loss is made from: the last activation of the pass that has
/// a row for each label.
bool is_of_logits(const Evidence& e) {
  const RecordKey labels{e.wanted.key.step, RecordKind::kDataId, "labels", e.wanted.key.call};
  const Record* record = e.reference.find(labels);
  const Shape& own = e.wanted.layout.global_shape;
  if (record == nullptr || own.size() != 3 || record->layout.global_shape != Shape{own[0], own[1]})
    return false;
  const Record* last = nullptr;
  for (const Record& other : e.reference.trace().ranks.at(0).records) {
    if (other.key.kind == RecordKind::kActivation && other.key.step == e.wanted.key.step &&
        other.key.call == e.wanted.key.call && other.layout.global_shape.size() == 3)
      last = &other;
  }
  return last != nullptr && last->key.name == e.wanted.key.name;
}

/// Whether in each row what is not the target's differs by a factor of the row: the softmax of a
/// rank's own columns. The target's is the only one below 0.
bool is_scaled_by_row(const Evidence& e, const View& view) {
  const Values seen = view.actual.rows(), right = view.expected.rows();
  std::int64_t told = 0;
  std::set<double> factors;
  for (std::int64_t row = 0; row < seen.size(0); ++row) {
    const Values own = seen.narrow(0, row, 1).contiguous(),
                 wanted = right.narrow(0, row, 1).contiguous();
    double products = 0, squares = 0, wrong = 0, all = 0;
    std::int64_t count = 0;
    for (std::size_t i = 0; i < own.flat().size(); ++i) {
      if (wanted.flat()[i] <= 0) continue;
      products += own.flat()[i] * wanted.flat()[i];
      squares += wanted.flat()[i] * wanted.flat()[i];
      ++count;
    }
    if (squares == 0) continue;
    if (count < 8) return false;
    const double factor = products / squares;
    for (std::size_t i = 0; i < own.flat().size(); ++i) {
      if (wanted.flat()[i] <= 0) continue;
      wrong += std::pow(own.flat()[i] - factor * wanted.flat()[i], 2);
      all += std::pow(own.flat()[i], 2);
    }
    if (!(std::sqrt(wrong) <= std::max(10 * e.tolerance(), 1e-3) * std::sqrt(all))) return false;
    if (!is_near(factor, 1, 1e-2)) ++told;
    factors.insert(std::round(factor * 1e6));
  }
  return told >= kLeastRows && factors.size() > 2;
}

/// Whether the difference is at a row's target alone, everywhere what the target lacks.
bool lacks_target(const View& view) {
  const Values difference = (view.actual - view.expected).rows(), right = view.expected.rows();
  std::int64_t told = 0;
  for (std::int64_t row = 0; row < right.size(0); ++row) {
    const Values wanted = right.narrow(0, row, 1).contiguous(),
                 off = difference.narrow(0, row, 1).contiguous();
    const double scale = norm_of(wanted);
    for (std::size_t i = 0; i < off.flat().size(); ++i) {
      const bool is_target = wanted.flat()[i] < 0;
      if (!is_target && std::fabs(off.flat()[i]) > 1e-3 * scale) return false;
      if (!is_target) continue;
      // what is left is the probability
      if (view.actual.rows().narrow(0, row, 1).contiguous().flat()[i] < 0) return false;
      ++told;
    }
  }
  return told >= kLeastRows;
}

/// The one column of a rank's part where all rows whose target other ranks hold are wrong, and
/// nothing else is.
std::optional<std::int64_t> column_of_foreign_targets(const Evidence& e, const View& view) {
  const std::int64_t begin = view.box.global_offset[2], end = begin + view.box.size[2];
  if (view.box.size[2] == e.whole.size(2)) return std::nullopt;
  Shape offset = view.box.global_offset, size = view.box.size;
  offset[2] = 0;
  size[2] = e.whole.size(2);
  const Values whole = e.whole.cut(offset, size).rows(), seen = view.actual.rows(),
               right = view.expected.rows();
  std::optional<std::int64_t> column;
  std::int64_t told = 0;
  for (std::int64_t row = 0; row < whole.size(0); ++row) {
    const Values wanted = whole.narrow(0, row, 1).contiguous(),
                 off = (seen.narrow(0, row, 1) - right.narrow(0, row, 1)).contiguous();
    const auto lowest = std::ranges::min_element(wanted.flat());
    const std::int64_t target = lowest - wanted.flat().begin();
    const double scale = norm_of(wanted);
    std::vector<std::int64_t> wrong;
    for (std::int64_t c = 0; c < off.numel(); ++c)
      if (std::fabs(off.flat()[static_cast<std::size_t>(c)]) > 1e-2 * scale) wrong.push_back(c);
    const bool is_foreign = *lowest < 0 && (target < begin || target >= end);
    if (wrong.size() != (is_foreign ? 1U : 0U)) return std::nullopt;
    if (!is_foreign) continue;
    if (column.value_or(wrong[0]) != wrong[0]) return std::nullopt;
    column = wrong[0];
    ++told;
  }
  return told >= kLeastRows ? column : std::nullopt;
}

/// Of bad ranks that all subtract other ranks' targets somewhere.
Cause foreign_targets(const Evidence& e) {
  const std::vector<const View*> bad = e.bad_views();
  std::optional<std::int64_t> column;
  for (const View* view : bad) {
    column = column_of_foreign_targets(e, *view);
    if (!column.has_value()) return {};
  }
  if (!column.has_value()) return {};
  return make_cause(CauseId::kForeignTargetsNotMasked, {{"column", *column}, e.on_bad_ranks()});
}

}  // namespace

Cause cause_vocabulary_rows(const Evidence& e) {
  const std::vector<const View*> bad = e.bad_views();
  if (bad.empty() || !e.whole.defined()) return {};
  if (e.wanted.key.kind == RecordKind::kActivation) return other_ids_read(e, *bad.front());
  if (e.whole.dim() != 2) return {};
  std::set<std::int64_t> expected;
  for (std::int64_t row = 0; row < e.whole.size(0); ++row) {
    if (norm_of(e.whole.narrow(0, row, 1)) > 0) expected.insert(row);
  }
  // a tied weight, or one that is no embedding, has no row of 0
  if (std::cmp_equal(expected.size(), e.whole.size(0)) || expected.empty()) return {};
  const auto ids = ids_with(e, expected);
  if (!ids.has_value()) return {};
  Cause first;
  for (const View* view : bad) {
    const Rows rows = rows_of(e, *view);
    Cause cause = rows_that_should_be_zero(e, *view, rows, *ids);
    if (cause.empty()) cause = rows_not_summed(e, *view, rows, *ids);
    if (cause.empty()) return {};
    if (first.empty()) first = std::move(cause);
  }
  return first;
}

Cause cause_logit_rows(const Evidence& e) {
  if (!e.whole.defined() || !is_of_logits(e)) return {};
  if (Cause cause = foreign_targets(e); !cause.empty()) return cause;
  // rows are whole where the parts of all ranks are put together
  Values seen = e.whole;
  std::vector<double> numbers(e.whole.flattened().flat().begin(), e.whole.flattened().flat().end());
  const Shape& shape = e.whole.shape();
  for (const View& view : e.views) {
    const Values own = view.actual.contiguous();
    std::size_t next = 0;
    const Shape &at = view.box.global_offset, &size = view.box.size;
    for (std::int64_t b = 0; b < size[0]; ++b) {
      for (std::int64_t s = 0; s < size[1]; ++s) {
        for (std::int64_t v = 0; v < size[2]; ++v) {
          const std::int64_t place = ((at[0] + b) * shape[1] + at[1] + s) * shape[2] + at[2] + v;
          numbers[static_cast<std::size_t>(place)] = own.flat()[next++];
        }
      }
    }
  }
  seen = Values(shape, std::move(numbers)).rows();
  const Values right = e.whole.rows();
  const bool is_wide = e.wanted.dtype == Dtype::kFloat32 || e.wanted.dtype == Dtype::kFloat64;
  const double near = is_wide ? 1e-3 : 0x1p-6;  // of a sum whose summands were rounded
  std::int64_t told = 0, off = 0;
  double worst = 0;
  for (std::int64_t row = 0; row < right.size(0); ++row) {
    const Values wanted = right.narrow(0, row, 1), own = seen.narrow(0, row, 1);
    const double size = wanted.map([](double value) { return std::fabs(value); }).sum();
    if (size == 0) continue;
    if (std::fabs(wanted.sum()) > near * size) return {};  // the right ones do not, either
    ++told;
    const double own_size = own.map([](double value) { return std::fabs(value); }).sum();
    const double share = own_size == 0 ? 0 : std::fabs(own.sum()) / own_size;
    if (share > 2 * near) ++off;
    worst = std::max(worst, share);
  }
  if (told < kLeastRows || off < 0.9 * static_cast<double>(told)) return {};
  const std::vector<const View*> bad = e.bad_views();
  CauseId id = CauseId::kLogitRowsNotZero;
  if (!bad.empty() && std::ranges::all_of(bad, [&](const View* v) { return lacks_target(*v); }))
    id = CauseId::kTargetNotSubtracted;
  else if (!bad.empty() &&
           std::ranges::all_of(bad, [&](const View* v) { return is_scaled_by_row(e, *v); }))
    id = CauseId::kSoftmaxOfOwnColumns;
  return make_cause(id, {{"off", off}, {"num_rows", told}, {"worst", worst}});
}

Cause cause_uncounted_tokens(const Evidence& e) {
  constexpr std::int64_t kLeastRight = 8;
  const std::vector<const Record*> all = labels_of_step(e);
  const auto labels = std::ranges::find_if(
      all, [&](const Record* record) { return record->key.call == e.wanted.key.call; });
  const Record* const head = labels == all.end() ? nullptr : logits_beside(e, **labels);
  const std::vector<const View*> bad = e.bad_views();
  if (bad.empty() || head == nullptr || head->key.name != e.wanted.key.name || e.whole.dim() != 3)
    return {};
  const Values own = e.reference_value((*labels)->key);
  std::set<std::int64_t> with_target;
  for (const Target& target : targets_in(own, e.whole.size(2))) with_target.insert(target.row);
  const double near = 4 * e.noise();
  std::set<std::int64_t> wrong, right;
  for (const View* const view : bad) {
    const Values seen = view->actual.rows(), wanted = view->expected.rows();
    for (std::int64_t row = 0; row < seen.size(0); ++row) {
      const std::int64_t tokens = view->box.size[1],
                         place = (view->box.global_offset[0] + row / tokens) * e.whole.size(1) +
                                 view->box.global_offset[1] + row % tokens;
      const Values mine = seen.narrow(0, row, 1), theirs = wanted.narrow(0, row, 1);
      const bool has_target = with_target.contains(place);
      if (has_target && distance(mine, theirs) > near * norm_of(theirs)) return {};
      if (has_target) right.insert(place);
      if (has_target || norm_of(theirs) != 0 || norm_of(mine) == 0) continue;
      if (!is_filled(mine)) return {};
      wrong.insert(place);
    }
  }
  if (wrong.empty() || std::ssize(right) < kLeastRight) return {};
  return make_cause(CauseId::kUncountedTokens, {{"num_tokens", wrong.size()}, e.on_bad_ranks()});
}

}  // namespace isoshard::detail
