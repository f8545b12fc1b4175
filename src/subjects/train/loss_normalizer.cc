// SPDX-License-Identifier: Apache-2.0
// Global and local token means.
#include "subjects/train/loss_normalizer.h"

#include <fmt/format.h>

#include <cstddef>
#include <numeric>

#include "core/base/error.h"

namespace isoshard {
namespace {

std::size_t group_size(std::size_t num_samples, int num_groups) {
  const auto groups = static_cast<std::size_t>(num_groups);
  if (num_groups < 1 || num_samples == 0 || num_samples % groups != 0) {
    throw UsageError(fmt::format("the number of samples must be divisible by the {} groups, got {}",
                                 num_groups, num_samples));
  }
  return num_samples / groups;
}

}  // namespace

std::vector<double> GlobalTokenMean::weights(std::span<const std::int64_t> counts) {
  std::int64_t total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  const Buffer buffer{reinterpret_cast<std::byte*>(&total), 1, Dtype::kInt64};
  dp_->all_reduce(buffer, Reduction::kSum, {Purpose::kTokenCount, Axis::kDp, {}}).wait();
  if (total == 0)
    throw UsageError(
        "no token of the global batch is counted: every label is -100, so the loss has no mean");
  return std::vector<double>(counts.size(),
                             static_cast<double>(dp_->size()) / static_cast<double>(total));
}

std::vector<double> GlobalTokenSum::weights(std::span<const std::int64_t> counts) {
  return std::vector<double>(counts.size(), static_cast<double>(dp_degree_));
}

std::vector<double> GroupTokenMean::weights(std::span<const std::int64_t> counts) {
  const std::size_t size = group_size(counts.size(), num_groups_);
  std::vector<double> weights;
  for (std::size_t first = 0; first < counts.size(); first += size) {
    const auto group = counts.subspan(first, size);
    const std::int64_t total = std::accumulate(group.begin(), group.end(), std::int64_t{0});
    if (total == 0) {
      throw UsageError(
          fmt::format("samples {} to {} of a dp rank count no token, so its own mean does not "
                      "exist; use the global loss mean (--loss-mean global)",
                      first, first + size - 1));
    }
    weights.insert(weights.end(), size,
                   1.0 / (static_cast<double>(num_groups_) * static_cast<double>(total)));
  }
  return weights;
}

std::vector<double> group_means(std::span<const double> sums, std::span<const std::int64_t> counts,
                                int num_groups) {
  const std::size_t size = group_size(sums.size(), num_groups);
  std::vector<double> means;
  for (std::size_t first = 0; first < sums.size(); first += size) {
    double sum = 0;
    std::int64_t count = 0;
    for (std::size_t i = first; i < first + size; ++i) {
      sum += sums[i];
      count += counts[i];
    }
    means.push_back(count == 0 ? 0.0 : sum / static_cast<double>(count));
  }
  return means;
}

}  // namespace isoshard
