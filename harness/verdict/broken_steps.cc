// SPDX-License-Identifier: Apache-2.0
// The ranks' counts, the first element in words, and the check once more.
#include "harness/verdict/broken_steps.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>

#include "harness/trace/masked_steps.h"
#include "harness/trace/parts.h"

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

std::string coordinates_of(const Shape& shape, std::int64_t index) {
  Shape coordinates(shape.size());
  for (std::size_t d = shape.size(); d-- > 0;) {
    coordinates[d] = index % shape[d];
    index /= shape[d];
  }
  return fmt::format("[{}]", fmt::join(coordinates, ", "));
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
  broken.problem = untouched   ? "is not the reference's where no gradient is"
                   : is_of_row ? "has rows that did not make their step"
                               : "moved by more than the optimizer's rule allows";
  broken.evidence = fmt::format(
      "{} elements, in which the reference's gradient is {}; first on rank {} at {}: reference "
      "{:.9g}",
      broken.count,
      untouched   ? "exactly 0"
      : is_of_row ? "above its response in every step so far"
                  : "below its response",
      first->rank->rank, coordinates_of(wanted.layout.global_shape, index),
      value_at(reference.bytes(wanted), wanted.dtype, index));
  if (const std::optional<double> value = repeated.first_value())
    broken.evidence += fmt::format(", actual {:.9g}", *value / first->record->grad_scale);
  if (untouched || is_of_row || stepped_parameter(wanted.key).empty()) return broken;
  const RecordKey read{0, RecordKind::kParam, std::string(stepped_parameter(wanted.key)), 0};
  const Record* before = reference.find(read);
  const StepLimit limit = step_limit(reference, policy, wanted.key, first->record->dtype);
  if (before == nullptr || !std::isfinite(limit.fixed)) return broken;
  const double old = value_at(reference.bytes(*before), before->dtype, index);
  broken.evidence += fmt::format(", before {:.9g}, which may move by {:.3g}", old,
                                 limit.fixed + limit.relative * std::fabs(old));
  return broken;
}

}  // namespace isoshard::detail
