// SPDX-License-Identifier: Apache-2.0
/// The statistics of the published tables (docs/internals/experiments.md): how far two tensors are
/// apart, element by element.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>

namespace isoshard {

inline constexpr std::array<double, 4> kThresholds = {1e-4, 1e-3, 5e-3, 1e-2};

struct Differences {
  std::int64_t numel = 0;
  double max = 0, mean = 0, median = 0;  ///< of abs(actual - reference)
  std::array<double, 4> above{};         ///< per cent of the elements above each of kThresholds
  double reference_max = 0, reference_mean = 0, reference_std = 0;
  /// Largest abs(actual - reference) - 1e-3 abs(reference): what an rtol of 1e-3 leaves to the atol
  double worst_excess = 0;
  std::int64_t not_finite = 0;  ///< NaN and Inf on either side

  [[nodiscard]] double percent_above(double threshold) const;
};

/// Shapes   equal. Differences are taken in fp32 (fp64 for fp64 tensors).
/// Errors   ShapeError if shapes differ; VacuousError for empty tensors.
[[nodiscard]] Differences differences(const at::Tensor& reference, const at::Tensor& actual);

[[nodiscard]] nlohmann::json to_json(const Differences& differences);
[[nodiscard]] Differences differences_of(const nlohmann::json& json);

}  // namespace isoshard
