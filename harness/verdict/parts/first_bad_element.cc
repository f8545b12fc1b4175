// SPDX-License-Identifier: Apache-2.0
// From an element of the whole tensor to its place in a rank's own.
#include "harness/verdict/parts/first_bad_element.h"

#include <cstdint>
#include <string>
#include <utility>

#include "harness/ids/finding.h"
#include "harness/trace/parts.h"

namespace isoshard::detail {
namespace {

std::optional<double> value_on(const Held& h, const Shape& coordinates, std::int64_t index) {
  if (!h.record->kept || h.rank->arena == nullptr) return std::nullopt;
  const HostTensor local = h.rank->tensor(*h.record);
  const std::byte* bytes = local.bytes.data();
  for (const PartStats& part : h.record->parts) {
    if (is_flat(h.record->layout)) {
      const std::int64_t inside = index - part.range.global_begin;
      if (inside >= 0 && inside < part.range.count)
        return value_at(bytes, h.record->dtype, part.range.local_begin + inside);
      continue;
    }
    std::int64_t position = 0;
    bool inside = true;
    for (std::size_t d = 0; d < coordinates.size(); ++d) {
      const std::int64_t at = coordinates[d] - part.box.global_offset[d];
      inside = inside && at >= 0 && at < part.box.size[d];
      position = position * h.record->local_shape[d] + at + part.box.local_offset[d];
    }
    if (inside) return value_at(bytes, h.record->dtype, position);
  }
  return std::nullopt;
}

}  // namespace

Shape coordinates_of(const Shape& shape, std::int64_t index) {
  Shape coordinates(shape.size());
  for (std::size_t d = shape.size(); d-- > 0;) {
    coordinates[d] = index % shape[d];
    index /= shape[d];
  }
  return coordinates;
}

void add_element(NamedValues& measured, int rank, const Shape& coordinates, double reference,
                 std::optional<double> actual) {
  measured.insert(measured.end(),
                  {{"rank", rank}, {"index", coordinates}, {"reference", reference}});
  std::string words = phrase(FindingPhraseId::kFirstElement, measured);
  if (actual.has_value()) {
    measured.emplace_back("actual", *actual);
    words += phrase(FindingPhraseId::kActualElement, measured);
  }
  measured.push_back(NamedValue::words("first", std::move(words)));
}

void add_first_bad_element(NamedValues& measured, const Reference& reference, const Record& wanted,
                           const Held& h) {
  std::int64_t index = -1;
  for (const PartStats& part : h.record->parts) {
    if (part.stats.first_unequal >= 0 && (index < 0 || part.stats.first_unequal < index))
      index = part.stats.first_unequal;
  }
  if (index < 0) return;
  const Shape coordinates = coordinates_of(wanted.layout.global_shape, index);
  std::optional<double> actual = value_on(h, coordinates, index);
  if (actual.has_value()) *actual /= h.record->grad_scale;
  add_element(measured, h.rank->rank, coordinates,
              value_at(reference.bytes(wanted), wanted.dtype, index), actual);
}

}  // namespace isoshard::detail
