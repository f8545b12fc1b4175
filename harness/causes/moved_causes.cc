// SPDX-License-Identifier: Apache-2.0
/// Right values at wrong places: slices that are repeated, shifted or permuted, and what another
/// rank should hold.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "harness/causes/class_causes.h"
#include "harness/ids/phrase.h"

namespace isoshard::detail {
namespace {

constexpr std::int64_t kMaxShift = 64;

/// The whole reference along `dim`, cut to the view's box in every other dim.
Values line_of(const Evidence& e, const View& view, std::int64_t dim) {
  Values line = e.whole;
  for (std::size_t d = 0; d < view.box.size.size(); ++d) {
    if (static_cast<std::int64_t>(d) != dim)
      line = line.narrow(static_cast<std::int64_t>(d), view.box.global_offset[d], view.box.size[d]);
  }
  return line;
}

Cause repeated(const Evidence& e, const View& view, std::int64_t dim, double error) {
  const std::int64_t size = view.actual.size(dim);
  const Values line = line_of(e, view, dim);
  const double allowed = std::min(e.tolerance() * norm_of(view.actual), 0.25 * error);
  for (std::int64_t times = 2; times <= std::min<std::int64_t>(size, 16); ++times) {
    if (size % times != 0) continue;
    const std::int64_t length = size / times;
    // Where copies of a slice are within `allowed` of the tensor, its first two parts are within
    // sqrt(2) of that of each other.
    const Values first = view.actual.narrow(dim, 0, length);
    if (distance(first, view.actual.narrow(dim, length, length)) > 1.5 * allowed) continue;
    for (std::int64_t begin = 0; begin + length <= line.size(dim); begin += length) {
      const Values slice = line.narrow(dim, begin, length);
      if (norm_of(slice) == 0) continue;  // zeros stand everywhere alike
      const std::vector<Values> copies(static_cast<std::size_t>(times), slice);
      if (!e.explains(concatenated(copies, dim), view.actual, error)) continue;
      const std::int64_t last = begin + length - 1;
      const NamedValues span = {{"first", begin}, {"last", last}};
      const PhraseId positions = length == 1 ? PhraseId::kPosition : PhraseId::kPositions;
      const std::string often =
          times == 2 ? phrase(PhraseId::kTwice) : phrase(PhraseId::kTimes, {{"times", times}});
      return make_cause(CauseId::kSlicesRepeated,
                        {{"rank", view.rank},
                         {"dim", dim},
                         {"first", begin},
                         {"last", last},
                         {"times", times},
                         NamedValue::words("positions", phrase(positions, span)),
                         NamedValue::words("often", often)});
    }
  }
  return {};
}

Cause shifted(const Evidence& e, const View& view, std::int64_t dim) {
  const std::int64_t size = view.actual.size(dim);
  const Values line = line_of(e, view, dim);
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
      if (error > 0 && norm_of(theirs) > 0 && e.explains(mine, theirs, error))
        return make_cause(CauseId::kSlicesShifted,
                          {{"shift", shift}, {"dim", dim}, {"rank", view.rank}});
    }
  }
  return {};
}

/// What the slices of a dim are, where the kind of record says it.
std::string_view slices_of(const Evidence& e, const View& view, std::int64_t dim) {
  const RecordKind kind = e.wanted.key.kind;
  if (kind != RecordKind::kActivation && kind != RecordKind::kActivationGrad)
    return view.actual.dim() == 2 ? (dim == 0 ? "rows" : "columns") : "elements";
  const bool is_by_heads = view.actual.dim() == 4;
  if (dim == 0) return "samples";
  if (dim == 1) return is_by_heads ? "heads" : "tokens";
  return is_by_heads && dim == 2 ? "tokens" : "features";
}

/// " (samples: 0 has 1, 1 has 0)", " (features, in blocks of 16: 0 has 2, ...)": what stands where,
/// as the placeholder `moves`, and the data behind it.
NamedValues permutation_of(const Evidence& e, const View& view, std::int64_t dim,
                           const std::vector<std::int64_t>& from) {
  const auto size = static_cast<std::int64_t>(from.size());
  // the largest blocks that stay together
  std::int64_t block = 1;
  for (std::int64_t b = size / 2; b > 1; --b) {
    bool fits = size % b == 0;
    for (std::int64_t i = 0; fits && i < size; ++i) {
      const auto at = static_cast<std::size_t>(i);
      fits = i % b == 0 ? from[at] % b == 0 : from[at] == from[at - 1] + 1;
    }
    if (!fits) continue;
    block = b;
    break;
  }
  constexpr std::size_t kShown = 4;
  const std::int64_t first =
      view.box.global_offset[static_cast<std::size_t>(dim)] / std::max<std::int64_t>(block, 1);
  std::vector<std::string> words;
  for (std::int64_t i = 0; i < size && words.size() <= kShown; i += block) {
    const std::int64_t own = first + i / block, other = from[static_cast<std::size_t>(i)] / block;
    if (own == other) continue;
    words.push_back(words.size() == kShown
                        ? "..."
                        : phrase(PhraseId::kPlaceHas, {{"place", own}, {"other", other}}));
  }
  NamedValues values = {{"slices", slices_of(e, view, dim)}, {"block", block}, {"order", from}};
  if (words.empty()) return values;
  const std::string blocks =
      block > 1 ? phrase(PhraseId::kInBlocks, {{"block", block}}) : std::string();
  values.push_back(NamedValue::words(
      "moves",
      phrase(PhraseId::kMoves,
             {{"slices", slices_of(e, view, dim)}, {"blocks", blocks}, {"places", words}})));
  return values;
}

Cause permuted(const Evidence& e, const View& view, std::int64_t dim, double error) {
  const Values mine = view.actual.to_front(dim).reshape({view.actual.size(dim), -1});
  const Values line = line_of(e, view, dim);
  const Values theirs = line.to_front(dim).reshape({line.size(dim), -1});
  if (mine.size(0) < 2 || mine.size(0) * theirs.size(0) * mine.size(1) > (std::int64_t{1} << 28))
    return {};
  const std::vector<std::int64_t> nearest = nearest_rows(mine, theirs);
  // a slice stands twice
  if (std::set<std::int64_t>(nearest.begin(), nearest.end()).size() != nearest.size()) return {};
  if (!e.explains(theirs.take(nearest), mine, error)) return {};
  NamedValues values = permutation_of(e, view, dim, nearest);
  values.emplace_back("dim", dim);
  values.emplace_back("rank", view.rank);
  return make_cause(CauseId::kSlicesPermuted, std::move(values));
}

/// Whether every token's features in [batch, sequence, features] are those of some token of the
/// reference.
bool tokens_stand_elsewhere(const Evidence& e, const View& view) {
  if (view.actual.dim() != 3) return false;
  const Values mine = view.actual.rows(), theirs = view.expected.rows();
  if (mine.size(0) * mine.size(0) * mine.size(1) > (std::int64_t{1} << 28)) return false;
  return e.explains(theirs.take(nearest_rows(mine, theirs)), mine, distance(mine, theirs));
}

/// Tokens of [batch, sequence, features] that are those of other samples or ranks. Tokens of the
/// whole reference are searched, as a rank may hold what another one should.
Cause tokens_of_elsewhere(const Evidence& e, const View& view, double error) {
  const RecordKind kind = e.wanted.key.kind;
  if (view.actual.dim() != 3 || e.whole.dim() != 3 ||
      (kind != RecordKind::kActivation && kind != RecordKind::kActivationGrad))
    return {};
  const Values mine = view.actual.rows(),
               theirs = e.whole.narrow(2, view.box.global_offset[2], view.box.size[2]).rows();
  if (mine.size(0) < 2 || mine.size(0) * theirs.size(0) * mine.size(1) > (std::int64_t{1} << 28))
    return {};
  const std::vector<std::int64_t> nearest = nearest_rows(mine, theirs);
  // a token stands twice
  if (std::set<std::int64_t>(nearest.begin(), nearest.end()).size() != nearest.size()) return {};
  if (!e.explains(theirs.take(nearest), mine, error)) return {};
  const std::int64_t own_length = view.box.size[1], length = e.whole.size(1);
  std::vector<std::string> words;
  constexpr std::size_t kShown = 3;
  for (std::size_t i = 0; i < nearest.size() && words.size() <= kShown; ++i) {
    const auto row = static_cast<std::int64_t>(i);
    const std::int64_t sample = view.box.global_offset[0] + row / own_length,
                       token = view.box.global_offset[1] + row % own_length;
    if (nearest[i] == sample * length + token) continue;
    words.push_back(words.size() == kShown
                        ? "..."
                        : phrase(PhraseId::kTokenHas, {{"sample", sample},
                                                       {"token", token},
                                                       {"other_sample", nearest[i] / length},
                                                       {"other_token", nearest[i] % length}}));
  }
  if (words.empty()) return {};
  return make_cause(CauseId::kTokensElsewhere,
                    {{"rank", view.rank},
                     {"order", nearest},
                     NamedValue::words("tokens", fmt::format("{}", fmt::join(words, ", ")))});
}

Cause moved_on(const Evidence& e, const View& view) {
  const double error = distance(view.actual, view.expected);
  if (!(error > e.tolerance() * norm_of(view.expected))) return {};
  for (std::int64_t dim = 0; dim < view.actual.dim(); ++dim) {
    if (Cause cause = repeated(e, view, dim, error); !cause.empty()) return cause;
  }
  for (std::int64_t dim = 0; dim < view.actual.dim(); ++dim) {
    if (Cause cause = shifted(e, view, dim); !cause.empty()) return cause;
  }
  for (std::int64_t dim = 0; dim < view.actual.dim(); ++dim) {
    if (Cause cause = permuted(e, view, dim, error); !cause.empty()) return cause;
  }
  return tokens_of_elsewhere(e, view, error);
}

/// The rank whose place in the reference has what this rank holds.
std::optional<int> owner_of_values(const Evidence& e, const View& view) {
  for (const Held& other : e.held) {
    if (other.rank->rank == view.rank) continue;
    const auto place = e.place_on(other);
    if (!place.has_value() || place->size != view.box.size ||
        place->global_offset == view.box.global_offset)
      continue;
    const Values theirs = e.whole.cut(place->global_offset, place->size);
    const bool is_zero = norm_of(theirs) == 0 && norm_of(view.actual) == 0;
    if (is_zero || e.explains_each(theirs, view)) return other.rank->rank;
  }
  return std::nullopt;
}

}  // namespace

Cause cause_other_ranks(const Evidence& e) {
  const std::vector<const View*> bad = e.bad_views();
  if (bad.empty() || !e.whole.defined()) return {};
  std::vector<int> ranks, owners;
  bool is_told = false;
  for (const View* view : bad) {
    const auto owner = owner_of_values(e, *view);
    if (!owner.has_value()) return {};
    ranks.push_back(view->rank);
    owners.push_back(*owner);
    is_told = is_told || is_telling(view->actual);
  }
  if (!is_told) return {};
  return make_cause(CauseId::kValuesOfOtherRanks, {{"ranks", ranks}, {"owners", owners}});
}

Cause cause_moved_slices(const Evidence& e) {
  // of several boxes of a rank one may be off by roundings alone
  const std::vector<const View*> all_bad = e.bad_views();
  const auto wrong = std::ranges::find_if(all_bad, [&](const View* view) {
    return distance(view->actual, view->expected) > e.tolerance() * norm_of(view->expected);
  });
  const View* const bad = wrong != all_bad.end() ? *wrong : e.first_bad_view();
  if (bad == nullptr) return {};
  std::vector<Cause> causes;
  std::vector<int> ranks;
  for (const View& view : e.views) {
    if (view.box.global_offset != bad->box.global_offset || view.box.size != bad->box.size)
      continue;
    if (Cause cause = moved_on(e, view); !cause.empty() && causes.size() < 4) {
      causes.push_back(std::move(cause));
      ranks.push_back(view.rank);
    }
  }
  if (causes.empty()) return {};
  // Data have no roundings: what explains one rank's alone explains nothing.
  if (e.wanted.key.kind == RecordKind::kDataId &&
      std::ranges::any_of(all_bad, [&](const View* view) { return moved_on(e, *view).empty(); }))
    return {};
  // the first one decides, the others follow in its words
  NamedValues values = causes.front().values;
  for (const auto& [of_one, of_each] : {std::pair("first", "begins"), {"last", "ends"}}) {
    std::vector<std::int64_t> each;
    for (const Cause& cause : causes) {
      if (const auto number = cause.number(of_one))
        each.push_back(static_cast<std::int64_t>(*number));
    }
    if (each.size() == causes.size()) values.emplace_back(of_each, each);
  }
  values.emplace_back("ranks", ranks);
  if (!e.result.differing_axes.empty()) {
    values.push_back(NamedValue::words(
        "copies_differ",
        phrase(PhraseId::kCopiesDifferOver, {{"axes", names_of(e.result.differing_axes)}})));
  }
  std::string others;
  for (std::size_t i = 1; i < causes.size(); ++i) others += "; " + causes[i].text;
  values.push_back(NamedValue::words("others", others));
  return make_cause(causes.front().id, std::move(values));
}

Cause cause_same_values_elsewhere(const Evidence& e) {
  const View* bad = e.first_bad_view();
  if (bad == nullptr || bad->actual.numel() < 8) return {};
  const Values theirs = bad->expected.sorted();
  const double left = distance(bad->actual.sorted(), theirs);
  // Sorting alone brings any two tensors of one distribution near: only equality up to rounding
  // counts.
  if (left > std::min(e.tolerance(), 1e-3) * norm_of(theirs) ||
      left > 0.01 * distance(bad->actual, bad->expected))
    return {};
  if (tokens_stand_elsewhere(e, *bad))
    return make_cause(CauseId::kTokensPermutedBetweenSamples, {{"rank", bad->rank}});
  return make_cause(CauseId::kSameValuesElsewhere, {{"rank", bad->rank}});
}

}  // namespace isoshard::detail
