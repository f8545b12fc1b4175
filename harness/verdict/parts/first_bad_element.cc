// SPDX-License-Identifier: Apache-2.0
// From an element of the whole tensor to its place in a rank's own.
#include "harness/verdict/parts/first_bad_element.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdint>
#include <optional>
#include <vector>

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

std::string first_bad_element(const Reference& reference, const Record& wanted, const Held& h) {
  std::int64_t index = -1;
  for (const PartStats& part : h.record->parts) {
    if (part.stats.first_unequal >= 0 && (index < 0 || part.stats.first_unequal < index))
      index = part.stats.first_unequal;
  }
  if (index < 0) return "";
  const Shape& shape = wanted.layout.global_shape;
  Shape coordinates(shape.size());
  std::int64_t rest = index;
  for (std::size_t d = shape.size(); d-- > 0;) {
    coordinates[d] = rest % shape[d];
    rest /= shape[d];
  }
  std::string text = fmt::format("; first on rank {} at [{}]: reference {:.9g}", h.rank->rank,
                                 fmt::join(coordinates, ", "),
                                 value_at(reference.bytes(wanted), wanted.dtype, index));
  if (const auto value = value_on(h, coordinates, index))
    text += fmt::format(", actual {:.9g}", *value / h.record->grad_scale);
  return text;
}

}  // namespace isoshard::detail
