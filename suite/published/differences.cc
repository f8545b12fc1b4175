// SPDX-License-Identifier: Apache-2.0
// Statistics of differences.
#include "suite/published/differences.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ATen/core/grad_mode.h>
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/base/error.h"

namespace isoshard {
namespace {

// The lower median, as torch.median.
double median_of(const at::Tensor& values) {
  const at::Tensor in_host_memory = values.cpu();
  const auto* data = in_host_memory.const_data_ptr<float>();
  std::vector<float> sorted(data, data + values.numel());
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>((sorted.size() - 1) / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return *middle;
}

}  // namespace

double Differences::percent_above(double threshold) const {
  for (std::size_t i = 0; i < kThresholds.size(); ++i) {
    if (kThresholds[i] == threshold) return above[i];
  }
  throw UsageError(fmt::format("the threshold must be one of {}, got {}",
                               fmt::join(kThresholds, ", "), threshold));
}

Differences differences(const at::Tensor& reference, const at::Tensor& actual) {
  if (reference.sizes() != actual.sizes()) {
    throw ShapeError(fmt::format("the tensors must have the same shape, got [{}] and [{}]",
                                 fmt::join(reference.sizes(), ", "),
                                 fmt::join(actual.sizes(), ", ")));
  }
  if (reference.numel() == 0) throw VacuousError("the tensors to compare must not be empty");
  const at::NoGradGuard no_grad;
  const at::ScalarType wide = reference.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor expected = reference.to(wide), got = actual.to(wide);
  const at::Tensor gap = (got - expected).abs().contiguous();
  Differences result;
  result.numel = gap.numel();
  result.not_finite =
      result.numel -
      at::isfinite(expected).logical_and(at::isfinite(got)).sum().item<std::int64_t>();
  result.max = gap.max().item<double>();
  result.mean = gap.mean(at::kDouble).item<double>();
  result.median = median_of(gap.to(at::kFloat).flatten());
  for (std::size_t i = 0; i < kThresholds.size(); ++i) {
    result.above[i] = 100.0 *
                      static_cast<double>(gap.gt(kThresholds[i]).sum().item<std::int64_t>()) /
                      static_cast<double>(result.numel);
  }
  result.reference_max = expected.abs().max().item<double>();
  result.reference_mean = expected.mean(at::kDouble).item<double>();
  result.reference_std = result.numel > 1 ? expected.to(at::kDouble).std().item<double>() : 0;
  result.worst_excess = (gap - expected.abs() * 1e-3).max().item<double>();
  return result;
}

nlohmann::json to_json(const Differences& d) {
  nlohmann::json above = nlohmann::json::object();
  for (std::size_t i = 0; i < kThresholds.size(); ++i)
    above[fmt::format("{:g}", kThresholds[i])] = d.above[i];
  return {{"numel", d.numel},
          {"max", d.max},
          {"mean", d.mean},
          {"median", d.median},
          {"percent_above", above},
          {"reference_max", d.reference_max},
          {"reference_mean", d.reference_mean},
          {"reference_std", d.reference_std},
          {"worst_excess_over_rtol_1e-3", d.worst_excess},
          {"not_finite", d.not_finite}};
}

Differences differences_of(const nlohmann::json& json) {
  // A NaN or Inf is null in JSON.
  const auto number = [&](const char* key) {
    return json.at(key).is_null() ? std::nan("") : json.at(key).get<double>();
  };
  Differences d;
  d.numel = json.at("numel").get<std::int64_t>();
  d.max = number("max");
  d.mean = number("mean");
  d.median = number("median");
  for (std::size_t i = 0; i < kThresholds.size(); ++i)
    d.above[i] = json.at("percent_above").at(fmt::format("{:g}", kThresholds[i])).get<double>();
  d.reference_max = number("reference_max");
  d.reference_mean = number("reference_mean");
  d.reference_std = number("reference_std");
  d.worst_excess = number("worst_excess_over_rtol_1e-3");
  d.not_finite = json.at("not_finite").get<std::int64_t>();
  return d;
}

}  // namespace isoshard
