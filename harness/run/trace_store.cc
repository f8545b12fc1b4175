// SPDX-License-Identifier: Apache-2.0
// Kept bytes in memory that the controller shares with its ranks.
#include "harness/run/trace_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <span>
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

/// Arenas of ranks whose memory only their own process sees: what a rank has kept is sent to all
/// that judge, piece by piece.
class GatheredStore final : public TraceStore {
 public:
  GatheredStore(Peers& peers, int num_ranks, std::size_t bytes, Sharing sharing)
      : peers_(peers),
        num_ranks_(static_cast<std::size_t>(num_ranks)),
        bytes_(bytes),
        sharing_(sharing),
        arenas_(num_ranks_) {
    // whose process is forked from this one, and must find it
    if (is_of_one_process() && peers_.index() == 0) (void)of_rank(0);
  }
  std::shared_ptr<Arena> of_rank(int rank) override {
    std::shared_ptr<Arena>& arena = arenas_.at(place_of(rank));
    if (arena == nullptr) {
      arena = std::make_shared<Arena>(sharing_ == Sharing::kTogether ? bytes_ * num_ranks_ : bytes_,
                                      "rank");
    }
    return arena;
  }
  std::shared_ptr<const Arena> kept_by(int rank) override {
    const std::size_t place = place_of(rank);
    if (sharing_ == Sharing::kTogether && rank > 0) return arenas_.at(place);
    const int owner = is_of_one_process() ? 0 : rank;
    const bool is_own = owner == peers_.index();
    if (is_own) of_rank(rank)->seal();
    std::uint64_t size = is_own ? of_rank(rank)->size() : 0;
    peers_.broadcast(std::as_writable_bytes(std::span(&size, 1)), owner);
    std::vector<std::byte> piece;
    if (!is_own) arenas_[place] = std::make_shared<Arena>(size + kPiece, "gathered");
    for (std::size_t done = 0; done < size; done += piece.size()) {
      piece.resize(std::min<std::size_t>(kPiece, size - done));
      if (is_own) std::memcpy(piece.data(), arenas_[place]->data() + done, piece.size());
      peers_.broadcast(piece, owner);
      if (!is_own) arenas_[place]->append(piece);
    }
    if (!is_own) arenas_[place]->seal();
    return arenas_[place];
  }

 private:
  static constexpr std::size_t kPiece = std::size_t{4} << 20;  ///< whole units of alignment
  /// A world of one process, for one rank or for all, is forked from process 0.
  [[nodiscard]] bool is_of_one_process() const noexcept {
    return num_ranks_ == 1 || sharing_ == Sharing::kTogether;
  }
  [[nodiscard]] std::size_t place_of(int rank) const {
    return sharing_ == Sharing::kTogether ? 0 : static_cast<std::size_t>(rank);
  }

  Peers& peers_;
  std::size_t num_ranks_;
  std::size_t bytes_;
  Sharing sharing_;
  std::vector<std::shared_ptr<Arena>> arenas_;
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
    return std::make_unique<GatheredStore>(*peers, num_ranks, bytes, sharing);
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
