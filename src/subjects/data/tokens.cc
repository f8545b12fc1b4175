// SPDX-License-Identifier: Apache-2.0
// Token ids from text and from Philox.
#include "subjects/data/tokens.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "core/base/error.h"
#include "core/base/philox.h"

namespace isoshard {
namespace {

// Lane by lane, as a CPU compares many bytes at once.
std::int64_t largest_of(std::span<const std::byte> bytes) {
  constexpr std::size_t kLanes = 64;
  std::array<std::uint8_t, kLanes> largest{};
  std::size_t done = 0;
  for (; bytes.size() - done >= kLanes; done += kLanes) {
    const std::byte* const from = bytes.data() + done;
    for (std::size_t lane = 0; lane < kLanes; ++lane)
      largest[lane] = std::max(largest[lane], std::to_integer<std::uint8_t>(from[lane]));
  }
  for (; done < bytes.size(); ++done)
    largest[0] = std::max(largest[0], std::to_integer<std::uint8_t>(bytes[done]));
  return *std::max_element(largest.begin(), largest.end());
}

void check_vocabulary(std::span<const std::byte> bytes, const std::filesystem::path& path,
                      std::int64_t vocab_size) {
  if (vocab_size >= 256 || bytes.empty()) return;
  const std::int64_t largest = largest_of(bytes);
  if (largest >= vocab_size) {
    throw UsageError(
        fmt::format("{}: its largest byte is {}, which needs a vocabulary of at least {}; the "
                    "model has {}. Use a model with a "
                    "larger vocabulary, another text, or random ids",
                    path.string(), largest, largest + 1, vocab_size));
  }
}

}  // namespace

TextTokens::TextTokens(const std::filesystem::path& path, std::int64_t vocab_size,
                       std::int64_t seq_length, std::uint64_t seed)
    : file_(path), seq_length_(seq_length) {
  if (seq_length < 1)
    throw UsageError(fmt::format("the sequence length must be at least 1, got {}", seq_length));
  const auto size = static_cast<std::int64_t>(file_.bytes().size());
  num_sequences_ = size / seq_length;
  if (num_sequences_ == 0) {
    throw FileError(fmt::format("{}: must hold at least one sequence of {} bytes, got {}",
                                path.string(), seq_length, size));
  }
  check_vocabulary(file_.bytes(), path, vocab_size);
  first_ = static_cast<std::int64_t>(random_bits(seed, "data.text", 0) %
                                     static_cast<std::uint64_t>(num_sequences_));
}

void TextTokens::read(std::int64_t number, std::span<std::int64_t> ids) const {
  const std::int64_t sequence = (first_ + number) % num_sequences_;
  const auto bytes =
      file_.bytes().subspan(static_cast<std::size_t>(sequence * seq_length_), ids.size());
  std::transform(bytes.begin(), bytes.end(), ids.begin(),
                 [](std::byte byte) { return std::to_integer<std::int64_t>(byte); });
}

RandomTokens::RandomTokens(std::int64_t vocab_size, std::uint64_t seed)
    : vocab_size_(vocab_size), seed_(seed) {
  if (vocab_size < 1)
    throw UsageError(fmt::format("the vocabulary size must be at least 1, got {}", vocab_size));
}

void RandomTokens::read(std::int64_t number, std::span<std::int64_t> ids) const {
  const RandomStream stream(seed_, fmt::format("data.random.{}", number));
  for (std::size_t t = 0; t < ids.size(); ++t) {
    // The high 32 bits times the size, shifted down: uniform to within size / 2^32, and no
    // division.
    const std::uint64_t high = stream.bits(t) >> 32;
    ids[t] = static_cast<std::int64_t>((high * static_cast<std::uint64_t>(vocab_size_)) >> 32);
  }
}

TokenBatch make_batch(const TokenSource& source, std::vector<std::int64_t> numbers,
                      std::int64_t seq_length) {
  TokenBatch batch;
  batch.input_ids_BS =
      at::empty({static_cast<std::int64_t>(numbers.size()), seq_length}, at::kLong);
  auto* ids = batch.input_ids_BS.mutable_data_ptr<std::int64_t>();
  for (const std::int64_t number : numbers) {
    source.read(number, {ids, static_cast<std::size_t>(seq_length)});
    ids += seq_length;
  }
  batch.labels_BS = batch.input_ids_BS.clone();
  batch.sample_ids = std::move(numbers);
  return batch;
}

std::int64_t unequal_count(std::int64_t index_in_global_batch, std::int64_t seq_length) noexcept {
  const std::int64_t all = seq_length - 1;
  return std::max<std::int64_t>(std::min<std::int64_t>(all, 1),
                                all - 2 * index_in_global_batch * all / 23);
}

void hide_prompts(TokenBatch& batch, std::int64_t length, std::int64_t global_batch_size) {
  const std::int64_t seq_length = batch.labels_BS.size(1);
  for (std::size_t i = 0; i < batch.sample_ids.size(); ++i) {
    const std::int64_t prompt =
        std::min(length + batch.sample_ids[i] % global_batch_size, seq_length - 1);
    batch.labels_BS.select(0, static_cast<std::int64_t>(i)).slice(0, 0, prompt).fill_(kNotCounted);
  }
}

void make_counts_unequal(TokenBatch& batch, std::int64_t global_batch_size) {
  const std::int64_t seq_length = batch.labels_BS.size(1);
  for (std::size_t i = 0; i < batch.sample_ids.size(); ++i) {
    const std::int64_t count = unequal_count(batch.sample_ids[i] % global_batch_size, seq_length);
    // The target of position t is label t + 1, so the first `count` targets are labels 1 to count.
    if (count + 1 < seq_length)
      batch.labels_BS.select(0, static_cast<std::int64_t>(i))
          .slice(0, count + 1)
          .fill_(kNotCounted);
  }
}

void restart_positions(TokenBatch& batch, std::int64_t end_of_document) {
  const at::Tensor& ids_BS = batch.input_ids_BS;
  const at::Tensor places_S = at::arange(ids_BS.size(1), at::kLong);
  // Where the document of each token begins: after the last end before the token.
  const at::Tensor begins_BS =
      at::where(ids_BS.eq(end_of_document), places_S + 1, at::zeros_like(ids_BS))
          .roll(1, 1)
          .index_fill(1, at::zeros({1}, at::kLong), 0);
  batch.position_ids_BS = places_S - std::get<0>(begins_BS.cummax(1));
}

}  // namespace isoshard
