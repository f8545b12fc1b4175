// SPDX-License-Identifier: Apache-2.0
/// Sample ids, flags and loss scales: numbers of which sums and factors of the run say nothing.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "harness/causes/class_causes.h"
#include "harness/causes/run_causes.h"
#include "harness/ids/phrase.h"

namespace isoshard::detail {
namespace {

using Ids = std::vector<std::int64_t>;

/// What the run had of a record of ids: the reference's, but where ranks kept something else.
std::optional<Ids> ids_in_run(const Evidence& e, const RecordKey& key) {
  const Record* record = e.reference.find(key);
  if (record == nullptr || record->layout.global_shape.size() != 1) return std::nullopt;
  Ids ids = whole_numbers(e.reference_value(key));
  for (const RankTrace& rank : e.actual.ranks) {
    const Record* own = rank.find(key);
    if (own == nullptr) continue;
    const bool is_right = std::ranges::all_of(
        own->parts, [](const PartStats& part) { return part.stats.unequal_values == 0; });
    if (is_right) continue;
    if (!own->kept || rank.arena == nullptr || own->parts.size() != 1 || is_flat(own->layout) ||
        own->parts[0].box.size.size() != 1)
      return std::nullopt;
    const Ids held = whole_numbers(Values(rank.tensor(*own)));
    const Box& box = own->parts[0].box;
    for (std::int64_t i = 0; i < box.size[0]; ++i) {
      const std::int64_t to = box.global_offset[0] + i, from = box.local_offset[0] + i;
      if (to >= std::ssize(ids) || from >= std::ssize(held)) return std::nullopt;
      ids[static_cast<std::size_t>(to)] = held[static_cast<std::size_t>(from)];
    }
  }
  return ids;
}

/// Ids of steps 0 to `last`, of the run and of the reference.
struct History {
  std::map<std::int64_t, int> run, reference;
};

std::optional<History> history_of(const Evidence& e) {
  History history;
  for (int step = 0; step <= e.wanted.key.step; ++step) {
    for (int call = 0;; ++call) {
      const RecordKey key{step, e.wanted.key.kind, e.wanted.key.name, call};
      if (e.reference.find(key) == nullptr) break;
      const auto own = ids_in_run(e, key);
      if (!own.has_value()) return std::nullopt;
      for (const std::int64_t id : *own) ++history.run[id];
      for (const std::int64_t id : whole_numbers(e.reference_value(key))) ++history.reference[id];
    }
  }
  return history;
}

/// The ids that are seen too often or never, and the words for them; empty if there are none.
NamedValues repeats_and_gaps(const Evidence& e) {
  const auto history = history_of(e);
  if (!history.has_value()) return {};
  std::set<std::int64_t> repeated, missed, others;
  for (const auto& [id, times] : history->run) {
    const auto right = history->reference.find(id);
    if (right == history->reference.end()) {
      others.insert(id);
      if (times > 1) repeated.insert(id);
    } else if (times > right->second) {
      repeated.insert(id);
    }
  }
  for (const auto& [id, times] : history->reference) {
    const auto own = history->run.find(id);
    if (own == history->run.end()) missed.insert(id);
  }
  NamedValues values;
  std::vector<std::string> counts;
  const auto tell = [&](std::string_view name, PhraseId id, const std::set<std::int64_t>& ids) {
    if (ids.empty()) return;
    counts.push_back(phrase(id, {{"ids", some_of(ids)}}));
    values.emplace_back(name, ids);
  };
  tell("repeated", PhraseId::kIdsSeenMoreOften, repeated);
  tell("missed", PhraseId::kIdsMissed, missed);
  tell("foreign", PhraseId::kIdsForeign, others);
  if (counts.empty()) return {};
  const int last = e.wanted.key.step;
  values.emplace_back("last_step", last);
  values.push_back(NamedValue::words("until", last == 0
                                                  ? phrase(PhraseId::kInStepZero)
                                                  : phrase(PhraseId::kInSteps, {{"last", last}})));
  values.push_back(NamedValue::words("counts", fmt::format("{}", fmt::join(counts, "; "))));
  return values;
}

}  // namespace

Cause cause_sample_ids(const Evidence& e) {
  // token ids repeat, and a shift of them means nothing
  if (e.wanted.layout.global_shape.size() != 1 || e.whole.numel() < 2) return {};
  const auto own = ids_in_run(e, e.wanted.key);
  if (!own.has_value()) return {};
  const Ids right = whole_numbers(e.reference_value(e.wanted.key));
  // what comes next must not be what was there already
  const RecordName name = parsed(e.wanted.key);
  const bool is_next = name.role == NameRole::kNext;
  for (int back = is_next ? 0 : 1; back <= e.wanted.key.step; ++back) {
    RecordKey key = e.wanted.key;
    key.step -= back;
    if (is_next) key.name = name.base;
    const Record* earlier = e.reference.find(key);
    if (earlier != nullptr && whole_numbers(e.reference_value(key)) == *own)
      return make_cause(CauseId::kIdsOfEarlierStep, {{"step", key.step}});
  }
  std::set<std::int64_t> differences;
  for (std::size_t i = 0; i < right.size(); ++i) differences.insert((*own)[i] - right[i]);
  NamedValues values = repeats_and_gaps(e);
  if (differences.size() == 1 && right.size() >= 3) {
    const std::int64_t by = *differences.begin();
    if (!values.empty())
      values.push_back(NamedValue::words("and_ids", phrase(PhraseId::kAndIds, values)));
    values.emplace_back("by", by > 0 ? by : -by);
    return make_cause(by > 0 ? CauseId::kIdsTooLarge : CauseId::kIdsTooSmall, std::move(values));
  }
  return values.empty() ? Cause() : make_cause(CauseId::kIdsMiscounted, std::move(values));
}

namespace {

/// The numbers of a sample in row-major order.
using Sample = std::vector<double>;

std::vector<Sample> samples_in(const Values& inputs) {
  const Values own = inputs.contiguous();
  const std::int64_t count = own.size(0), each = count == 0 ? 0 : own.numel() / count;
  std::vector<Sample> samples;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto numbers =
        own.flat().subspan(static_cast<std::size_t>(i * each), static_cast<std::size_t>(each));
    samples.emplace_back(numbers.begin(), numbers.end());
  }
  return samples;
}

/// The samples of a step, each with a number of its own.
std::map<Sample, int> known_samples(const Evidence& e, int step) {
  std::map<Sample, int> known;
  for (int call = 0;; ++call) {
    const RecordKey key{step, e.wanted.key.kind, e.wanted.key.name, call};
    if (e.reference.find(key) == nullptr) return known;
    for (Sample& sample : samples_in(e.reference_value(key)))
      known.emplace(std::move(sample), static_cast<int>(known.size()));
  }
}

/// The most frequent token of samples, which may fill them up. Labels that do not count are
/// negative and no filler: where they stand says which sample it is.
double filler_of(const std::vector<Sample>& samples) {
  std::map<double, std::int64_t> counts;
  for (const Sample& sample : samples) {
    for (const double token : sample) ++counts[token];
  }
  double filler = std::numeric_limits<double>::quiet_NaN();
  std::int64_t most = 0;
  for (const auto& [token, count] : counts) {
    if (count > most) std::tie(filler, most) = std::pair(token, count);
  }
  return filler < 0 ? std::numeric_limits<double>::quiet_NaN() : filler;
}

/// Whether a quarter of the tokens, and at least 4, are those of the other sample, at the same
/// places or all as many places further on. Fewer tokens are often alike by chance, and `filler`
/// always is.
bool resembles_tokens(const Sample& sample, const Sample& other, double filler) {
  constexpr std::int64_t kLeast = 4;
  const auto length = std::ssize(sample);
  const std::int64_t own = std::max<std::int64_t>(1, length - std::ranges::count(sample, filler));
  const std::int64_t enough = std::min(own, std::max(kLeast, (own + 3) / 4));
  for (std::int64_t shift = 1 - length; shift < length; ++shift) {
    std::int64_t alike = 0;
    for (std::int64_t i = std::max<std::int64_t>(0, shift); i < std::min(length, length + shift);
         ++i)
      alike += sample[static_cast<std::size_t>(i)] != filler &&
               sample[static_cast<std::size_t>(i)] == other[static_cast<std::size_t>(i - shift)];
    if (alike >= enough) return true;
  }
  return false;
}

/// Whether three quarters of the tokens differ from those of the other sample by one number. Where
/// both have the filler, they show nothing.
bool has_offset_from(const Sample& sample, const Sample& other, double filler) {
  std::map<double, std::int64_t> differences;
  std::int64_t all = 0;
  for (std::size_t i = 0; i < std::min(sample.size(), other.size()); ++i) {
    if (sample[i] == filler && other[i] == filler) continue;
    ++differences[sample[i] - other[i]];
    ++all;
  }
  return std::ranges::any_of(
      differences, [&](const auto& difference) { return 4 * difference.second >= 3 * all; });
}

/// Whether numbers are nearly a multiple of others, but for an offset.
bool resembles_numbers(const Sample& sample, const Sample& other, Dtype dtype) {
  constexpr double kClearly = 0.9;  // of a correlation
  const auto numbers_of = [&](const Sample& recorded) {
    const Values own({std::ssize(recorded)}, recorded), floats = floats_in_bits(own, dtype);
    return floats.defined() ? floats : own;
  };
  const Values a = numbers_of(sample), b = numbers_of(other);
  const Values mine = a - a.mean(), theirs = b - b.mean();
  return std::fabs(dot(mine, theirs)) >= kClearly * norm_of(mine) * norm_of(theirs);
}

/// Samples of ranks, each share of the batch once.
struct OwnSamples {
  std::vector<double> numbers;  ///< of those that are known
  std::set<int> ranks;          ///< that have others
  /// By the share's first place: how many others it has, and how many samples.
  std::map<std::int64_t, std::pair<std::int64_t, std::int64_t>> foreign;
  std::set<int> steps;  ///< of the reference, to which the others belong; below 0: none
};

}  // namespace

Cause cause_in_samples(const Evidence& e) {
  constexpr std::int64_t kMostCompared = std::int64_t{1} << 28;
  const Shape& shape = e.wanted.layout.global_shape;
  if (!e.whole.defined() || shape.size() < 2 || e.whole.numel() == 0) return {};
  const bool is_of_numbers =
      is_floating(e.wanted.dtype) || floats_in_bits(e.whole, e.wanted.dtype).defined();
  const std::int64_t each = e.whole.numel() / shape[0];
  if (!is_of_numbers && e.whole.numel() * shape[0] * each > kMostCompared) return {};
  const std::map<Sample, int> known = known_samples(e, e.wanted.key.step);
  const std::vector<Sample> right = samples_in(e.whole);
  const double filler = is_of_numbers ? std::numeric_limits<double>::quiet_NaN() : filler_of(right);
  std::vector<std::map<Sample, int>> of_step;
  for (int step = 0; e.reference.find({step, e.wanted.key.kind, e.wanted.key.name, 0}) != nullptr;
       ++step)
    of_step.push_back(known_samples(e, step));
  const auto step_of = [&](const Sample& sample) {
    for (std::size_t step = 0; step < of_step.size(); ++step) {
      if (of_step[step].contains(sample)) return static_cast<int>(step);
    }
    return -1;
  };
  OwnSamples own;
  std::map<std::int64_t, std::vector<Sample>> places;
  for (const Held& held : e.held) {
    const int rank = held.rank->rank;
    std::vector<std::pair<Box, Values>> boxes;
    for (const View& view : e.views) {
      if (view.rank == rank) boxes.emplace_back(view.box, view.actual);
    }
    if (const std::optional<Box> box = e.place_on(held); boxes.empty() && box.has_value())
      boxes.emplace_back(*box, e.whole.cut(box->global_offset, box->size));
    if (boxes.empty()) return {};
    std::int64_t foreign = 0, all = 0;
    for (const auto& [box, values] : boxes) {
      if (numel_of(box.size) != box.size[0] * each) return {};
      const std::vector<Sample> samples = samples_in(values);
      const auto [place, is_new] = places.emplace(box.global_offset[0], samples);
      if (place->second != samples) return {};  // copies differ: not one order of the samples
      all += std::ssize(samples);
      for (std::size_t i = 0; i < samples.size(); ++i) {
        const Sample& sample = samples[i];
        if (const auto found = known.find(sample); found != known.end()) {
          if (is_new) own.numbers.push_back(found->second);
          continue;
        }
        ++foreign;
        const int step = step_of(sample);
        own.steps.insert(step);
        if (step >= 0) continue;
        const Sample& at_its_place = right[static_cast<std::size_t>(box.global_offset[0]) + i];
        const bool is_changed = is_of_numbers
                                    ? resembles_numbers(sample, at_its_place, e.wanted.dtype)
                                    : has_offset_from(sample, at_its_place, filler) ||
                                          std::ranges::any_of(right, [&](const Sample& other) {
                                            return resembles_tokens(sample, other, filler);
                                          });
        if (is_changed) return {};
      }
    }
    if (foreign == 0) continue;
    own.ranks.insert(rank);
    own.foreign[boxes.front().first.global_offset[0]] = {foreign, all};
  }
  if (own.ranks.empty()) {
    std::vector<double> wanted;
    for (const Sample& sample : right) wanted.push_back(known.at(sample));
    const auto as_values = [](std::vector<double> numbers) {
      const Shape count = {std::ssize(numbers)};
      return Values(count, std::move(numbers));
    };
    return cause_of_repeats(e, as_values(std::move(wanted)), as_values(std::move(own.numbers)),
                            "samples");
  }
  std::int64_t foreign = 0, all = 0;
  for (const auto& [place, counts] : own.foreign) {
    foreign += counts.first;
    all += counts.second;
  }
  NamedValues values = {{"foreign", foreign}, {"samples", all}, {"ranks", own.ranks}};
  if (own.steps.size() == 1 && *own.steps.begin() >= 0) {
    values.emplace_back("step", *own.steps.begin());
    values.push_back(NamedValue::words("of_step", phrase(PhraseId::kTheyAreOfStep, values)));
  }
  return make_cause(CauseId::kSamplesForeign, std::move(values));
}

Cause cause_flag(const Evidence& e) {
  if (role_of(e.wanted.key) != NameRole::kFoundInf || !e.whole.defined() || e.whole.numel() != 1)
    return {};
  const View* bad = e.first_bad_view();
  if (const double value = bad == nullptr ? 0 : bad->actual.item(); value != 0 && value != 1)
    return make_cause(CauseId::kFlagOutOfRange, {{"value", value}, e.on_bad_ranks()});
  if (e.result.differing_axes.empty()) {
    if (bad == nullptr) return {};
    return make_cause(CauseId::kFlagWrongOnEveryRank,
                      {{"value", bad->actual.item()}, {"expected", e.whole.item()}});
  }
  return make_cause(CauseId::kFlagNotReduced,
                    {{"axes", names_of(e.result.differing_axes)}, e.on_bad_ranks()});
}

namespace {

/// The step before the given one whose gradients overflow, as the reference has it; below 0: none.
int last_overflow_before(const Reference& reference, int step) {
  for (int earlier = step - 1; earlier >= 0; --earlier) {
    const RecordKey flag = scalar_key(earlier, NameRole::kFoundInf);
    if (reference.find(flag) != nullptr && Values(reference.tensor(flag)).max() != 0)
      return earlier;
  }
  return -1;
}

}  // namespace

Cause cause_in_loss_scale(const Evidence& e) {
  const RecordKey& key = e.wanted.key;
  RecordKey before = key;
  --before.step;
  if (role_of(key) != NameRole::kLossScale || e.reference.find(before) == nullptr ||
      !e.is_right(before) || !e.is_right(scalar_key(before.step, NameRole::kFoundInf)))
    return {};
  const View* const bad = e.first_bad_view();
  if (bad == nullptr || bad->actual.numel() != 1) return {};
  const double old = e.reference_value(before).item(), seen = bad->actual.item(),
               right = e.whole.item();
  const int overflow = last_overflow_before(e.reference, key.step);
  const int good = before.step - overflow;
  const auto change = [](double factor) {
    const PhraseId id = factor == 1  ? PhraseId::kStays
                        : factor > 1 ? PhraseId::kGrowsBy
                                     : PhraseId::kShrinksBy;
    return phrase(id, {{"factor", factor}});
  };
  NamedValues values = {{"factor", seen / old},
                        {"expected_factor", right / old},
                        NamedValue::words("change", change(seen / old)),
                        NamedValue::words("expected_change", change(right / old)),
                        e.on_bad_ranks()};
  if (overflow >= 0) values.emplace_back("overflow_step", overflow);
  if (good == 0) {
    const bool is_twice = right < old && is_near(seen / old, right / old * (right / old), 1e-6);
    return make_cause(is_twice ? CauseId::kLossScaleChangedTwice : CauseId::kLossScaleAfterOverflow,
                      std::move(values));
  }
  values.emplace_back("good_steps", good);
  if (overflow >= 0)
    values.push_back(NamedValue::words(
        "since", phrase(PhraseId::kSinceOverflow, {{"overflow_step", overflow}})));
  return make_cause(CauseId::kLossScaleWithoutOverflow, std::move(values));
}

}  // namespace isoshard::detail
