// SPDX-License-Identifier: Apache-2.0
/// Token ids of numbered samples: bytes of a text file, or seeded random ids (file_tokens.h: ids in
/// a file); and batches of them.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <vector>

#include "core/base/mapped_file.h"

namespace isoshard {

/// The ids of every sample, by its global number.
/// Determinism   a sample's ids depend on its number and the source's settings only, so any split
///               over ranks sees the same.
class TokenSource {
 public:
  virtual ~TokenSource() = default;
  /// Fills `ids` (one sequence) with the ids of sample `number`.
  virtual void read(std::int64_t number, std::span<std::int64_t> ids) const = 0;
  /// How many different samples there are; none if they have no end.
  [[nodiscard]] virtual std::optional<std::int64_t> num_samples() const noexcept {
    return std::nullopt;
  }
};

/// The bytes of a file are the ids. The file is cut into sequences. The seed chooses the sequence
/// that is sample 0; the others follow in file order and wrap around at the end.
///
/// Errors   FileError for a file that is missing or shorter than one sequence; UsageError that
///          names both numbers if a byte of the file is not below the vocabulary size.
class TextTokens final : public TokenSource {
 public:
  TextTokens(const std::filesystem::path& path, std::int64_t vocab_size, std::int64_t seq_length,
             std::uint64_t seed);
  void read(std::int64_t number, std::span<std::int64_t> ids) const override;
  [[nodiscard]] std::optional<std::int64_t> num_samples() const noexcept override {
    return num_sequences_;
  }

 private:
  MappedFile file_;
  std::int64_t seq_length_;
  std::int64_t num_sequences_;
  std::int64_t first_;
};

/// Uniform ids in [0, vocab_size) from Philox, by (seed, sample number, position).
class RandomTokens final : public TokenSource {
 public:
  RandomTokens(std::int64_t vocab_size, std::uint64_t seed);
  void read(std::int64_t number, std::span<std::int64_t> ids) const override;

 private:
  std::int64_t vocab_size_;
  std::uint64_t seed_;
};

/// A label that no loss counts.   Source   torch.nn.CrossEntropyLoss, ignore_index.
inline constexpr std::int64_t kNotCounted = -100;

/// One micro-batch of one rank.
struct TokenBatch {
  at::Tensor input_ids_BS;               ///< int64 [B,S]
  at::Tensor labels_BS;                  ///< int64 [B,S], not shifted; -100 is not counted
  std::vector<std::int64_t> sample_ids;  ///< [B], global sample numbers
  /// int64 [B,S], of packed documents (restart_positions); undefined: 0 to S - 1 in each sample.
  at::Tensor position_ids_BS = {};
};

/// The samples of these numbers, in this order; the labels are the ids.
[[nodiscard]] TokenBatch make_batch(const TokenSource& source, std::vector<std::int64_t> numbers,
                                    std::int64_t seq_length);

/// How many targets the i-th sample of a global batch counts when counts are made unequal: of the S
/// - 1 there are, 2 i (S - 1) / 23 fewer (23, 21, 19, ... for S = 24), but at least 1.
[[nodiscard]] std::int64_t unequal_count(std::int64_t index_in_global_batch,
                                         std::int64_t seq_length) noexcept;

/// Sets the labels of each sample's prompt to -100: the first `length` + i tokens of the i-th
/// sample of a global batch, but not its last token. What is left is an answer to train on.
void hide_prompts(TokenBatch& batch, std::int64_t length, std::int64_t global_batch_size);

/// Sets the labels of the targets beyond unequal_count to -100. Sample numbers are counted within
/// `global_batch_size`.
void make_counts_unequal(TokenBatch& batch, std::int64_t global_batch_size);

/// Sets the position ids of samples that are several documents, each of which ends with the token
/// `end_of_document`: positions count from 0 again in the token after it. Attention is not told: it
/// sees the documents before, too.
/// Source   Megatron-LM get_ltor_masks_and_position_ids, reset_position_ids.
void restart_positions(TokenBatch& batch, std::int64_t end_of_document);

}  // namespace isoshard
