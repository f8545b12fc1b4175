// SPDX-License-Identifier: Apache-2.0
/// Factors that turn sums of token losses into the mean that a step minimizes.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/comm/communicator.h"
#include "subjects/settings/settings.h"

namespace isoshard {

/// A seam: a faulty test double may stand in from outside.
///
/// Requires     a step's loss on this rank is sum over samples of weight x summed token losses, and
///              gradients are averaged over dp.
/// Guarantees   the averaged gradient is the gradient of the requested mean.
class LossNormalizer {
 public:
  virtual ~LossNormalizer() = default;
  /// One factor per sample. `counts` are the counted tokens of this rank's samples, all
  /// micro-batches of the step in order (of a process that stands for several dp ranks: all of the
  /// first rank, then all of the second).
  /// Errors   UsageError if there is nothing to take the mean of.
  [[nodiscard]] virtual std::vector<double> weights(std::span<const std::int64_t> counts) = 0;
};

/// The mean over the counted tokens of the global batch: dp / (counted tokens of all dp ranks), on
/// every sample.
/// Ranks   collective over `dp` (token_count).
class GlobalTokenMean final : public LossNormalizer {
 public:
  explicit GlobalTokenMean(Communicator& dp) : dp_(&dp) {}
  [[nodiscard]] std::vector<double> weights(std::span<const std::int64_t> counts) override;

 private:
  Communicator* dp_;
};

/// The mean over groups of each group's own token mean: 1 / (groups x counted tokens of the
/// sample's group). The samples are cut into equal contiguous groups. One group is a dp rank's own
/// mean; a single process that stands for dp ranks has dp groups.
/// Ranks   local.
class GroupTokenMean final : public LossNormalizer {
 public:
  explicit GroupTokenMean(int num_groups) : num_groups_(num_groups) {}
  [[nodiscard]] std::vector<double> weights(std::span<const std::int64_t> counts) override;

 private:
  int num_groups_;
};

/// The sum over the counted tokens of the global batch: dp on every sample, which averaging over dp
/// divides out again.
/// Ranks   local.
class GlobalTokenSum final : public LossNormalizer {
 public:
  explicit GlobalTokenSum(int dp_degree) : dp_degree_(dp_degree) {}
  [[nodiscard]] std::vector<double> weights(std::span<const std::int64_t> counts) override;

 private:
  int dp_degree_;
};

/// Token means of contiguous equal groups, for the report; a group that counts nothing has mean 0.
/// Errors   UsageError if the samples do not divide into the groups.
[[nodiscard]] std::vector<double> group_means(std::span<const double> sums,
                                              std::span<const std::int64_t> counts, int num_groups);

}  // namespace isoshard
