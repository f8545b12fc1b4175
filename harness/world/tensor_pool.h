// SPDX-License-Identifier: Apache-2.0
/// Memory of big tensors that outlives the process that used it: the next world's tensors take it over.
///
/// Memory that a process touches for the first time is expensive: the kernel clears it, and in a virtual machine that gives free memory
/// back, the host has to find it again (measured: 0.3 GB/s against 11). Worlds come one after the other and need the same again and
/// again. So the controller holds one shared mapping, and ranks cut tensors of 2 MiB and more out of it.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <memory>

namespace isoshard {

/// Extents of 2 MiB in a memfd, each free or owned by a process. What nobody ever took costs nothing.
///
/// Ranks        made by the controller before it forks; take, give_back and holds by any process and thread.
/// Guarantees   no two owners have one extent; lower extents, which were used before, are taken first (of the upper half for pieces below
///              32 MiB).
/// Contents are whatever the last owner left, as with malloc.
class TensorPool {
 public:
  static constexpr std::size_t kExtentBytes = std::size_t{2} << 20;

  /// Room for `bytes`, rounded down to extents.   Errors   InfrastructureError if there is no address space or memfd.
  explicit TensorPool(std::size_t bytes);
  ~TensorPool();
  TensorPool(const TensorPool&) = delete;
  TensorPool& operator=(const TensorPool&) = delete;

  /// `bytes` in one piece, aligned to an extent, for the calling process; nullptr if there is no such piece or no memory.
  [[nodiscard]] std::byte* take(std::size_t bytes, pid_t owner) noexcept;
  /// What take() returned.
  void give_back(const std::byte* data) noexcept;
  /// Whose it is; 0: nobody's.
  [[nodiscard]] pid_t owner_of(const std::byte* data) const noexcept;
  [[nodiscard]] bool holds(const void* data) const noexcept;
  /// Frees all that a process owned which is gone.
  void reclaim(pid_t owner) noexcept;
  /// Gives the memory of free extents back to the system.
  void trim() noexcept;
  /// Bytes that were ever taken at once, as far as extents below the highest one say.
  [[nodiscard]] std::size_t high_water() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Makes the program's pool, once, in the controller before a world starts. Nothing happens in builds with an address sanitizer, which
/// has an allocator of its own, and where no pool can be had.
void make_tensor_pool();

/// Rank side: tensors of this process come out of the pool, where they are large and it has room. A process that it forks later shares
/// the tensors that it had then, instead of having copies of its own.
void use_tensor_pool();

/// Controller side: the process has been reaped. Where memory is short, what is free goes back to the system.
void reclaim_tensor_memory(pid_t gone);

}  // namespace isoshard
