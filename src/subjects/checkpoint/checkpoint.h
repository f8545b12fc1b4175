// SPDX-License-Identifier: Apache-2.0
/// A training run on disk, between two steps, readable by any mesh and any subject
/// (docs/checkpoints.md has the format).
///
/// Terms. Whole: a tensor of the model as one process has it, under its Hugging Face name. Stepped:
/// what the optimizer stepped, the master of a parameter where it had one of its own dtype, else
/// the parameter.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/dtype.h"
#include "core/mesh/layout.h"
#include "subjects/model/model.h"
#include "subjects/model/weights.h"
#include "subjects/optim/optimizer.h"

namespace isoshard {

/// Where one rank stood in its random streams and in the run. All ranks of a right run are equal
/// here: masks depend on the seed, the step and the indices of their elements in the whole.
struct StreamState {
  std::uint64_t seed = 0;
  std::int64_t next_step = 0;
  bool is_training = true;
  friend bool operator==(const StreamState&, const StreamState&) = default;
};

/// What a run needs to go on, besides tensors and settings.
struct RunProgress {
  StreamState stream;
  std::string rule;      ///< Optimizer::rule
  UpdateCounts updates;  ///< Optimizer::updates
  /// By name, of what else goes on: a loss scale, how long it has not overflowed.
  std::map<std::string, double, std::less<>> numbers;
};

/// kParameter: as forward reads it. kMaster: "<parameter>.master". kOptimizer:
/// "<parameter>.<state>".
enum class SavedKind : std::uint8_t { kParameter, kMaster, kOptimizer };
[[nodiscard]] std::string_view name_of(SavedKind kind) noexcept;

/// A tensor of which ranks saved parts.
struct SavedTensor {
  SavedKind kind = SavedKind::kParameter;
  Dtype dtype = Dtype::kFloat32;
  Shape shape;                                ///< of the whole
  std::map<int, std::uint64_t> hash_by_rank;  ///< XXH3 of the part that a rank's file holds
};

/// An open checkpoint. Copies share the mapped files.
///
/// Requires     nobody writes into its files meanwhile; a newer checkpoint in the same folder does
///              not.
/// Errors       open(): FileError that starts with the file, for a manifest that is none, a rank
///              file that is missing, cut short, of another checkpoint, rank or world, or whose
///              tensors are not those of the manifest. Reading: FileError that names file and
///              tensor if its bytes are not those that were written.
class Checkpoint {
 public:
  [[nodiscard]] static Checkpoint open(const std::filesystem::path& folder);

  /// Of the content: equal runs write equal ids.
  [[nodiscard]] const std::string& id() const noexcept;
  [[nodiscard]] std::int64_t steps_done() const noexcept;
  [[nodiscard]] int world_size() const noexcept;
  /// For a rank of a world of this size: its own where the world is as large as that which wrote,
  /// else what all ranks agree on.
  /// Errors   FileError if they do not.
  [[nodiscard]] RunProgress progress(int rank, int world_size) const;
  [[nodiscard]] const std::map<std::string, SavedTensor, std::less<>>& tensors() const noexcept;
  /// Errors   FileError if there is no such tensor.
  [[nodiscard]] const SavedTensor& tensor(std::string_view name) const;
  /// "<parameter>.master" if there is one, else the parameter.
  [[nodiscard]] std::string stepped_name(std::string_view parameter) const;
  /// "<parameter>.exp_avg", ...: sorted.
  [[nodiscard]] std::vector<std::string> state_names(std::string_view parameter) const;

  /// Copies elements of the flattened whole into `flat`, a dense 1-D tensor of the saved dtype.
  /// Ranges outside of it are a bug.
  void read(std::string_view name, std::span<const FlatRange> ranges, at::Tensor flat) const;
  /// In the saved dtype.
  [[nodiscard]] at::Tensor read_whole(std::string_view name) const;

  /// Reads everything. FileError names the file and what is wrong: another SHA-256 (with the first
  /// tensor that is not what was written), a tensor with a NaN or an infinity, one that the parts
  /// do not cover, a parameter that is not its master rounded.
  void require_intact() const;
  /// Errors   FileError that lists every parameter that is missing, extra or of another shape, and
  ///          of those that fit every one with other optimizer state than the rule keeps; or names
  ///          the two rules.
  void require_fits(std::span<const ParameterSpec> specs, std::string_view rule) const;

 private:
  struct Content;
  std::shared_ptr<const Content> content_;
};

/// What was stepped, as a source of weights in the dtype in which it is saved.
class CheckpointWeights final : public WeightSource {
 public:
  explicit CheckpointWeights(Checkpoint checkpoint) : checkpoint_(std::move(checkpoint)) {}
  [[nodiscard]] at::Tensor read(const ParameterSpec& spec, const Shape& offset,
                                const Shape& size) const override;

 private:
  Checkpoint checkpoint_;
};

/// In a checkpoint's folder.
inline constexpr std::string_view kManifestName = "manifest.json";
/// "step00000002-0123456789abcdef-rank00001.safetensors".
[[nodiscard]] std::string rank_file_name(std::int64_t steps_done, std::string_view id, int rank);
/// Under which a rank's file keeps where the part `tensor` lies: int64 [n, 2], begin and count in
/// the flattened whole.
[[nodiscard]] std::string ranges_name(std::string_view tensor);
/// XXH3 in 16 hexadecimal digits.
[[nodiscard]] std::string hash_text(std::uint64_t hash);

}  // namespace isoshard
