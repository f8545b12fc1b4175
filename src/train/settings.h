// SPDX-License-Identifier: Apache-2.0
/// What a user may choose about a training step, in one struct that every subject takes.
#pragma once
#include <cstdint>
#include <string_view>

#include "optim/optimizer.h"

namespace isoshard {

/// kGlobal: mean over the counted tokens of the global batch. kLocal: mean over dp ranks of each rank's own token mean.
enum class LossMean : std::uint8_t { kGlobal, kLocal };
[[nodiscard]] std::string_view name_of(LossMean mean) noexcept;
[[nodiscard]] LossMean parse_loss_mean(std::string_view name);

struct TrainSettings {
  OptimizerSettings optimizer;
  double max_grad_norm = 1.0;  ///< 0: no clipping (the norm is recorded all the same)
  LossMean loss_mean = LossMean::kGlobal;
  std::int64_t bucket_bytes = 25 << 20;  ///< ddp's gradient buckets
  bool record_partials = false;          ///< record each rank's summand of row-parallel outputs, as "<module>.partial"
};

}  // namespace isoshard
