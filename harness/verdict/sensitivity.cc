// SPDX-License-Identifier: Apache-2.0
/// Rolled copies and ceilings.
#include "harness/verdict/sensitivity.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "harness/stats/tolerance.h"

namespace isoshard {
namespace {

/// Elements of a tensor that are rolled: enough for a distance, and no second pass over a large
/// model.
constexpr std::int64_t kRolledElements = std::int64_t{1} << 16;

}  // namespace

bool is_second_moment(const RecordKey& key) noexcept {
  return parsed(key).state.ends_with("_sq");
}

double scale_ceiling(const RecordKey& key, Dtype coarsest) noexcept {
  const double ceiling = coarsest == Dtype::kFloat64   ? 1e-9
                         : coarsest == Dtype::kFloat32 ? 1e-3
                                                       : 0.5;
  return is_second_moment(key) ? (2 + ceiling) * ceiling : ceiling;
}

double weakness_ceiling(const RecordKey& key, Dtype coarsest) noexcept {
  return scale_ceiling(key, coarsest == Dtype::kFloat64 ? Dtype::kFloat32 : coarsest);
}

double rolled_error(const Reference& reference, const Record& record) {
  const std::int64_t count = std::min(numel_of(record.layout.global_shape), kRolledElements);
  if (count < 2) return 0;
  const auto size = static_cast<std::int64_t>(size_of(record.dtype));
  const std::byte* data = reference.bytes(record);
  Stats stats;
  accumulate(stats, data + size, record.dtype, data, record.dtype, count - 1, 1);
  accumulate(stats, data, record.dtype, data + (count - 1) * size, record.dtype, 1, 0);
  return stats.relative_error();
}

ShiftedCopy judged_shifted_copy(const TensorComparison& c, double k, Dtype coarsest,
                                double response) noexcept {
  // A rolled copy has the norm of the original, so its best-fit scale is 1 - error^2 / 2.
  if (c.rolled_error > c.allowed_relative_error ||
      c.rolled_error * c.rolled_error / 2 > c.allowed_scale_error)
    return ShiftedCopy::kRejected;
  // Each of two runs rounds an element by up to one unit roundoff: a response is up to two of them,
  // whatever the tensor.
  const double responses = responses_allowed(k, coarsest);
  double flat = responses * 2 * unit_roundoff(coarsest);
  // Squares of gradients that differ in sign alone are equal but for their own noise, which is at
  // most the largest response: two of them, each in two elements, are 2 sqrt(2) of it apart.
  const bool is_judged = c.allowed_relative_error <= scale_ceiling(c.key, coarsest);
  if (is_second_moment(c.key) && is_judged && size_of(coarsest) > 2)
    flat = std::max(flat, 2 * std::sqrt(2.0) * response);
  return c.rolled_error <= flat ? ShiftedCopy::kFlat : ShiftedCopy::kPassed;
}

std::string weakness_of_noise(const TensorComparison& c, double largest_norm, Dtype coarsest) {
  if (c.level != Level::kPerturbed || !c.insensitive || c.key.kind != RecordKind::kGrad) return "";
  const double ceiling = weakness_ceiling(c.key, coarsest);
  if (c.allowed_absolute <= ceiling * largest_norm) return "";
  return fmt::format(
      "an error norm of {:.2g} would pass as noise (at most {:.2g} may, {:.2g} of the largest "
      "tensor of its kind)",
      c.allowed_absolute, ceiling * largest_norm, ceiling);
}

std::string weakness(const TensorComparison& c, Dtype coarsest) {
  if (c.level != Level::kPerturbed || c.insensitive || c.subnormal) return "";
  const double ceiling = weakness_ceiling(c.key, coarsest);
  if (!(c.scale_sensitivity <= ceiling)) {
    return fmt::format("a scale error of {:.2g} would pass (at most {:.2g} may, in {})",
                       c.scale_sensitivity, ceiling, name_of(coarsest));
  }
  if (c.rolled_copy == ShiftedCopy::kPassed) {
    return fmt::format("a rolled copy would pass (its error is {:.2g}, allowed {:.2g})",
                       c.rolled_error, c.allowed_relative_error);
  }
  return "";
}

}  // namespace isoshard
