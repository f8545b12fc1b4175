// SPDX-License-Identifier: Apache-2.0
/// A training run on disk, between two steps, readable by any mesh and any subject
/// (docs/reference/checkpoints.md has the format).
///
/// Terms. Whole: a tensor of the model as one process has it, under its Hugging Face name. Stepped:
/// the tensor that the optimizer updates, which is the master of a parameter if there is one of
/// another dtype, else the parameter.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
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

/// The position of one rank in its random streams and in the run. It is equal on all ranks of a
/// correct run, because masks depend on the seed, the step and the indices of their elements in the
/// whole.
struct StreamState {
  std::uint64_t seed = 0;
  std::int64_t next_step = 0;
  bool is_training = true;
  friend bool operator==(const StreamState&, const StreamState&) = default;
};

/// The state that a run needs to resume, besides tensors and settings.
struct RunProgress {
  StreamState stream = {};
  std::string rule = {};      ///< Optimizer::rule
  UpdateCounts updates = {};  ///< Optimizer::updates
  /// Other state by name: a loss scale and the number of steps since it last overflowed.
  std::map<std::string, double, std::less<>> numbers = {};
  /// The settings that the run has had from its first step on, as a JSON object; empty: not said.
  std::string training = {};
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
/// Requires     nobody writes into its files meanwhile; writing a newer checkpoint to the same
///              folder is allowed.
/// Errors       open(): FileError that starts with the file, for a malformed manifest, a rank file
///              that is missing, cut short, of another checkpoint, rank or world, or whose tensors
///              are not those of the manifest. Reading: FileError that names file and tensor if its
///              bytes are not those that were written.
class Checkpoint {
 public:
  [[nodiscard]] static Checkpoint open(const std::filesystem::path& folder);

  /// A hash of the content: equal runs write equal ids.
  [[nodiscard]] const std::string& id() const noexcept;
  [[nodiscard]] std::int64_t steps_done() const noexcept;
  [[nodiscard]] int world_size() const noexcept;
  /// RunProgress::training of the run that wrote it.
  [[nodiscard]] const std::string& training() const noexcept;
  /// The progress for a rank of a world of this size. If the world that wrote the checkpoint had
  /// the same size, it is that of the same rank; otherwise it is the one that all ranks agree on.
  /// Errors   FileError if the ranks do not agree.
  [[nodiscard]] RunProgress progress(int rank, int world_size) const;
  [[nodiscard]] const std::map<std::string, SavedTensor, std::less<>>& tensors() const noexcept;
  /// Errors   FileError if there is no such tensor.
  [[nodiscard]] const SavedTensor& tensor(std::string_view name) const;
  /// "<parameter>.master" if there is one, else the parameter.
  [[nodiscard]] std::string stepped_name(std::string_view parameter) const;
  /// The sorted names of its optimizer state: "<parameter>.exp_avg", ....
  [[nodiscard]] std::vector<std::string> state_names(std::string_view parameter) const;

  /// Copies elements of the flattened whole into `flat`, a dense 1-D tensor of the saved dtype.
  /// Ranges outside of it are a bug.
  void read(std::string_view name, std::span<const FlatRange> ranges, at::Tensor flat) const;
  /// Reads the whole tensor in its saved dtype.
  [[nodiscard]] at::Tensor read_whole(std::string_view name) const;

  /// Reads everything. FileError names the file and what is wrong: another SHA-256 (with the first
  /// tensor that is not what was written), a tensor with a NaN or an infinity, one that the parts
  /// do not cover, a parameter that is not its master rounded.
  void require_intact() const;
  /// Parameters that are frozen in the run that reads it need no optimizer state; what they have is
  /// not read. An empty function: none is.
  /// Errors   FileError that lists every parameter that is missing, extra or of another shape, and
  ///          of those that fit every one with other optimizer state than the rule keeps; or names
  ///          the two rules.
  void require_fits(std::span<const ParameterSpec> specs, std::string_view rule,
                    const std::function<bool(std::string_view parameter)>& is_frozen = {}) const;

 private:
  struct Content;
  std::shared_ptr<const Content> content_;
};

/// The stepped tensors as a source of weights, in their saved dtype.
class CheckpointWeights final : public WeightSource {
 public:
  explicit CheckpointWeights(Checkpoint checkpoint) : checkpoint_(std::move(checkpoint)) {}
  [[nodiscard]] at::Tensor read(const ParameterSpec& spec, const Shape& offset,
                                const Shape& size) const override;

 private:
  Checkpoint checkpoint_;
};

/// The file name of the manifest in a checkpoint's folder.
inline constexpr std::string_view kManifestName = "manifest.json";
/// "step00000002-0123456789abcdef-rank00001.safetensors".
[[nodiscard]] std::string rank_file_name(std::int64_t steps_done, std::string_view id, int rank);
/// The name under which a rank's file keeps the place of its part of `tensor`: int64 [n, 2], begin
/// and count in the flattened whole.
[[nodiscard]] std::string ranges_name(std::string_view tensor);
/// XXH3 in 16 hexadecimal digits.
[[nodiscard]] std::string hash_text(std::uint64_t hash);

}  // namespace isoshard
