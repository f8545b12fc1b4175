// SPDX-License-Identifier: Apache-2.0
/// Weights that are one ulp away from others: what the reference's response is measured with.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>

#include "core/base/dtype.h"
#include "subjects/model/weights.h"

namespace isoshard {

/// Rounds to `dtype`, then moves every element to the next larger or next smaller value of that
/// dtype, by a random bit of (seed, parameter name, flat index). Zero moves to the smallest
/// subnormal of either sign; infinities and NaN stay.
///
/// With `autocast` the values stay of `dtype`, but those that autocast rounds before they are used
/// (of linear layers, and of a tied embedding) move by one ulp of autocast's dtype: an ulp of their
/// own would be rounded away. Embeddings, positions and norms are used as they are.
/// Determinism   as InitialWeights: any box gives the same values.
class PerturbedWeights final : public WeightSource {
 public:
  PerturbedWeights(std::shared_ptr<const WeightSource> inner, std::uint64_t seed, Dtype dtype,
                   std::optional<Dtype> autocast = {});
  /// A tensor of the given dtype.
  [[nodiscard]] at::Tensor read(const ParameterSpec& spec, const Shape& offset,
                                const Shape& size) const override;

 private:
  std::shared_ptr<const WeightSource> inner_;
  std::uint64_t seed_;
  Dtype dtype_;
  std::optional<Dtype> autocast_;
};

}  // namespace isoshard
