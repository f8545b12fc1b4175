// SPDX-License-Identifier: Apache-2.0
/// Texts that processes of a job tell each other.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "harness/world/launcher.h"

namespace isoshard {

/// The text of process `from`, on all.
/// Ranks   collective over the peers.
[[nodiscard]] inline std::string broadcast_text(Peers& peers, std::string text, int from) {
  auto size = static_cast<std::uint64_t>(text.size());
  peers.broadcast(std::as_writable_bytes(std::span(&size, 1)), from);
  text.resize(size);
  if (size == 0) return text;
  peers.broadcast(std::as_writable_bytes(std::span(text)), from);
  return text;
}

/// "rank 2 on node7".
[[nodiscard]] inline std::string who_is(const Peers& peers, int process) {
  const Hosts& hosts = peers.hosts();
  const int host = hosts.host_of[static_cast<std::size_t>(process)];
  return "rank " + std::to_string(process) + " on " + hosts.names[static_cast<std::size_t>(host)];
}

}  // namespace isoshard
