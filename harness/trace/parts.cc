// SPDX-License-Identifier: Apache-2.0
/// Boxes as sequences of contiguous runs.
#include "harness/trace/parts.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "core/base/error.h"
#include "core/memory/unwritten.h"
#include "harness/stats/comparer.h"

namespace isoshard {
namespace {

/// Calls visit(position, count) for every contiguous run of the sub-box (offset, size) of a
/// row-major tensor, in order.
template <class Visit>
void for_each_run(const Shape& shape, const Shape& offset, const Shape& size, Visit&& visit) {
  const std::size_t dims = shape.size();
  for (const std::int64_t s : size) {
    if (s == 0) return;
  }
  // The run: the last dim that is cut, together with all whole dims behind it.
  std::size_t run_dim = dims;
  std::int64_t run = 1;
  while (run_dim > 0) {
    --run_dim;
    run *= size[run_dim];
    if (size[run_dim] != shape[run_dim]) break;
  }
  Shape stride(dims, 1);
  for (std::size_t d = dims; d-- > 1;) stride[d - 1] = stride[d] * shape[d];
  std::int64_t base = 0;
  for (std::size_t d = 0; d < dims; ++d) base += offset[d] * stride[d];
  Shape index(run_dim, 0);
  while (true) {
    std::int64_t position = base;
    for (std::size_t d = 0; d < run_dim; ++d) position += index[d] * stride[d];
    visit(position, run);
    std::size_t d = run_dim;
    while (d > 0 && ++index[d - 1] == size[d - 1]) index[--d] = 0;
    if (d == 0) return;
  }
}

[[noreturn]] void refuse(const Record& record, std::string_view problem) {
  throw MeshError(fmt::format("{}: the local tensor [{}] does not fit its layout ({} of [{}]): {}",
                              describe(record.key), fmt::join(record.local_shape, ", "),
                              describe(record.layout), fmt::join(record.layout.global_shape, ", "),
                              problem));
}

void require_inside(const Record& record, const Shape& shape, const Shape& offset,
                    const Shape& size) {
  bool inside = offset.size() == shape.size() && size.size() == shape.size();
  for (std::size_t d = 0; inside && d < shape.size(); ++d)
    inside =
        offset[d] >= 0 && size[d] >= 0 && size[d] <= shape[d] && offset[d] <= shape[d] - size[d];
  if (!inside) {
    refuse(record,
           fmt::format("a box at [{}] of size [{}] lies outside [{}]", fmt::join(offset, ", "),
                       fmt::join(size, ", "), fmt::join(shape, ", ")));
  }
}

/// One bit pattern for every NaN of a dtype whose infinity has the bits `infinity`.
template <class Bits>
class Nans {
 public:
  explicit Nans(Bits infinity) : infinity_(infinity) {}

  [[nodiscard]] bool are_in(const std::byte* data, std::int64_t count) const {
    constexpr std::int64_t kBlock = 4096;  // a loop without an exit, which the compiler vectorizes
    for (std::int64_t begin = 0; begin < count; begin += kBlock) {
      const std::int64_t end = std::min(count, begin + kBlock);
      Signed most = 0;
      for (std::int64_t i = begin; i < end; ++i)
        most = std::max(most, static_cast<Signed>(bits_at(data, i) & kMagnitude));
      if (most > static_cast<Signed>(infinity_)) return true;
    }
    return false;
  }

  [[nodiscard]] std::vector<std::byte> made_alike(const std::byte* data, std::int64_t count) const {
    std::vector<std::byte> alike(data, data + count * kSize);
    const Bits usual = infinity_ | static_cast<Bits>(infinity_ >> 1);
    for (std::int64_t i = 0; i < count; ++i) {
      const Bits bits = bits_at(data, i);
      if (is_nan(bits) && !is_unwritten(bits)) std::memcpy(&alike[place(i)], &usual, sizeof usual);
    }
    return alike;
  }

 private:
  using Signed = std::make_signed_t<Bits>;
  static constexpr std::int64_t kSize = sizeof(Bits);
  static constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;

  static std::size_t place(std::int64_t i) { return static_cast<std::size_t>(i * kSize); }
  static Bits bits_at(const std::byte* data, std::int64_t i) {
    Bits bits = 0;
    std::memcpy(&bits, data + place(i), sizeof bits);
    return bits;
  }
  [[nodiscard]] bool is_nan(Bits bits) const {
    return static_cast<Signed>(bits & kMagnitude) > static_cast<Signed>(infinity_);
  }
  static bool is_unwritten(Bits bits) {
    constexpr int kWordBits = 16;
    const auto word = static_cast<std::uint16_t>(bits);
    for (std::size_t done = sizeof word; done < sizeof bits; done += sizeof word) {
      bits = static_cast<Bits>(static_cast<std::uint64_t>(bits) >> kWordBits);
      if (static_cast<std::uint16_t>(bits) != word) return false;
    }
    return is_unwritten_word(word);
  }

  Bits infinity_;
};

template <class Bits>
std::uint64_t digest_of_floats(const std::byte* data, std::int64_t count, Bits infinity) {
  const Nans<Bits> nans(infinity);
  const auto bytes = static_cast<std::size_t>(count) * sizeof(Bits);
  if (!nans.are_in(data, count)) return digest_of(data, bytes);
  return digest_of(nans.made_alike(data, count).data(), bytes);
}

}  // namespace

std::uint64_t digest_of_part(const std::byte* packed_part, Dtype dtype, std::int64_t numel) {
  constexpr std::uint64_t kInfinity64 = 0x7FF0'0000'0000'0000;
  constexpr std::uint32_t kInfinity32 = 0x7F80'0000;
  constexpr std::uint16_t kInfinityBf16 = 0x7F80, kInfinityFp16 = 0x7C00;
  switch (dtype) {
    case Dtype::kFloat64:
      return digest_of_floats(packed_part, numel, kInfinity64);
    case Dtype::kFloat32:
      return digest_of_floats(packed_part, numel, kInfinity32);
    case Dtype::kBFloat16:
      return digest_of_floats(packed_part, numel, kInfinityBf16);
    case Dtype::kFloat16:
      return digest_of_floats(packed_part, numel, kInfinityFp16);
    default:
      return digest_of(packed_part, static_cast<std::size_t>(numel) * size_of(dtype));
  }
}

std::int64_t numel_of(const PartStats& part, bool flat) noexcept {
  return flat ? part.range.count : numel_of(part.box.size);
}

bool has_elements(const Record& record) noexcept {
  const bool flat = is_flat(record.layout);
  return std::ranges::any_of(record.parts,
                             [flat](const PartStats& part) { return numel_of(part, flat) > 0; });
}

std::vector<PartStats> parts_of(const Record& record, const MeshShape& mesh, int rank) {
  std::vector<PartStats> parts;
  if (is_flat(record.layout)) {
    const std::int64_t local = numel_of(record.local_shape);
    const std::int64_t global = numel_of(record.layout.global_shape);
    for (const FlatRange& range : record.layout.flat) {
      if (range.count < 0 || range.local_begin < 0 || range.global_begin < 0 ||
          range.count > local - range.local_begin || range.count > global - range.global_begin) {
        refuse(record, fmt::format("flat range local {} global {} count {}", range.local_begin,
                                   range.global_begin, range.count));
      }
      parts.push_back({.box = {}, .range = range, .stats = {}});
    }
    return parts;
  }
  for (Box& box : boxes_of(record.layout, mesh, rank)) {
    require_inside(record, record.local_shape, box.local_offset, box.size);
    require_inside(record, record.layout.global_shape, box.global_offset, box.size);
    if (!record.layout.explicit_parts && box.size != record.local_shape) {
      refuse(record, fmt::format("it should have shape [{}]", fmt::join(box.size, ", ")));
    }
    parts.push_back({.box = std::move(box), .range = {}, .stats = {}});
  }
  return parts;
}

const std::byte* packed(const Record& record, const PartStats& part, const std::byte* local,
                        std::vector<std::byte>& scratch) {
  const auto element = static_cast<std::int64_t>(size_of(record.dtype));
  if (is_flat(record.layout)) return local + part.range.local_begin * element;
  int runs = 0;
  std::int64_t begin = 0;
  for_each_run(record.local_shape, part.box.local_offset, part.box.size,
               [&](std::int64_t position, std::int64_t) {
                 if (runs++ == 0) begin = position;
               });
  if (runs <= 1) return local + begin * element;
  scratch.resize(static_cast<std::size_t>(numel_of(part.box.size) * element));
  std::byte* to = scratch.data();
  for_each_run(record.local_shape, part.box.local_offset, part.box.size,
               [&](std::int64_t position, std::int64_t count) {
                 std::memcpy(to, local + position * element,
                             static_cast<std::size_t>(count * element));
                 to += count * element;
               });
  return scratch.data();
}

void for_each_run(const PartStats& part, const Record& record,
                  const std::function<void(std::int64_t global, std::int64_t packed,
                                           std::int64_t count)>& visit) {
  if (is_flat(record.layout)) return visit(part.range.global_begin, 0, part.range.count);
  std::int64_t done = 0;
  for_each_run(record.layout.global_shape, part.box.global_offset, part.box.size,
               [&](std::int64_t position, std::int64_t count) {
                 visit(position, done, count);
                 done += count;
               });
}

namespace {

/// What a part is compared with, packed as it is, and its runs.
class PackedReference {
 public:
  PackedReference(const PartStats& part, const Record& record, const std::byte* reference,
                  Dtype dtype, const std::uint8_t* selected) {
    const std::size_t size = size_of(dtype);
    for_each_run(part, record, [&](std::int64_t position, std::int64_t, std::int64_t count) {
      runs.push_back({count, position});
    });
    if (runs.size() == 1) {
      data = reference + static_cast<std::size_t>(runs[0].index) * size;
      if (selected != nullptr) chosen = selected + runs[0].index;
      return;
    }
    for (const ComparedRun& run : runs) {
      const std::byte* const from = reference + static_cast<std::size_t>(run.index) * size;
      bytes_.insert(bytes_.end(), from, from + static_cast<std::size_t>(run.count) * size);
      if (selected != nullptr)
        chosen_.insert(chosen_.end(), selected + run.index, selected + run.index + run.count);
    }
    data = bytes_.data();
    if (selected != nullptr) chosen = chosen_.data();
  }

  std::vector<ComparedRun> runs;
  const std::byte* data = nullptr;
  const std::uint8_t* chosen = nullptr;  ///< elements that are compared; nullptr: all of them

 private:
  std::vector<std::byte> bytes_;
  std::vector<std::uint8_t> chosen_;
};

}  // namespace

void compare_part(PartStats& part, const Record& record, const std::byte* packed_part,
                  const std::byte* reference, Dtype reference_dtype, double reference_grad_scale,
                  const std::uint8_t* selected, Comparer* comparer) {
  part.stats = {};
  const double grad_scale = record.grad_scale / reference_grad_scale;
  if (comparer != nullptr) {
    const PackedReference wanted(part, record, reference, reference_dtype, selected);
    comparer->accumulate(part.stats,
                         {.reference = wanted.data,
                          .actual = packed_part,
                          .selected = wanted.chosen,
                          .reference_dtype = reference_dtype,
                          .actual_dtype = record.dtype,
                          .grad_scale = grad_scale},
                         wanted.runs);
    return;
  }
  const auto reference_size = static_cast<std::int64_t>(size_of(reference_dtype));
  const auto actual_size = static_cast<std::int64_t>(size_of(record.dtype));
  for_each_run(part, record, [&](std::int64_t position, std::int64_t done, std::int64_t count) {
    accumulate(part.stats, reference + position * reference_size, reference_dtype,
               packed_part + done * actual_size, record.dtype, count, position, grad_scale,
               selected == nullptr ? nullptr : selected + position);
  });
}

void place_part(const PartStats& part, const Record& record, const std::byte* packed_part,
                std::byte* global) {
  const auto element = static_cast<std::int64_t>(size_of(record.dtype));
  for_each_run(part, record, [&](std::int64_t position, std::int64_t done, std::int64_t count) {
    std::memcpy(global + position * element, packed_part + done * element,
                static_cast<std::size_t>(count * element));
  });
}

const std::byte* local_of(const Record& record, const std::byte* global,
                          std::vector<std::byte>& scratch) {
  const auto element = static_cast<std::int64_t>(size_of(record.dtype));
  const std::int64_t local = numel_of(record.local_shape);
  const bool flat = is_flat(record.layout);
  if (record.parts.size() == 1 && numel_of(record.parts[0], flat) == local) {
    int runs = 0;
    std::int64_t begin = 0;
    for_each_run(record.parts[0], record, [&](std::int64_t position, std::int64_t, std::int64_t) {
      if (runs++ == 0) begin = position;
    });
    if (runs == 1) return global + begin * element;
  }
  scratch.assign(static_cast<std::size_t>(local * element), std::byte{0});
  std::vector<std::byte> packed_part;
  for (const PartStats& part : record.parts) {
    packed_part.resize(static_cast<std::size_t>(numel_of(part, flat) * element));
    for_each_run(part, record, [&](std::int64_t position, std::int64_t done, std::int64_t count) {
      std::memcpy(packed_part.data() + done * element, global + position * element,
                  static_cast<std::size_t>(count * element));
    });
    const std::byte* from = packed_part.data();
    const auto place = [&](std::int64_t position, std::int64_t count) {
      std::memcpy(scratch.data() + position * element, from,
                  static_cast<std::size_t>(count * element));
      from += count * element;
    };
    if (flat) {
      place(part.range.local_begin, part.range.count);
    } else {
      for_each_run(record.local_shape, part.box.local_offset, part.box.size, place);
    }
  }
  return scratch.data();
}

}  // namespace isoshard
