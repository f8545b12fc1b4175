// SPDX-License-Identifier: Apache-2.0
// The ranks' counts, the first element in words, and the check once more.
#include "harness/verdict/broken_steps.h"

#include <cmath>

#include "harness/trace/masked_steps.h"
#include "harness/trace/parts.h"
#include "harness/verdict/parts/first_bad_element.h"

namespace isoshard::detail {
namespace {

std::int64_t broken_of(const Record& record) {
  std::int64_t broken = 0;
  for (const PartStats& part : record.parts) broken += part.broken;
  return broken;
}

std::int64_t first_of(const Record& record) {
  std::int64_t first = -1;
  for (const PartStats& part : record.parts) {
    if (part.first_broken >= 0 && (first < 0 || part.first_broken < first))
      first = part.first_broken;
  }
  return first;
}

/// The rank's check, made again on what it kept.
class Repeated {
 public:
  Repeated(const Reference& reference, const JudgePolicy& policy, const Held& held)
      : record_(*held.record), masked_(reference, policy) {
    if (!record_.kept || held.rank->arena == nullptr) return;
    claims_ = stepped_parameter(record_.key).empty() ? masked_.of_state(record_)
                                                     : masked_.of_parameter(record_, {});
    const HostTensor local = held.rank->tensor(record_);
    const bool flat = is_flat(record_.layout);
    std::vector<std::byte> scratch;
    for (PartStats part : record_.parts) {
      if (numel_of(part, flat) == 0) continue;
      const std::byte* bytes = packed(record_, part, local.bytes.data(), scratch);
      masked_.check(part, record_, bytes, claims_);
      broken_ += part.broken;
      if (part.first_broken < 0 || part.first_broken != first_of(record_)) continue;
      for_each_run(part, record_, [&](std::int64_t position, std::int64_t done, std::int64_t n) {
        if (part.first_broken >= position && part.first_broken < position + n)
          value_ = value_at(bytes, record_.dtype, done + part.first_broken - position);
      });
    }
  }
  [[nodiscard]] std::int64_t broken() const noexcept { return broken_; }
  [[nodiscard]] std::optional<double> first_value() const noexcept { return value_; }
  [[nodiscard]] bool is_untouched(std::int64_t index) const {
    const Shape& shape = record_.layout.global_shape;
    return !claims_.untouched.empty() &&
           claims_.untouched[static_cast<std::size_t>(index / (numel_of(shape) / shape[0]))] != 0;
  }

  /// Whether the element is one of a row that is held to its step.
  [[nodiscard]] bool is_of_row(std::int64_t index) const {
    return !claims_.moved.empty() && claims_.moved[static_cast<std::size_t>(index)] != 0;
  }

 private:
  const Record& record_;
  MaskedSteps masked_;
  ElementClaims claims_;
  std::int64_t broken_ = 0;
  std::optional<double> value_;
};

/// Adds the element before the step, and how far it may move, where that is known.
void add_before_step(NamedValues& measured, const Reference& reference, const JudgePolicy& policy,
                     const Record& wanted, const Record& actual, std::int64_t index) {
  if (stepped_parameter(wanted.key).empty()) return;
  const RecordKey read{0, RecordKind::kParam, std::string(stepped_parameter(wanted.key)), 0};
  const Record* before = reference.find(read);
  const StepLimit limit = step_limit(reference, policy, wanted.key, actual.dtype);
  if (before == nullptr || !std::isfinite(limit.fixed)) return;
  const double old = value_at(reference.bytes(*before), before->dtype, index);
  measured.insert(
      measured.end(),
      {{"before", old}, {"allowed_step", limit.fixed + limit.relative * std::fabs(old)}});
  measured.push_back(
      NamedValue::words("before_step", phrase(FindingPhraseId::kBeforeStep, measured)));
}

}  // namespace

std::optional<BrokenSteps> broken_steps(const Reference& reference, const Record& wanted,
                                        const std::vector<Held>& held, const JudgePolicy& policy) {
  BrokenSteps broken;
  const Held* first = nullptr;
  for (const Held& h : held) {
    const std::int64_t count = broken_of(*h.record);
    if (count == 0) continue;
    broken.count += count;
    broken.ranks.push_back(h.rank->rank);
    if (first == nullptr) first = &h;
  }
  if (first == nullptr) return std::nullopt;
  const std::int64_t index = first_of(*first->record);
  const Repeated repeated(reference, policy, *first);
  broken.confirmed = repeated.broken() == broken_of(*first->record);
  const bool untouched = repeated.is_untouched(index);
  const bool is_of_row = !untouched && repeated.is_of_row(index);
  broken.of_rows = is_of_row;
  broken.problem = untouched   ? FindingId::kUntouchedElementMoved
                   : is_of_row ? FindingId::kRowWithoutStep
                               : FindingId::kMaskedElementMovedTooFar;
  std::optional<double> actual = repeated.first_value();
  if (actual.has_value()) *actual /= first->record->grad_scale;
  broken.measured = {{"broken", broken.count}};
  add_element(broken.measured, first->rank->rank, coordinates_of(wanted.layout.global_shape, index),
              value_at(reference.bytes(wanted), wanted.dtype, index), actual);
  if (broken.problem == FindingId::kMaskedElementMovedTooFar)
    add_before_step(broken.measured, reference, policy, wanted, *first->record, index);
  return broken;
}

}  // namespace isoshard::detail
