// SPDX-License-Identifier: Apache-2.0
/// Shared memory without a name: a sealed memfd, mapped before the ranks are forked.
#pragma once
#include <cstddef>

#include "core/comm/region/region.h"

namespace isoshard {

/// Address space for `capacity` bytes that forked processes share; pages come into being when they
/// are reserved.
///
/// Guarantees   the file cannot shrink under its readers; it closes on exec and vanishes with its
///              last process.
/// Errors       InfrastructureError if a limit or the system refuses (it names which).
class ShmRegion {
 public:
  explicit ShmRegion(std::size_t capacity);
  ~ShmRegion();
  ShmRegion(const ShmRegion&) = delete;
  ShmRegion& operator=(const ShmRegion&) = delete;

  /// Its reserve throws InfrastructureError where a later write would end in SIGBUS. Usable in the
  /// forked processes.
  [[nodiscard]] RegionMemory memory();

 private:
  void reserve(std::size_t offset, std::size_t bytes);

  int fd_ = -1;
  std::byte* data_ = nullptr;
  std::size_t capacity_;
};

}  // namespace isoshard
