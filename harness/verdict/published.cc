// SPDX-License-Identifier: Apache-2.0
/// Measuring what the published bounds are about.
#include "harness/verdict/published.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <optional>
#include <string_view>

#include "harness/verdict/verdict.h"

namespace isoshard {
namespace {

constexpr double kLossRelative = 1e-2;
constexpr double kLargestOfPublished = 5.5;

std::optional<double> output_limit(Dtype coarsest) {
  switch (coarsest) {
    case Dtype::kFloat64:
    case Dtype::kFloat32:
      return 1e-3;
    case Dtype::kBFloat16:
      return 0.15;
    default:
      return std::nullopt;
  }
}

bool is_layer_output(const RecordKey& key) {
  if (key.kind != RecordKind::kActivation || key.step != 0) return false;
  const std::string_view name = key.name;
  const std::string_view last = name.substr(name.rfind('.') + 1);
  const auto is_digit = [](unsigned char c) { return std::isdigit(c) != 0; };
  if (!last.empty() && std::all_of(last.begin(), last.end(), is_digit)) return true;
  // The norm behind the layers, by its usual names; those of layers have the layer's number before
  // them.
  const bool is_norm = last.ends_with("norm") || last == "ln_f";
  return is_norm && std::none_of(name.begin(), name.end(), is_digit);
}

bool is_loss(const RecordKey& key) {
  return is_named_loss(role_of(key));
}

double output_error(const TensorComparison& t) {
  if (t.stats.nonfinite_mismatch != 0) return INFINITY;
  return t.stats.max_abs / std::max(1.0, t.stats.max_abs_reference / kLargestOfPublished);
}

double loss_error(const TensorComparison& t) {
  if (t.stats.nonfinite_mismatch != 0) return INFINITY;
  if (t.actual_values.size() != t.reference_values.size() || t.actual_values.empty())
    return t.stats.relative_error();
  double largest = 0;
  for (std::size_t i = 0; i < t.actual_values.size(); ++i) {
    const double difference = std::fabs(t.actual_values[i] - t.reference_values[i]);
    if (difference != 0) largest = std::max(largest, difference / std::fabs(t.reference_values[i]));
  }
  return largest;
}

/// Whether the reference's loss itself is rounded to 16 bits, or is a sum of a few such numbers:
/// the sum over tokens is then rounded again and again, by more than the published bound.
bool has_16_bits(const TensorComparison& t, Dtype coarsest) {
  if (size_of(coarsest) != 2 || t.reference_values.empty()) return false;
  constexpr int kBitsOfSum = 4;  // of up to 16 micro-batches
  const int bits = (coarsest == Dtype::kBFloat16 ? 8 : 11) + kBitsOfSum;
  return std::ranges::all_of(t.reference_values, [bits](double value) {
    int exponent = 0;
    const double mantissa = std::ldexp(std::frexp(value, &exponent), bits);
    return mantissa == std::trunc(mantissa);
  });
}

template <class Belongs, class Error>
void measure(const std::vector<TensorComparison>& tensors, PublishedBound bound, Belongs&& belongs,
             Error&& error, const std::function<bool(const TensorComparison&)>& is_too_wild,
             std::vector<PublishedBound>& bounds) {
  bool any = false;
  for (const TensorComparison& t : tensors) {
    if (!belongs(t.key)) continue;
    if (is_too_wild(t)) {
      ++bound.too_wild;
      continue;
    }
    const double measured = error(t);
    if (any && measured <= bound.measured) continue;
    bound.measured = measured;
    bound.tensor = t.key.name;
    bound.key = t.key;
    any = true;
  }
  bound.holds = bound.measured <= bound.limit;
  if (any || bound.too_wild > 0) bounds.push_back(std::move(bound));
}

}  // namespace

std::vector<PublishedBound> published_bounds(
    const std::vector<TensorComparison>& tensors, Dtype coarsest,
    const std::function<double(const RecordKey&)>& response_of) {
  std::vector<PublishedBound> bounds;
  if (const auto limit = output_limit(coarsest)) {
    measure(
        tensors, {.what = "layer outputs, max abs", .limit = *limit, .tensor = {}, .key = {}},
        is_layer_output, output_error, [](const TensorComparison&) { return false; }, bounds);
  }
  measure(
      tensors, {.what = "loss, relative", .limit = kLossRelative, .tensor = {}, .key = {}}, is_loss,
      loss_error,
      [&](const TensorComparison& t) {
        return t.insensitive || (response_of && response_of(t.key) > kLossRelative) ||
               has_16_bits(t, coarsest);
      },
      bounds);
  return bounds;
}

}  // namespace isoshard
