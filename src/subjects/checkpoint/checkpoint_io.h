// SPDX-License-Identifier: Apache-2.0
/// The seam between a trainer and its checkpoints.
#pragma once
#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

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

/// A seam: a faulty test double may stand in from outside. The class itself is the right one.
class CheckpointIo {
 public:
  virtual ~CheckpointIo() = default;
  /// Writes this rank's parts; of parts that several ranks hold the first one writes. The folder is
  /// made if need be, and what an older checkpoint left there goes when the new one is whole: its
  /// manifest, renamed into place last, decides.
  ///
  /// Ranks         collective over the mesh's world.
  /// Errors        InfrastructureError on every rank, the older checkpoint is as it was: a file
  ///               that cannot be written (path, bytes, reason, rank), copies of one part that
  ///               differ between ranks, a NaN or an infinity (tensor and rank), ranks that stand
  ///               at different steps.
  /// Determinism   equal runs write equal bytes.
  virtual void write(const std::filesystem::path& folder, const RunProgress& progress,
                     const std::vector<SavedPart>& parts, Mesh& mesh) const;
  [[nodiscard]] virtual RunProgress progress(const Checkpoint& checkpoint, const Mesh& mesh) const;
  /// Fills what `layout` places in the whole; padding stays. `local` is dense; other dtypes are
  /// converted.
  virtual void read(const Checkpoint& checkpoint, std::string_view name, const Layout& layout,
                    const Mesh& mesh, at::Tensor local) const;
};

/// Which elements of the flattened whole a rank's dense tensor of shape `local` holds, in its
/// order.
[[nodiscard]] std::vector<FlatRange> ranges_of(const Layout& layout, const Shape& local,
                                               const MeshShape& mesh, int rank);

}  // namespace isoshard
