// SPDX-License-Identifier: Apache-2.0
/// Values that passed through a coarser dtype: their low bits are 0, and they are off by up to half
/// a step of that dtype everywhere.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/dtype.h"
#include "harness/causes/class_causes.h"
#include "harness/trace/parts.h"

namespace isoshard::detail {
namespace {

constexpr int kMostBits = 53;
constexpr std::int64_t kLeastElements = 32;

/// A dtype by the bits of its significand, the leading one counted.
struct Coarse {
  int bits;
  const char* name;
};
constexpr Coarse kCoarse[] = {
    {3, "fp8 (e5m2)"}, {4, "fp8 (e4m3)"}, {8, "bf16"}, {11, "fp16 or TF32"}, {24, "fp32"}};

/// The same of a dtype of records; 0 if it is of integers.
int bits_of(Dtype dtype) {
  const double roundoff = unit_roundoff(dtype);
  return roundoff == 0 ? 0 : -std::ilogb(roundoff);
}

/// How many bits the significand of a number needs; 0 for 0.
int significant_bits(double value) {
  if (value == 0) return 0;
  int exponent = 0;
  const double fraction = std::frexp(value, &exponent);
  auto integer = static_cast<std::int64_t>(std::ldexp(std::fabs(fraction), kMostBits));
  int zeros = 0;
  for (; (integer & 1) == 0; integer >>= 1) ++zeros;
  return kMostBits - zeros;
}

/// Half a step of a dtype with so many bits at a value.
double half_a_step(double value, int bits) {
  int exponent = 0;
  (void)std::frexp(value, &exponent);
  return std::ldexp(0.5, exponent - bits);
}

/// How many of the numbers that are not 0 need at most so many bits, from 0 to kMostBits.
struct Bits {
  std::int64_t all = 0;
  std::vector<std::int64_t> at_most = std::vector<std::int64_t>(kMostBits + 1, 0);

  void add(double value) {
    if (value == 0 || !std::isfinite(value)) return;
    ++all;
    for (int bits = significant_bits(value); bits <= kMostBits; ++bits)
      ++at_most[static_cast<std::size_t>(bits)];
  }
  [[nodiscard]] double share(int bits) const {
    return all == 0
               ? 0
               : static_cast<double>(at_most[static_cast<std::size_t>(std::min(bits, kMostBits))]) /
                     static_cast<double>(all);
  }
};

/// Whether the values differ from the right ones as rounding to so many bits makes them differ:
/// nowhere by more than half a step, and by a good part of one in the mean.
bool is_off_by_half_a_step(const std::vector<const View*>& bad, double tolerance, int bits) {
  double steps = 0;
  std::int64_t count = 0;
  for (const View* view : bad) {
    const Values actual = view->actual.contiguous(), expected = view->expected.contiguous();
    // what came before the rounding was off by, too
    const double typical = norm_of(expected) / std::sqrt(static_cast<double>(expected.numel()));
    for (std::size_t i = 0; i < actual.flat().size(); ++i) {
      const double right = expected.flat()[i], seen = actual.flat()[i];
      if (seen == 0) continue;
      const double half = half_a_step(std::max(std::fabs(right), std::fabs(seen)), bits);
      const double noise = std::min(tolerance, 1e-4) * (8 * std::fabs(right) + typical);
      if (!(std::fabs(seen - right) <= half + noise)) return false;
      steps += std::fabs(seen - right) / half;
      ++count;
    }
  }
  return count > 0 && steps > 0.2 * static_cast<double>(count);
}

Cause rounded_values(const Evidence& e, const std::vector<const View*>& bad, int own_bits) {
  Bits actual, expected;
  for (const View* view : bad) {
    const Values seen = view->actual.contiguous(), right = view->expected.contiguous();
    for (const double value : seen.flat()) actual.add(value);
    for (const double value : right.flat()) expected.add(value);
  }
  if (actual.all < kLeastElements) return {};
  for (const auto& [bits, name] : kCoarse) {
    if (bits >= own_bits || actual.share(bits) < 1) continue;
    if (expected.share(bits) > 0.5 || !is_off_by_half_a_step(bad, e.tolerance(), bits)) return {};
    return make_cause(CauseId::kRounded,
                      {{"dtype", name}, {"values", actual.all}, {"bits", bits}, e.on_bad_ranks()});
  }
  return {};
}

/// How the numbers of wrong ranks look once they are multiplied with what a mean divides by, which
/// rounds in the record's own dtype.
struct Undivided {
  Bits actual, expected;
  double error = 0;  ///< of all
};

Undivided undivided(const std::vector<const View*>& bad, int degree) {
  Undivided all;
  double squares = 0, wrong = 0;
  const auto times = [degree](double value) {
    return static_cast<double>(static_cast<float>(value * degree));
  };
  for (const View* view : bad) {
    const Values seen = view->actual.contiguous(), right = view->expected.contiguous();
    for (const double value : seen.flat()) all.actual.add(times(value));
    for (const double value : right.flat()) all.expected.add(times(value));
    squares += dot(right, right);
    wrong += std::pow(distance(seen, right), 2);
  }
  all.error = squares == 0 ? 0 : std::sqrt(wrong / squares);
  return all;
}

constexpr int kMoreBits = 6;  // what a sum of two numbers of other size needs besides

bool are_sums_of(const Undivided& numbers, int bits) {
  const double step = std::ldexp(1.0, -bits);
  const Bits& actual = numbers.actual;
  return actual.all >= 4 * kLeastElements && actual.share(bits + kMoreBits) > 0.9 &&
         actual.share(bits + 1) > 0.25 && actual.share(bits) < 0.95 &&
         actual.share(bits - 1) < 0.6 && numbers.expected.share(bits + kMoreBits) < 0.25 &&
         numbers.error > step / 16 && numbers.error < step;
}

/// Means over dp of rounded summands, times the degree, and sums of rounded gradients of
/// micro-batches are sums of few numbers of few bits.
Cause rounded_summands(const Evidence& e, const std::vector<const View*>& bad, int own_bits) {
  if (e.wanted.key.kind != RecordKind::kGrad) return {};
  std::vector<std::pair<int, std::string_view>> sums;  // what they are divided by, and over what
  for (const AxisDegree& axis : e.actual.mesh.axes()) {
    const bool is_averaged = axis.axis == Axis::kDp || axis.axis == Axis::kDpReplicate;
    if (axis.degree > 1 && is_averaged) sums.emplace_back(axis.degree, name_of(axis.axis));
  }
  if (e.num_micro_batches() > 1) sums.emplace_back(1, "micro-batches");
  for (const auto& [bits, name] : kCoarse) {
    if (bits + kMoreBits >= own_bits) continue;
    // a degree of 2 leaves the bits as they are, so that several may fit
    std::vector<std::string_view> over;
    Undivided numbers;
    for (const auto& [degree, words] : sums) {
      Undivided own = undivided(bad, degree);
      if (!are_sums_of(own, bits)) continue;
      over.push_back(words);
      numbers = std::move(own);
    }
    if (over.empty()) continue;
    return make_cause(CauseId::kSummandsRounded,
                      {{"dtype", name},
                       {"over", over},
                       NamedValue::words("added_over", fmt::format("{}", fmt::join(over, " or "))),
                       {"percent", 100 * numbers.actual.share(bits + kMoreBits)},
                       {"values", numbers.actual.all},
                       {"bits", bits},
                       e.on_bad_ranks()});
  }
  return {};
}

/// Whether some sum in fp32 gives `one` when it is divided, and `other` when it is multiplied with
/// the rounded reciprocal.
bool is_of_one_sum(float one, float other, int ranks) {
  constexpr int kStepsTried = 3;
  const auto n = static_cast<float>(ranks);
  const float reciprocal = 1 / n;
  float sum = one * n;
  for (int i = 0; i < kStepsTried; ++i) sum = std::nextafterf(sum, -INFINITY);
  for (int i = 0; i <= 2 * kStepsTried; ++i, sum = std::nextafterf(sum, INFINITY)) {
    if (sum / n == one && sum * reciprocal == other) return true;
  }
  return false;
}

}  // namespace

Cause cause_reciprocal(const Evidence& e) {
  const std::vector<const View*> bad = e.bad_views();
  if (bad.empty() || e.wanted.dtype != Dtype::kFloat32 ||
      e.held_by(bad.front()->rank)->record->dtype != Dtype::kFloat32)
    return {};
  for (const AxisDegree& axis : e.actual.mesh.axes()) {
    const bool is_averaged = axis.axis == Axis::kDp || axis.axis == Axis::kDpReplicate;
    // the reciprocal of a power of 2 is not rounded
    if (!is_averaged || (axis.degree & (axis.degree - 1)) == 0) continue;
    for (const bool multiplies : {true, false}) {
      std::int64_t all = 0, differing = 0;
      std::set<std::pair<Shape, Shape>> boxes;
      const bool fits = std::ranges::all_of(bad, [&](const View* view) {
        const Values seen = view->actual.contiguous(), right = view->expected.contiguous();
        const bool is_copy = !boxes.emplace(view->box.global_offset, view->box.size).second;
        for (std::size_t i = 0; i < seen.flat().size(); ++i) {
          const auto own = static_cast<float>(seen.flat()[i]),
                     wanted = static_cast<float>(right.flat()[i]);
          if (!(multiplies ? is_of_one_sum(wanted, own, axis.degree)
                           : is_of_one_sum(own, wanted, axis.degree)))
            return false;
          if (is_copy) continue;
          ++all;
          if (own != wanted) ++differing;
        }
        return true;
      });
      if (!fits || differing < kLeastElements) continue;
      return make_cause(
          multiplies ? CauseId::kMultipliedWithReciprocal : CauseId::kNotMultipliedWithReciprocal,
          {{"num_ranks", axis.degree},
           {"axis", name_of(axis.axis)},
           {"values", all},
           {"differing", differing},
           e.on_bad_ranks()});
    }
  }
  return {};
}

/// Sums of micro-batches that each rank holds of its own samples. What they should be is known of
/// their sum alone, but sums in a wide dtype have more bits than what was added.
Cause cause_rounded_sums(const Evidence& e) {
  if (e.wanted.key.kind != RecordKind::kGrad || e.wanted.key.call == 0 ||
      role_of(e.wanted.key) != NameRole::kMicroBatch)
    return {};
  Bits held;
  int own_bits = 0;
  for (const Held& h : e.held) {
    const Record& record = *h.record;
    if (!record.kept || h.rank->arena == nullptr || !is_partial(record.layout)) return {};
    own_bits = bits_of(record.dtype);
    const Values own = Values(h.rank->tensor(record)).contiguous();
    for (const double value : own.flat()) held.add(value);
  }
  if (held.all < kLeastElements) return {};
  for (const auto& [bits, name] : kCoarse) {
    if (bits >= own_bits || held.share(bits) < 1) continue;
    // a single gradient in a wide dtype has few bits, too: then others are missing
    const double most = std::ldexp(8, -bits);
    if (!(e.result.comparison.stats.relative_error() <= most)) continue;
    return make_cause(CauseId::kMicroBatchSumsRounded, {{"dtype", name},
                                                        {"values", held.all},
                                                        {"micro_batch", e.wanted.key.call},
                                                        {"bits", bits}});
  }
  return {};
}

namespace {
/// What a rank has of masters in a box, to the last bit: what is not kept is the reference's.
Values masters_of(const Evidence& e, const RankTrace& rank, const Record& record, const Box& box) {
  const bool is_same = std::ranges::all_of(
      record.parts, [](const PartStats& part) { return part.stats.unequal_values == 0; });
  const Record* const right = e.reference.find(record.key);
  if (is_same && right != nullptr && right->layout.global_shape == e.wanted.layout.global_shape)
    return e.reference_value(record.key).cut(box.global_offset, box.size).contiguous();
  const auto own = e.own_box(rank, record);
  const bool fits = own.has_value() && own->first.global_offset == box.global_offset &&
                    own->first.size == box.size;
  return fits ? own->second.contiguous() : Values();
}
}  // namespace

/// The run's own masters say what parameters must be to the last bit.
Cause cause_cut_off_master(const Evidence& e) {
  const std::string name(stepped_parameter(e.wanted.key));
  const RecordKey master{e.wanted.key.step, RecordKind::kOptimizer,
                         to_string({name, NameRole::kMaster}), 0};
  if (name.empty() || e.wanted.key.kind != RecordKind::kParam) return {};
  const int bits = bits_of(e.wanted.dtype);
  std::int64_t cut = 0, all = 0;
  for (const View* const view : e.bad_views()) {
    const Held* const held = e.held_by(view->rank);
    const Record* const record = held->rank->find(master);
    if (record == nullptr || bits == 0 || bits_of(held->record->dtype) != bits ||
        bits_of(record->dtype) <= bits)
      return {};
    const Values masters = masters_of(e, *held->rank, *record, view->box);
    const Values seen = view->actual.contiguous();
    if (!masters.defined()) return {};
    for (std::size_t i = 0; i < seen.flat().size(); ++i) {
      const double value = masters.flat()[i], rounded = rounded_to(value, bits);
      const double step = value == 0 ? 0 : std::ldexp(1, std::ilogb(value) + 1 - bits);
      const double towards_zero = step == 0 ? 0 : std::trunc(value / step) * step;
      if (seen.flat()[i] != towards_zero) return {};
      ++all;
      if (towards_zero != rounded) ++cut;
    }
  }
  if (cut < kLeastElements) return {};
  return make_cause(
      CauseId::kMastersCutOff,
      {{"dtype", name_of(e.wanted.dtype)}, {"cut", cut}, {"values", all}, e.on_bad_ranks()});
}

Cause cause_rounding(const Evidence& e) {
  const std::vector<const View*> bad = e.bad_views();
  if (bad.empty()) return {};
  const Held* held = e.held_by(bad.front()->rank);
  const int own_bits = std::min(bits_of(held->record->dtype), bits_of(e.wanted.dtype));
  if (own_bits == 0) return {};
  const bool is_telling_enough =
      std::ranges::any_of(bad, [](const View* view) { return is_telling(view->expected); });
  if (!is_telling_enough) return {};
  if (Cause cause = rounded_values(e, bad, own_bits); !cause.empty()) return cause;
  return rounded_summands(e, bad, own_bits);
}

}  // namespace isoshard::detail
