// SPDX-License-Identifier: Apache-2.0
/// Bounds from a curve's own settings.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/base/dtype.h"
#include "harness/curve/curve_judge.h"

namespace isoshard {
namespace {

constexpr double kLargestInFp32 = 1e-4;
constexpr std::string_view kSumOverTokens = "sum";  // the setting loss_mean

}  // namespace

CurveBounds curve_bounds(const Curve& actual,
                         std::span<const std::pair<std::string_view, double>> ceilings) {
  CurveBounds bounds;
  const nlohmann::json settings = nlohmann::json::parse(actual.settings);
  const auto says = [&](const char* key) {
    return settings.contains(key) && settings.at(key).is_string() ? settings.at(key) : "";
  };
  const std::string dtype = says("dtype"), autocast = says("autocast");
  const auto is_wide = [](const std::string& name) {
    return name.empty() || name == name_of(Dtype::kFloat32) || name == name_of(Dtype::kFloat64);
  };
  if (is_wide(dtype) && autocast.empty() && is_wide(says("reduce_dtype")) &&
      is_wide(says("output_dtype")))
    bounds.ceiling = kLargestInFp32;
  for (const auto& [subject, ceiling] : ceilings) {
    if (actual.subject == subject) bounds.ceiling = std::min(bounds.ceiling, ceiling);
  }
  // The ceilings are those of a mean over tokens.
  if (says("loss_mean") == kSumOverTokens && settings.contains("data")) {
    for (const char* const factor : {"dp", "batch_size", "micro_batches", "seq_length"})
      bounds.ceiling *= settings.at("data").value(factor, 1.0);
  }
  return bounds;
}

}  // namespace isoshard
