// SPDX-License-Identifier: Apache-2.0
/// A fixed head, then the three lists.
#include "core/comm/control/packet.h"

#include <cstring>
#include <type_traits>

#include "core/base/error.h"

namespace isoshard {
namespace {

struct Head {
  PacketKind kind;
  std::int32_t color, key;
  std::uint32_t groups_led;
  JournalEntry entry;
  std::uint64_t num_counts, num_output_counts, num_bytes;
};
static_assert(std::is_trivially_copyable_v<Head>);

std::byte* append(std::byte* to, const void* from, std::size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
  return to + bytes;
}

template <class T>
const std::byte* read(const std::byte* from, std::vector<T>& list, std::size_t count) {
  list.resize(count);
  if (count != 0) std::memcpy(list.data(), from, count * sizeof(T));
  return from + count * sizeof(T);
}

}  // namespace

std::shared_ptr<const std::vector<std::byte>> encode(const Packet& packet) {
  Head head;
  std::memset(static_cast<void*>(&head), 0, sizeof(head));  // NOLINT: gaps are sent too
  head.kind = packet.kind;
  head.color = packet.color;
  head.key = packet.key;
  head.groups_led = packet.groups_led;
  head.entry = packet.entry;
  head.num_counts = packet.counts.size();
  head.num_output_counts = packet.output_counts.size();
  head.num_bytes = packet.data.size();
  const std::size_t num_counts = packet.counts.size() + packet.output_counts.size();
  auto bytes = std::make_shared<std::vector<std::byte>>(
      sizeof(head) + num_counts * sizeof(std::int64_t) + packet.data.size());
  std::byte* to = append(bytes->data(), &head, sizeof(head));
  to = append(to, packet.counts.data(), packet.counts.size() * sizeof(std::int64_t));
  to = append(to, packet.output_counts.data(), packet.output_counts.size() * sizeof(std::int64_t));
  append(to, packet.data.data(), packet.data.size());
  return bytes;
}

Packet decode(std::span<const std::byte> bytes) {
  Head head;
  if (bytes.size() >= sizeof(head)) std::memcpy(&head, bytes.data(), sizeof(head));
  if (bytes.size() < sizeof(head) ||
      bytes.size() != sizeof(head) +
                          (head.num_counts + head.num_output_counts) * sizeof(std::int64_t) +
                          head.num_bytes) {
    throw InfrastructureError(
        "a packet between ranks must be one of this program's, got other bytes; start the same "
        "program on every host");
  }
  Packet packet;
  packet.kind = head.kind;
  packet.color = head.color;
  packet.key = head.key;
  packet.groups_led = head.groups_led;
  packet.entry = head.entry;
  const std::byte* from = bytes.data() + sizeof(head);
  from = read(from, packet.counts, head.num_counts);
  from = read(from, packet.output_counts, head.num_output_counts);
  read(from, packet.data, head.num_bytes);
  return packet;
}

}  // namespace isoshard
