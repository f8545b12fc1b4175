// SPDX-License-Identifier: Apache-2.0
/// Where initial parameter values come from.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

#include "core/mesh/layout.h"
#include "subjects/model/model.h"

namespace isoshard {

/// Reads any box of any parameter, so that a rank never needs a whole tensor to get its part.
/// Determinism   the values do not depend on the box asked for.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  /// A fresh contiguous tensor of shape `size`, fp32 or wider as stored. `offset` and `size` have
  /// one entry per dim.
  [[nodiscard]] virtual at::Tensor read(const ParameterSpec& spec, const Shape& offset,
                                        const Shape& size) const = 0;
  /// read(...) in `type`. Of a large box rows are read and converted a few at a time: its fp32 copy
  /// would be twice the result.
  [[nodiscard]] virtual at::Tensor read_as(at::ScalarType type, const ParameterSpec& spec,
                                           const Shape& offset, const Shape& size) const;
  /// The same, written into `result` of shape `size`, in its dtype.
  void read_into(const at::Tensor& result, const ParameterSpec& spec, const Shape& offset,
                 const Shape& size) const;
};

/// Philox normals N(0, std) by (seed, parameter name, flat index); norm weights 1, biases 0 as the
/// specs say - or, with `generic`, 1 + 0.1 n and 0.1 n, so that no norm weight or bias has its
/// special value (what fault cases need).
class InitialWeights final : public WeightSource {
 public:
  InitialWeights(std::uint64_t seed, double std, bool generic)
      : seed_(seed), std_(std), generic_(generic) {}
  [[nodiscard]] at::Tensor read(const ParameterSpec& spec, const Shape& offset,
                                const Shape& size) const override;

 private:
  std::uint64_t seed_;
  double std_;
  bool generic_;
};

}  // namespace isoshard
