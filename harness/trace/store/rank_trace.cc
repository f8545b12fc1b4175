// SPDX-License-Identifier: Apache-2.0
/// One rank's records: looking up, viewing kept tensors, and the compact form that goes through the
/// result channel.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "core/base/error.h"
#include "harness/trace/trace.h"

namespace isoshard {
namespace {

constexpr std::uint32_t kMagic = 0x31525449;  // "ITR1"

/// Calls `act` with each field of what a trace has, in the order of its bytes: the same list writes
/// and reads.
template <class T, class Act>
void each_field(T& x, const Act& act) {
  using Type = std::remove_const_t<T>;
  const auto each = [&](auto&... fields) { (act(fields), ...); };
  if constexpr (std::is_same_v<Type, RecordKey>) {
    each(x.step, x.kind, x.name, x.call);
  } else if constexpr (std::is_same_v<Type, Box>) {
    each(x.local_offset, x.global_offset, x.size);
  } else if constexpr (std::is_same_v<Type, Placement>) {
    each(x.axis, x.kind, x.dim, x.reduction, x.coordinate, x.also_at);
  } else if constexpr (std::is_same_v<Type, Layout>) {
    each(x.global_shape, x.placements, x.boxes, x.flat, x.explicit_parts);
  } else if constexpr (std::is_same_v<Type, PartStats>) {
    each(x.box, x.range, x.stats, x.digest, x.untouched, x.broken, x.first_broken);
  } else {
    static_assert(std::is_same_v<Type, Record>);
    each(x.key, x.order, x.dtype, x.layout, x.grad_scale, x.local_shape, x.parts, x.unmasked,
         x.kept, x.offset, x.bytes);
  }
}

/// Not written as they lie in memory: their gaps are not the same in two equal runs.
template <class T>
concept HasFields =
    std::is_same_v<T, RecordKey> || std::is_same_v<T, Box> || std::is_same_v<T, Placement> ||
    std::is_same_v<T, Layout> || std::is_same_v<T, PartStats> || std::is_same_v<T, Record>;

class Writer {
 public:
  template <class T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto* bytes = reinterpret_cast<const std::byte*>(&value);
    out_.insert(out_.end(), bytes, bytes + sizeof(T));
  }
  void put(const std::string& text) {
    put(static_cast<std::uint32_t>(text.size()));
    const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
    out_.insert(out_.end(), bytes, bytes + text.size());
  }
  template <class T>
  void put(const std::vector<T>& values) {
    put(static_cast<std::uint32_t>(values.size()));
    for (const T& value : values) put(value);
  }
  template <HasFields T>
  void put(const T& value) {
    each_field(value, [this](const auto& field) { this->put(field); });
  }
  std::vector<std::byte> take() { return std::move(out_); }

 private:
  std::vector<std::byte> out_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  template <class T>
  void get(T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::memcpy(static_cast<void*>(&value), take(sizeof(T)), sizeof(T));
  }
  void get(bool& value) {
    std::uint8_t byte = 0;
    get(byte);
    value = byte != 0;
  }
  void get(std::string& text) {
    const std::uint32_t size = count(1);
    text.assign(reinterpret_cast<const char*>(take(size)), size);
  }
  template <class T>
  void get(std::vector<T>& values) {
    values.clear();
    const std::uint32_t size = count(1);
    for (std::uint32_t i = 0; i < size; ++i) get(values.emplace_back());
  }
  template <HasFields T>
  void get(T& value) {
    each_field(value, [this](auto& field) { this->get(field); });
    if constexpr (std::is_same_v<T, Record>) {
      if (value.key.kind > RecordKind::kMask || value.dtype > Dtype::kBool)
        fail("an unknown kind or dtype");
    }
  }
  [[nodiscard]] bool at_end() const noexcept { return position_ == bytes_.size(); }
  [[noreturn]] void fail(std::string_view what) const {
    throw InfrastructureError(fmt::format("the trace of a rank is damaged: {} at byte {} of {}",
                                          what, position_, bytes_.size()));
  }

 private:
  /// A count of things of at least `least` bytes each: more than the rest could hold is damage, not
  /// a reason to allocate.
  std::uint32_t count(std::size_t least) {
    std::uint32_t value = 0;
    get(value);
    if (value > (bytes_.size() - position_) / least) fail("a count beyond the end");
    return value;
  }
  const std::byte* take(std::size_t size) {
    if (size > bytes_.size() - position_) fail("too few bytes");
    const std::byte* at = bytes_.data() + position_;
    position_ += size;
    return at;
  }

  std::span<const std::byte> bytes_;
  std::size_t position_ = 0;
};

}  // namespace

const Record* RankTrace::find(const RecordKey& key) const {
  const auto found = std::find_if(records.begin(), records.end(),
                                  [&](const Record& record) { return record.key == key; });
  return found == records.end() ? nullptr : &*found;
}

HostTensor RankTrace::tensor(const Record& record) const {
  if (!record.kept || arena == nullptr)
    throw VacuousError(fmt::format("rank {} did not keep {}", rank, describe(record.key)));
  if (record.offset < 0 ||
      record.bytes !=
          numel_of(record.local_shape) * static_cast<std::int64_t>(size_of(record.dtype)) ||
      static_cast<std::size_t>(record.offset) + static_cast<std::size_t>(record.bytes) >
          arena->size()) {
    throw InfrastructureError(
        fmt::format("rank {}: {} points at bytes {}+{} of {} in its trace memory", rank,
                    describe(record.key), record.offset, record.bytes, arena->size()));
  }
  return {record.dtype,
          record.local_shape,
          {arena->data() + record.offset, static_cast<std::size_t>(record.bytes)},
          arena};
}

std::vector<std::byte> RankTrace::serialize() const {
  Writer writer;
  writer.put(kMagic);
  writer.put(rank);
  writer.put(records);
  return writer.take();
}

RankTrace RankTrace::deserialize(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  std::uint32_t magic = 0;
  reader.get(magic);
  if (magic != kMagic) reader.fail("no trace");
  RankTrace trace;
  reader.get(trace.rank);
  reader.get(trace.records);
  if (!reader.at_end()) reader.fail("trailing bytes");
  return trace;
}

}  // namespace isoshard
