// SPDX-License-Identifier: Apache-2.0
/// The classes of parameters that gradient reductions treat differently.
#pragma once
#include <cstdint>
#include <string_view>

namespace isoshard {

/// kOther: not a parameter (an activation in a flat buffer, say). kRowBias: the bias of a
/// row-parallel linear layer; kKvReplica: a kv projection that several tp ranks hold alike.
enum class ParamClass : std::uint8_t {
  kOther,
  kMatrix,
  kBias,
  kRowBias,
  kNorm,
  kQkNorm,
  kKvReplica,
  kEmbedding,
  kPosition,
  kTied
};

/// other, matrix, bias, row_bias, norm, qk_norm, kv_replica, embedding, position, tied.
[[nodiscard]] std::string_view name_of(ParamClass param_class) noexcept;

}  // namespace isoshard
