// SPDX-License-Identifier: Apache-2.0
/// Token ids stored in files: flat binary ids as nanoGPT and Megatron-LM prepare them, and
/// safetensors.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "subjects/data/tokens.h"

namespace isoshard {

/// How one id is stored, little-endian.
enum class IdType : std::uint8_t { kUint8, kInt16, kUint16, kInt32, kUint32, kInt64 };
/// uint8, int16, uint16, int32, uint32, int64.
[[nodiscard]] std::string_view name_of(IdType type) noexcept;
/// Errors   UsageError with a suggestion and the names.
[[nodiscard]] IdType parse_id_type(std::string_view name);
[[nodiscard]] std::int64_t size_of(IdType type) noexcept;

/// The ids of a .bin or .safetensors file, mapped into memory. Sample n is the n-th sequence; ids
/// after the last whole sequence are left out. Numbers beyond the last sample start again at the
/// first.
///
/// .bin   a flat run of ids without a header. Its type is `type`, or the widest of int64, uint32,
/// uint16 as which every id is
///               below the vocabulary size (read too narrow, ids would turn up as zeros between
///                 other ids).
/// .safetensors   one tensor of integers, or the one named `input_ids`: [T], a flat run, or [N,
/// seq_length], whose rows are the samples.
/// Requires      nobody shortens the file meanwhile.
/// Errors        FileError with path and numbers: an id outside the vocabulary (with its place), a
///               size that is not a multiple of the type's, fewer ids than one sequence, a
///               malformed file, rows of another length. UsageError for a `type` that a safetensors
///               file contradicts, or a sequence length < 1.
class FileTokens final : public TokenSource {
 public:
  FileTokens(const std::filesystem::path& path, std::optional<IdType> type, std::int64_t vocab_size,
             std::int64_t seq_length);
  void read(std::int64_t number, std::span<std::int64_t> ids) const override;
  [[nodiscard]] std::optional<std::int64_t> num_samples() const noexcept override {
    return num_sequences_;
  }
  /// The given or derived type.
  [[nodiscard]] IdType type() const noexcept { return type_; }

 private:
  void open_flat(const std::filesystem::path& path, std::optional<IdType> type,
                 std::int64_t vocab_size);
  void open_safetensors(const std::filesystem::path& path, std::optional<IdType> type,
                        std::int64_t vocab_size, std::int64_t seq_length);

  std::shared_ptr<const void> keeper_;  ///< of the mapping
  std::span<const std::byte> bytes_;
  IdType type_ = IdType::kInt64;
  std::int64_t seq_length_;
  std::int64_t num_sequences_ = 0;
};

/// True for the suffixes that FileTokens reads.
[[nodiscard]] bool is_token_file(const std::filesystem::path& path);

}  // namespace isoshard
