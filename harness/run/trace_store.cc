// SPDX-License-Identifier: Apache-2.0
// Kept bytes in memory that the controller shares with its ranks.
#include "harness/run/trace_store.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "core/base/error.h"

namespace isoshard {
namespace {

class SharedMemoryStore final : public TraceStore {
 public:
  explicit SharedMemoryStore(std::vector<std::shared_ptr<Arena>> arenas)
      : arenas_(std::move(arenas)) {}
  std::shared_ptr<Arena> of_rank(int rank) override {
    return arenas_.at(static_cast<std::size_t>(rank));
  }
  std::shared_ptr<const Arena> kept_by(int rank) override {
    const std::shared_ptr<Arena> arena = of_rank(rank);
    arena->seal();
    return arena;
  }

 private:
  std::vector<std::shared_ptr<Arena>> arenas_;
};

/// What a process says of its rank's arena.
struct Kept {
  std::uint64_t size = 0;
  std::uint64_t digest = 0;
  ArenaHandle handle;  ///< for the others of its host
};

/// On processes of several hosts, or of one.
class HostStore final : public TraceStore {
 public:
  HostStore(Peers& peers, int num_ranks, std::size_t bytes, Sharing sharing)
      : peers_(peers),
        num_ranks_(static_cast<std::size_t>(num_ranks)),
        bytes_(sharing == Sharing::kTogether ? bytes * num_ranks_ : bytes),
        sharing_(sharing),
        arenas_(num_ranks_) {
    // whose process is forked from this one, and must find it
    if (is_of_one_process() && runs_here(0)) (void)of_rank(0);
  }
  std::shared_ptr<Arena> of_rank(int rank) override {
    std::shared_ptr<Arena>& arena = arenas_.at(place_of(rank));
    if (arena == nullptr) arena = new_arena(bytes_, "rank");
    return arena;
  }
  std::shared_ptr<const Arena> kept_by(int rank) override {
    std::shared_ptr<Arena>& arena = arenas_.at(place_of(rank));
    if (sharing_ == Sharing::kTogether && rank > 0) return arena;
    if (rank == 0) tell_of_all();
    const auto owner = static_cast<std::size_t>(is_of_one_process() ? 0 : rank);
    const Kept& kept = all_[owner];
    const int from_host = hosts().host_of[owner], own_host = host_of_this();
    if (sharing_ == Sharing::kOnEachHost) {
      mend_others(arena);
      if (!is_first_here()) attach(arena, all_[first_of(own_host)].handle);
    } else {
      if (from_host == own_host && static_cast<int>(owner) != peers_.index())
        attach(arena, kept.handle);
      if (hosts().count() > 1) send_to_others(arena, kept.size, from_host);
    }
    return arena;
  }

 private:
  static constexpr std::size_t kPiece = std::size_t{4} << 20;  ///< whole units of alignment

  [[nodiscard]] const Hosts& hosts() const noexcept { return peers_.hosts(); }
  [[nodiscard]] std::size_t first_of(int host) const {
    return static_cast<std::size_t>(hosts().first[static_cast<std::size_t>(host)]);
  }
  [[nodiscard]] int host_of_this() const {
    return hosts().host_of[static_cast<std::size_t>(peers_.index())];
  }
  [[nodiscard]] int num_in_host() const {
    return hosts().num_processes[static_cast<std::size_t>(host_of_this())];
  }
  [[nodiscard]] bool is_first_here() const { return hosts().is_first(peers_.index()); }
  /// A world of one process, for one rank or for all, is forked.
  [[nodiscard]] bool is_of_one_process() const noexcept {
    return num_ranks_ == 1 || sharing_ == Sharing::kTogether;
  }
  [[nodiscard]] bool runs_here(int rank) const {
    if (sharing_ == Sharing::kOnEachHost) return is_first_here();
    return (is_of_one_process() ? 0 : rank) == peers_.index();
  }
  [[nodiscard]] std::size_t place_of(int rank) const {
    return sharing_ == Sharing::kTogether ? 0 : static_cast<std::size_t>(rank);
  }
  [[nodiscard]] std::shared_ptr<Arena> new_arena(std::size_t bytes, const std::string& name) const {
    return peers_.memory() == nullptr ? std::make_shared<Arena>(bytes, name)
                                      : std::make_shared<Arena>(peers_.memory(), bytes, name);
  }
  /// After which the host's other processes find it.
  [[nodiscard]] ArenaHandle sealed(Arena& arena) const {
    arena.seal();
    return num_in_host() == 1 ? ArenaHandle() : arena.share(num_in_host());
  }

  void tell_of_all() {
    Kept own;
    const bool runs_one =
        is_of_one_process() ? runs_here(0) : peers_.index() < static_cast<int>(num_ranks_);
    if (runs_one) {
      Arena& arena = *of_rank(is_of_one_process() ? 0 : peers_.index());
      own.handle = sealed(arena);
      own.size = arena.size();
      if (sharing_ == Sharing::kOnEachHost) own.digest = XXH3_64bits(arena.data(), arena.size());
    }
    all_.resize(static_cast<std::size_t>(peers_.count()));
    peers_.gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all_)));
  }

  void attach(std::shared_ptr<Arena>& arena, ArenaHandle handle) {
    arena = std::make_shared<Arena>(peers_.memory(), handle, "of another process");
  }

  /// Bytes that are not there yet, from an arena of this host or into a new one.
  template <class Move>
  void move_pieces(const Arena* from, Arena* to, std::uint64_t size, const Move& move) {
    std::vector<std::byte> piece;
    for (std::size_t done = 0; done < size; done += piece.size()) {
      piece.resize(std::min<std::size_t>(kPiece, size - done));
      if (from != nullptr) std::memcpy(piece.data(), from->data() + done, piece.size());
      move(std::span(piece));
      if (to != nullptr) to->append(piece);
    }
  }

  /// To all hosts but the owner's.
  void send_to_others(std::shared_ptr<Arena>& arena, std::uint64_t size, int from_host) {
    const bool is_of_here = host_of_this() == from_host;
    ArenaHandle handle;
    if (is_first_here()) {
      if (!is_of_here) arena = new_arena(size + kPiece, "gathered");
      move_pieces(is_of_here ? arena.get() : nullptr, is_of_here ? nullptr : arena.get(), size,
                  [&](std::span<std::byte> piece) { peers_.broadcast_to_hosts(piece, from_host); });
      if (!is_of_here) handle = sealed(*arena);
    }
    if (is_of_here || num_in_host() == 1) return;
    peers_.broadcast_in_host(std::as_writable_bytes(std::span(&handle, 1)));
    if (!is_first_here()) attach(arena, handle);
  }

  /// Hosts that have kept something else than the first one get what that one has kept.
  void mend_others(std::shared_ptr<Arena>& arena) {
    const Kept right = all_.front();
    for (int host = 1; host < hosts().count(); ++host) {
      Kept& kept = all_[first_of(host)];
      if (kept.digest == right.digest && kept.size == right.size) continue;
      if (peers_.index() == 0) {
        move_pieces(arena.get(), nullptr, right.size,
                    [&](std::span<std::byte> piece) { peers_.send(piece, host); });
      }
      if (host_of_this() != host) continue;
      if (is_first_here()) {
        if (num_in_host() > 1) arena->share(1);  // nobody else gets it
        arena = new_arena(right.size + kPiece, "gathered");
        move_pieces(nullptr, arena.get(), right.size,
                    [&](std::span<std::byte> piece) { peers_.receive(piece, 0); });
        kept.handle = sealed(*arena);
      }
      if (num_in_host() > 1)
        peers_.broadcast_in_host(std::as_writable_bytes(std::span(&kept.handle, 1)));
    }
  }

  Peers& peers_;
  std::size_t num_ranks_;
  std::size_t bytes_;  ///< of an arena
  Sharing sharing_;
  std::vector<std::shared_ptr<Arena>> arenas_;
  std::vector<Kept> all_;  ///< by process, when the ranks have ended
};

class NoStore final : public TraceStore {
 public:
  std::shared_ptr<Arena> of_rank(int) override { return nullptr; }
  std::shared_ptr<const Arena> kept_by(int) override { return nullptr; }
};

}  // namespace

std::unique_ptr<TraceStore> make_trace_store(Launcher& launcher, int num_ranks, std::size_t bytes,
                                             Sharing sharing) {
  if (Peers* const peers = launcher.peers(); peers != nullptr)
    return std::make_unique<HostStore>(*peers, num_ranks, bytes, sharing);
  if (!launcher.shares_memory()) {
    throw NotBuiltError(fmt::format(
        "kept tensors need a launcher that shares memory with its ranks, got {}; keep nothing, or "
        "take the forked launcher",
        launcher.name()));
  }
  const auto size = static_cast<std::size_t>(num_ranks);
  std::vector<std::shared_ptr<Arena>> arenas;
  if (sharing == Sharing::kTogether) {
    arenas.assign(size, std::make_shared<Arena>(bytes * size, "ranks"));
  } else {
    for (std::size_t r = 0; r < size; ++r) arenas.push_back(std::make_shared<Arena>(bytes, "rank"));
  }
  return std::make_unique<SharedMemoryStore>(std::move(arenas));
}

std::unique_ptr<TraceStore> no_trace_store() {
  return std::make_unique<NoStore>();
}

}  // namespace isoshard
