// SPDX-License-Identifier: Apache-2.0
/// Batches in a file, so that a run can train on the same batches as another one.
#pragma once
#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "subjects/data/tokens.h"

namespace isoshard {

/// A .safetensors file of integers, [N, S] each: `input_ids`, and maybe `labels` (not shifted, -100
/// is not counted; without them the ids are the labels) and `sample_ids` [N] (without them 0, 1, 2,
/// ...). Row n is the n-th sample that the global batches take, dp ranks one after the other. An
/// `attention_mask` is taken if it hides nothing.
///
/// Errors   FileError with path, tensor and numbers: a malformed file, other tensors, shapes that
///          do not fit, an id or label outside the vocabulary, masked tokens.
class BatchFile {
 public:
  BatchFile(const std::filesystem::path& path, std::int64_t vocab_size);
  [[nodiscard]] std::int64_t num_samples() const noexcept { return input_ids_NS_.size(0); }
  [[nodiscard]] std::int64_t seq_length() const noexcept { return input_ids_NS_.size(1); }
  /// Errors   FileError if the file has fewer samples than `needed`, or sequences of another
  ///          length.
  void require(std::int64_t needed, std::int64_t seq_length) const;
  /// The samples in these rows, in this order. Rows beyond the last one start again at the first.
  [[nodiscard]] TokenBatch batch(const std::vector<std::int64_t>& rows) const;

 private:
  std::filesystem::path path_;
  at::Tensor input_ids_NS_, labels_NS_, sample_ids_N_;  ///< int64
};

/// Writes the batches below each other, with labels and sample ids.   Errors   as
/// write_safetensors.
void save_batches(const std::filesystem::path& path, std::span<const TokenBatch> batches);

}  // namespace isoshard
