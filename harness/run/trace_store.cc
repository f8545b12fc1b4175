// SPDX-License-Identifier: Apache-2.0
// Kept bytes in memory that the controller shares with its ranks.
#include "harness/run/trace_store.h"

#include <fmt/format.h>

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

class NoStore final : public TraceStore {
 public:
  std::shared_ptr<Arena> of_rank(int) override { return nullptr; }
  std::shared_ptr<const Arena> kept_by(int) override { return nullptr; }
};

}  // namespace

std::unique_ptr<TraceStore> make_trace_store(const Launcher& launcher, int num_ranks,
                                             std::size_t bytes, Sharing sharing) {
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
