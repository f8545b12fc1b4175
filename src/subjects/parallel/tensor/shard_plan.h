// SPDX-License-Identifier: Apache-2.0
/// Which parameters are split over tp, and how: plain data that strategies, trainer and faults read
/// or edit.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/mesh/layout.h"
#include "subjects/model/model.h"

namespace isoshard {

/// kColumn: weight and bias are cut along the layer's output features. kRow: the weight is cut
/// along its input features; the bias is whole on every rank. kKvReplica: a kv projection where tp
/// is above the number of kv heads: each rank holds one kv head, and several ranks hold the same
/// one. kVocabEmbedding and kVocabHead: the vocabulary, padded to equal shards. The dim that is cut
/// is the parameter's own (TpSplit::dim).
enum class ShardKind : std::uint8_t {
  kReplicated,
  kColumn,
  kRow,
  kKvReplica,
  kVocabEmbedding,
  kVocabHead
};
/// replicated, column, row, kv_replica, vocab_embedding, vocab_head.
[[nodiscard]] std::string_view name_of(ShardKind kind) noexcept;
/// Whether the vocabulary is split (kVocabEmbedding, kVocabHead).
[[nodiscard]] bool is_vocab(ShardKind kind) noexcept;

/// By parameter name; a parameter that is not listed is replicated.
struct ShardPlan {
  std::map<std::string, ShardKind, std::less<>> kinds;
  int tp_degree = 1;
  /// The kv head that each tp rank holds, for kKvReplica; empty if there is none.
  std::vector<int> kv_head_of_rank;
  int num_kv_heads = 0;                                  ///< of the whole model, for kKvReplica
  std::int64_t vocab_size = 0, vocab_rows_per_rank = 0;  ///< for kVocabEmbedding and kVocabHead

  [[nodiscard]] ShardKind kind_of(std::string_view parameter) const;
  /// The kind of a linear layer: that of "<module>.weight".
  [[nodiscard]] ShardKind kind_of_module(std::string_view module) const;
  /// The dimension of `spec` that is split over tp, -1 if none.
  [[nodiscard]] int sharded_dim(const ParameterSpec& spec) const;
  /// Where the shard of tp rank `tp_rank` lies in the whole parameter: one box, or one for each
  /// fused section (TpSplit::sections), which follow each other in the shard; none if the shard of
  /// a vocabulary is all padding.
  [[nodiscard]] Layout layout_of(const ParameterSpec& spec, int tp_rank) const;
  [[nodiscard]] VocabShard vocab_shard(int tp_rank) const;
  /// False on a rank whose shard of `spec` is also held by a lower tp rank, so that sums over
  /// shards count each shard once.
  [[nodiscard]] bool counts_shard(const ParameterSpec& spec, int tp_rank) const;
  /// kKvReplica for copies of kv heads, the parameter's own class otherwise.
  [[nodiscard]] ParamClass class_of(const ParameterSpec& spec) const;
};

}  // namespace isoshard
