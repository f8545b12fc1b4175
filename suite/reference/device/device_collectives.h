// SPDX-License-Identifier: Apache-2.0
/// How the ranks of a case meet whose tensors are on GPUs: through NCCL, or through host memory.
#pragma once
#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "core/comm/transport.h"
#include "fixtures/cases/case.h"

namespace isoshard {

struct DeviceCollectives {
  Transport transport = {};  ///< without `make`: the launcher's usual one, staged (DeviceRank)
  std::string words = {};    ///< which one it is, and why
};

/// What the choice depends on.
struct CollectivesFacts {
  int ranks = 1;                                  ///< of the world
  int gpus = 1;                                   ///< of this host
  bool forks_ranks = true;                        ///< false: they are processes of a job
  bool has_nccl = false;                          ///< this program has CUDA and NCCL
  std::function<std::string()> why_not_shared{};  ///< asked where there are more ranks than GPUs
};

/// NCCL where each rank has a GPU of its own; where ranks share one, NCCL if `why_not_shared` finds
/// no reason against it; host memory otherwise.
/// Ranks    local.
[[nodiscard]] DeviceCollectives choose_collectives(const CollectivesFacts& facts);

/// That of the case on this machine. Where ranks would share GPUs, why_no_shared_gpus() is asked
/// with as many ranks, once in a process for each number.
/// Ranks    called by the controller, before it has started CUDA; never by a rank.
[[nodiscard]] DeviceCollectives device_collectives(const Case& c);
/// The same of any world of so many ranks with tensors on the device.
[[nodiscard]] DeviceCollectives device_collectives(Device::Kind device, int ranks);
/// In words, of worlds of these sizes: once where all meet one way, else "1 rank: ...; 2 and 4
/// ranks: ...". Each size counts once; they are sorted.
/// Ranks    as device_collectives.
[[nodiscard]] std::string words_of_worlds(Device::Kind device, std::vector<int> sizes);
/// The answer is asked for again: for whoever has set another gpu_api().
void forget_shared_gpus() noexcept;

/// Whether so many ranks of this host can meet through NCCL, though they share GPUs: child
/// processes do it, with sums of 4 KB and of 400 KB that are looked at. A process that gets no
/// further for `deadline` is killed with all others, so that it ends after a few times that.
/// Returns why they cannot, in one line; empty if they can.
/// Ranks    as device_collectives.
[[nodiscard]] std::string why_no_shared_gpus(int ranks, std::chrono::milliseconds deadline);

/// "device.collectives" of a report: how the ranks of those cases meet that are on a device, each
/// way once. Empty where all are on a CPU.
/// Ranks    as device_collectives.
[[nodiscard]] std::map<std::string, std::string> collectives_environment(
    const std::vector<Case>& cases);

}  // namespace isoshard
