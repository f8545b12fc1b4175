// SPDX-License-Identifier: Apache-2.0
/// All that one run recorded, as the controller sees it, and the arenas that hold kept bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/host_tensor.h"
#include "core/mesh/mesh.h"
#include "harness/trace/record.h"

namespace isoshard {

class MemoryPool;

/// Where an arena begins in common memory.
struct ArenaHandle {
  std::uint64_t extent = 0;
};

/// Shared memory that one process fills and others read: bytes of kept tensors, never in anybody's
/// private memory.
///
/// The controller makes it before the fork (`capacity` reserves addresses only), the rank appends,
/// and after the rank's end the controller calls seal() and reads. Its memory is the pool's
/// (src/core/memory): what ranks or other arenas had before is used first, and when the object ends
/// in the process that made it, the next one takes it over.
///
/// In memory that several processes have in common, which did not fork each other, share() hands a
/// sealed arena to all of them. Its memory is free again when all have let it go.
/// Errors   InfrastructureError that names the bytes when it is full or memory is short.
class Arena {
 public:
  explicit Arena(std::size_t capacity, const std::string& name);
  /// In `common`, the memory of the processes of one host (Peers::memory).
  Arena(std::shared_ptr<MemoryPool> common, std::size_t capacity, const std::string& name);
  /// One that another process has shared, by what share() returned there; read-only. Called once
  /// by each of the others.
  /// Errors   InfrastructureError if that is no arena.
  Arena(std::shared_ptr<MemoryPool> common, ArenaHandle handle, const std::string& name);
  /// Files that lie one behind the other in memory, read-only and not copied: each from the offset
  /// in `begins` on. Nothing can be appended. A file that is shortened meanwhile ends the process.
  /// Errors   FileError if a file cannot be opened.
  Arena(std::span<const std::filesystem::path> files, std::vector<std::int64_t>& begins);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  /// Rank side. Returns the 64-byte aligned offset.
  std::int64_t append(std::span<const std::byte> bytes);
  /// Of the writing process; of any other one after seal(), and read-only there.
  [[nodiscard]] const std::byte* data() const noexcept;
  /// Bytes appended; shared between the processes.
  [[nodiscard]] std::size_t size() const noexcept;
  /// Controller side, after the writer has ended: read-only from here on, for this process and
  /// those that it forks.
  /// Errors   also InfrastructureError if the writer has damaged what says how much there is.
  void seal();
  /// By which the others of `num_processes` (this one is counted) find it. After seal(), of an
  /// arena in common memory; again only as long as none of the others has been told.
  ArenaHandle share(int num_processes);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct RankTrace {
  int rank = 0;
  std::vector<Record> records;         ///< in execution order
  std::shared_ptr<const Arena> arena;  ///< may be null when nothing was kept

  [[nodiscard]] const Record* find(const RecordKey& key) const;
  /// The kept local tensor: a view into the arena, which it keeps alive. Errors   VacuousError if
  /// it was not kept.
  [[nodiscard]] HostTensor tensor(const Record& record) const;
  [[nodiscard]] std::vector<std::byte> serialize() const;  ///< records only, for the result channel
  [[nodiscard]] static RankTrace deserialize(std::span<const std::byte> bytes);
};

/// One run. `ranks` holds every rank of the mesh, or the run is incomplete.
struct Trace {
  std::string subject;  ///< "reference", "ddp", "autotp", ...
  std::string case_slug;
  MeshShape mesh;
  std::vector<RankTrace> ranks;

  /// The global tensor put together from all ranks' kept bytes (partials summed in rank order in
  /// fp64, then rounded), as a record of this grad_scale holds it: times `grad_scale`, each part
  /// divided by its own. In fp16, gradients under a loss scale are rounded in units of it, as
  /// without it they are subnormal or 0.
  /// Errors   VacuousError if a part was not kept; MeshError if parts do not tile.
  [[nodiscard]] HostTensor assemble(const RecordKey& key, double grad_scale = 1) const;
};

}  // namespace isoshard
