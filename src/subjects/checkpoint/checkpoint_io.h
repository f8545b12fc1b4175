// SPDX-License-Identifier: Apache-2.0
/// The seam between a trainer and its checkpoints.
#pragma once
#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/error.h"
#include "core/mesh/mesh.h"
#include "subjects/checkpoint/checkpoint.h"

namespace isoshard {

/// A rank's part of a tensor that is saved.
struct SavedPart {
  std::string name;
  SavedKind kind = SavedKind::kParameter;
  Layout layout;  ///< of `tensor` in the whole; what it leaves out is padding and not saved
  at::Tensor tensor;
};

/// A state that no checkpoint can hold, found before anything was written: copies of one part that
/// differ between ranks, a NaN or an infinity. It says something about the run, not about the disk.
class UnsavableState : public InfrastructureError {
 public:
  using InfrastructureError::InfrastructureError;
};

/// A seam: a faulty test double may stand in from outside. The class itself is the right one.
class CheckpointIo {
 public:
  virtual ~CheckpointIo() = default;
  /// Writes this rank's parts. A part that several ranks hold is written by the first of them. The
  /// folder is created if it is missing. The files of an older checkpoint are removed once the new
  /// one is complete, which is when its manifest is renamed into place. Before that rank 0 opens
  /// every file that the manifest names.
  ///
  /// Ranks         collective over the mesh's world.
  /// Errors        On every rank, the older checkpoint is as it was: UnsavableState for copies of
  ///               one part that differ between ranks, a NaN or an infinity (tensor and rank);
  ///               InfrastructureError for a file that cannot be written (path, bytes, reason,
  ///               rank), for one that rank 0 does not see (path, rank, hosts), ranks that are at
  ///               different steps.
  /// Determinism   equal runs write equal bytes.
  virtual void write(const std::filesystem::path& folder, const RunProgress& progress,
                     const std::vector<SavedPart>& parts, Mesh& mesh) const;
  [[nodiscard]] virtual RunProgress progress(const Checkpoint& checkpoint, const Mesh& mesh) const;
  /// Fills the elements that `layout` places in the whole and leaves padding as it is. `local` is
  /// dense; other dtypes are converted.
  virtual void read(const Checkpoint& checkpoint, std::string_view name, const Layout& layout,
                    const Mesh& mesh, at::Tensor local) const;
};

/// Which elements of the flattened whole a rank's dense tensor of shape `local` holds, in its
/// order.
[[nodiscard]] std::vector<FlatRange> ranges_of(const Layout& layout, const Shape& local,
                                               const MeshShape& mesh, int rank);

}  // namespace isoshard
