// SPDX-License-Identifier: Apache-2.0
/// Unsharded strategies that compute products in pieces, as ranks do: their roundings are legal.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "subjects/model/strategy.h"

namespace isoshard {

enum class CutDim : std::uint8_t { kTokens, kOutputs, kInputs };

/// The unsharded strategy whose products are computed in pieces.
///
/// Guarantees   in exact arithmetic every value is that of Strategy. A piece is rounded to the
///              tensor's dtype before it is added.
class CutStrategy : public Strategy {
 public:
  [[nodiscard]] at::Tensor linear(std::string_view module, const at::Tensor& x,
                                  const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                  Sink* sink) const override;
  [[nodiscard]] at::Tensor embedding(std::string_view module, const at::Tensor& ids_BS,
                                     const at::Tensor& weight, Sink* sink) const override;

 private:
  /// Where a dim of `size` is cut: 0 first, `size` last, ascending.
  [[nodiscard]] virtual std::vector<std::int64_t> cuts(std::string_view module, CutDim dim,
                                                       std::int64_t size) const = 0;
  /// In which order `pieces` products along the inputs are added: each number once.
  [[nodiscard]] virtual std::vector<std::size_t> order(std::string_view module,
                                                       std::size_t pieces) const = 0;
};

/// Tokens and outputs in equal pieces, as many as a small world has ranks; attention by logarithms
/// of sums, as it is computed where a query's keys come in pieces; and probabilities of tokens as
/// quotients, as they are computed where a vocabulary is in pieces.
///
/// Which kernel a library takes depends on the shape of a product. The one for few tokens or few
/// outputs may add all terms into one accumulator, where the one for more uses many: that is
/// another size of errors, not another draw of them. So are those of the other two
/// (docs/internals/tolerances.md, "Pieces"). Determinism  bit-equal between calls.
class EqualPieces final : public CutStrategy {
 public:
  static constexpr std::int64_t kTokenPieces = 8;
  static constexpr std::int64_t kOutputPieces = 4;
  /// Attention with dropout, and attention weights or logits above this number, which are held at
  /// once, are left to the unsharded strategy.
  static constexpr std::int64_t kMostHeld = std::int64_t{1} << 24;

  [[nodiscard]] CrossEntropy loss(const at::Tensor& logits, const at::Tensor& targets_BS,
                                  const at::Tensor& weight_B,
                                  double label_smoothing) const override;
  [[nodiscard]] at::Tensor attention(std::string_view module, const at::Tensor& q_BNSD,
                                     const at::Tensor& k_BKSD, const at::Tensor& v_BKSD,
                                     AttentionImpl impl, SoftmaxDtype softmax,
                                     const AttentionDropout& dropout) const override;

 private:
  [[nodiscard]] std::vector<std::int64_t> cuts(std::string_view module, CutDim dim,
                                               std::int64_t size) const override;
  [[nodiscard]] std::vector<std::size_t> order(std::string_view module,
                                               std::size_t pieces) const override;
};

}  // namespace isoshard
