// SPDX-License-Identifier: Apache-2.0
/// Memory that outlives the process that used it: the tensors of a world reuse the memory of the
/// last world's tensors and records.
///
/// Memory that a process touches for the first time is expensive: the kernel clears it, and in a
/// virtual machine that gives free memory back, the host has to find it again (measured: 0.3 GB/s
/// against 11). Worlds run one after the other and need the same amount each time. So the
/// controller holds one shared mapping, and ranks allocate tensors of 2 MiB and more, and the bytes
/// of traces, from it.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace isoshard {

/// Extents of 2 MiB in a memfd. Each extent is free or has one owner. An extent that was never
/// taken uses no memory.
///
/// An owner is a process (its id), or what new_owner() returns.
/// Ranks        made by the controller before it forks, or by each of several processes of one
///              file; all members by any process and thread.
/// Guarantees   no two owners have one extent; the lowest that are free and fit are taken.
/// The contents are what the last owner left, as with malloc.
class MemoryPool {
 public:
  static constexpr std::size_t kExtentBytes = std::size_t{2} << 20;

  /// Room for `bytes`, rounded down to extents.
  /// Errors   InfrastructureError if there is no address space or memfd, no memory for the table of
  ///          owners, or files must not be so large.
  explicit MemoryPool(std::size_t bytes);
  /// The same in a file that other processes map as well: each makes a pool of it, with the same
  /// `bytes`, and they share extents and owners. The first one begins with a file of zeros or
  /// without length. What the file has behind file_bytes(bytes) is left alone. Closes `fd`, also on
  /// an error.
  MemoryPool(int fd, std::size_t bytes);
  /// How much of its file a pool uses.
  [[nodiscard]] static std::size_t file_bytes(std::size_t bytes) noexcept;
  ~MemoryPool();
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  /// A new owner that is not a process. It keeps its extents until reclaim().
  [[nodiscard]] pid_t new_owner() noexcept;
  /// `bytes` in one piece, aligned to an extent; nullptr if there is no such piece, or (and errno)
  /// no memory.
  [[nodiscard]] std::byte* take(std::size_t bytes, pid_t owner) noexcept;
  /// Frees `data`, which take() returned.
  void give_back(const std::byte* data) noexcept;
  /// The `count` lowest free extents, in rising order. Fewer, or none, if there are no more.
  /// Their memory is not obtained yet: a first touch that fails raises SIGBUS.
  [[nodiscard]] std::vector<std::uint32_t> take_scattered(std::size_t count, pid_t owner);
  /// Maps `count` extents from `first` on at `address` as well, in place of what is mapped there.
  /// Returns   false (and errno) on failure.
  [[nodiscard]] bool map_at(std::byte* address, std::uint32_t first, std::size_t count,
                            int protection) const noexcept;
  /// The owner of an extent; 0 if it is free or outside the pool.
  [[nodiscard]] pid_t owner_of(const std::byte* data) const noexcept;
  [[nodiscard]] pid_t owner_of(std::uint32_t extent) const noexcept;
  /// Makes this owner's extents read-only at the pool's own addresses, in this process and in those
  /// that it forks later, until reclaim() is called here or they take the extents themselves.
  void protect(pid_t owner);
  [[nodiscard]] bool holds(const void* data) const noexcept;
  /// The number of the extent that `data`, which the pool holds, lies in.
  [[nodiscard]] std::uint32_t extent_of(const std::byte* data) const noexcept;
  [[nodiscard]] std::size_t num_extents() const noexcept;
  /// Frees all extents of an owner that is gone.
  void reclaim(pid_t owner) noexcept;
  /// Gives the memory of free extents back to the system.
  void trim() noexcept;
  /// Bytes up to the end of the highest extent that was ever taken.
  [[nodiscard]] std::size_t high_water() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The program's pool, as large as the machine's memory. The controller must call it first, before
/// a world starts.
/// Returns   nullptr where none can be had: a limit on the size of files, no address space.
[[nodiscard]] std::shared_ptr<MemoryPool> program_pool();

/// Obtains the memory of `bytes` that are mapped and maps them all now, where each first touch
/// would be a fault.
/// Requires   an address at the beginning of a page.
/// Returns    false (and errno) where memory is short, instead of a SIGBUS later (except before
///            Linux 5.14, which cannot report it).
[[nodiscard]] bool populate(std::byte* data, std::size_t bytes) noexcept;

}  // namespace isoshard
