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
  void put_all(const std::vector<T>& values) {
    put(static_cast<std::uint32_t>(values.size()));
    for (const T& value : values) put(value);
  }
  void put(const Box& box) {
    put_all(box.local_offset);
    put_all(box.global_offset);
    put_all(box.size);
  }
  // not as it lies in memory: its gaps are not the same in two equal runs
  void put(const Placement& placement) {
    put(placement.axis);
    put(placement.kind);
    put(placement.dim);
    put(placement.reduction);
    put(placement.coordinate);
    put(placement.also_at);
  }
  void put(const PartStats& part) {
    put(part.box);
    put(part.range);
    put(part.stats);
    put(part.digest);
    put(part.untouched);
    put(part.broken);
    put(part.first_broken);
  }
  void put(const Record& r) {
    put(r.key.step);
    put(r.key.kind);
    put(r.key.name);
    put(r.key.call);
    put(r.order);
    put(r.dtype);
    put_all(r.layout.global_shape);
    put_all(r.layout.placements);
    put_all(r.layout.boxes);
    put_all(r.layout.flat);
    put(r.layout.explicit_parts);
    put(r.grad_scale);
    put_all(r.local_shape);
    put_all(r.parts);
    put(r.unmasked);
    put(r.kept);
    put(r.offset);
    put(r.bytes);
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
  void get_all(std::vector<T>& values) {
    values.clear();
    const std::uint32_t size = count(1);
    for (std::uint32_t i = 0; i < size; ++i) get(values.emplace_back());
  }
  void get(Box& box) {
    get_all(box.local_offset);
    get_all(box.global_offset);
    get_all(box.size);
  }
  void get(Placement& placement) {
    get(placement.axis);
    get(placement.kind);
    get(placement.dim);
    get(placement.reduction);
    get(placement.coordinate);
    get(placement.also_at);
  }
  void get(PartStats& part) {
    get(part.box);
    get(part.range);
    get(part.stats);
    get(part.digest);
    get(part.untouched);
    get(part.broken);
    get(part.first_broken);
  }
  void get(Record& r) {
    get(r.key.step);
    get(r.key.kind);
    get(r.key.name);
    get(r.key.call);
    get(r.order);
    get(r.dtype);
    get_all(r.layout.global_shape);
    get_all(r.layout.placements);
    get_all(r.layout.boxes);
    get_all(r.layout.flat);
    get(r.layout.explicit_parts);
    get(r.grad_scale);
    get_all(r.local_shape);
    get_all(r.parts);
    get(r.unmasked);
    get(r.kept);
    get(r.offset);
    get(r.bytes);
    if (r.key.kind > RecordKind::kMask || r.dtype > Dtype::kBool) fail("an unknown kind or dtype");
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
  writer.put_all(records);
  return writer.take();
}

RankTrace RankTrace::deserialize(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  std::uint32_t magic = 0;
  reader.get(magic);
  if (magic != kMagic) reader.fail("no trace");
  RankTrace trace;
  reader.get(trace.rank);
  reader.get_all(trace.records);
  if (!reader.at_end()) reader.fail("trailing bytes");
  return trace;
}

}  // namespace isoshard
