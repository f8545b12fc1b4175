// SPDX-License-Identifier: Apache-2.0
/// Checkpoints of unknown origin as whole tensors by name, without LibTorch: safetensors files,
/// Hugging Face folders, and the checkpoints of this program (docs/reference/checkpoints.md).
#pragma once
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/host_tensor.h"
#include "core/mesh/layout.h"
#include "core/observe/site.h"

namespace isoshard {

/// "layers.2" before "layers.10": runs of digits count as numbers.
struct NaturalOrder {
  [[nodiscard]] bool operator()(std::string_view a, std::string_view b) const noexcept;
};

struct StoredTensor {
  RecordKind kind = RecordKind::kParam;  ///< or kOptimizer
  Dtype dtype = Dtype::kFloat32;
  Shape shape;
  std::string file;  ///< that holds it, for messages
  /// The whole tensor: a view of a mapped file where the bytes lie in one piece.
  std::function<HostTensor()> read;
};

using StoredTensors = std::map<std::string, StoredTensor, NaturalOrder>;

/// What a checkpoint holds. Copies share the mapped files.
struct StoredCheckpoint {
  std::filesystem::path path;  ///< as it was given
  StoredTensors tensors;
  /// What lies there and is not among the tensors, one sentence each.
  std::vector<std::string> left_out;
  bool lacks_tensors = false;  ///< whether tensors are among what is left out
  /// Whether config.json beside the weights says that input and output embeddings are one tensor.
  bool is_tied = false;
  /// What it says: "tie_word_embeddings is false", "no config.json".
  std::string tied_words = "there is no config.json";
};

/// Opens a safetensors file; a folder with model.safetensors, with one other safetensors file, or
/// with model.safetensors.index.json and the files that it names; that index itself; or a
/// checkpoint of this program.
///
/// Guarantees   every tensor of an opened checkpoint can be read.
/// Errors   FileError that starts with the file: as SafetensorsFile::open and read_json_file; an
///          index that names a missing file, a tensor that its file lacks, or a path outside of the
///          folder; a tensor that no index lists, or that two files hold; a checkpoint of this
///          program whose hashes do not fit, or whose parts leave a gap. Pickles, distributed
///          checkpoints, DeepSpeed's and Megatron's folders are named, with the command that
///          converts them.
[[nodiscard]] StoredCheckpoint open_checkpoint(const std::filesystem::path& path);

/// What a tensor is by its name and those of the others: optimizer state is called
/// "PARAMETER.STATE". No module of PyTorch has both a parameter and a part of the same name, so a
/// name that goes on behind another tensor's is state; the usual states are known without it.
/// Requires   `is_tensor` says whether a name is one of the checkpoint's tensors.
[[nodiscard]] RecordKind kind_of_stored(std::string_view name,
                                        const std::function<bool(std::string_view)>& is_tensor);

namespace detail {

/// Refuses a path that is a checkpoint in a format which only the Python package reads, or none at
/// all, in words that say what to do. Returns if safetensors or a manifest of ours may be there.
/// Errors   FileError.
void refuse_other_checkpoints(const std::filesystem::path& path);
/// "python -m isoshard convert PATH PATH.safetensors".
[[nodiscard]] std::string convert_command(const std::filesystem::path& path);
/// Whether the folder's manifest.json is that of a checkpoint of this program.
/// Errors   FileError that says so if it is that of a bundle.
[[nodiscard]] bool is_own_checkpoint(const std::filesystem::path& folder);
[[nodiscard]] StoredCheckpoint open_own_checkpoint(const std::filesystem::path& folder);

}  // namespace detail
}  // namespace isoshard
