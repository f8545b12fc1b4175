// SPDX-License-Identifier: Apache-2.0
// Sums with their bias, and the bound of their order.
#include "harness/verdict/parts/summed.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <utility>

#include "core/base/error.h"
#include "harness/ids/rule.h"
#include "harness/stats/tolerance.h"
#include "harness/trace/numbers.h"
#include "harness/trace/parts.h"
#include "harness/trace/wanted_record.h"

namespace isoshard::detail {
namespace {

/// A part of one summand: ranks with the same one hold copies.
using SummandPart = std::tuple<std::vector<int>, Shape, Shape, std::int64_t, std::int64_t>;

/// Sums of squares of each summand, whose copies count once.
std::map<std::vector<int>, double> squares_of(const Trace& actual, const std::vector<Held>& held) {
  std::map<std::vector<int>, double> squares;
  std::set<SummandPart> seen;
  for (const Held& h : held) {
    const std::vector<int> summand = summand_of(h.record->layout, actual.mesh, h.rank->rank);
    bool is_new = false;
    for (const PartStats& part : h.record->parts) {
      is_new = seen.insert({summand, part.box.global_offset, part.box.size, part.range.global_begin,
                            part.range.count})
                   .second ||
               is_new;
    }
    if (!is_new) continue;
    for (const double number : numbers_of(h.rank->tensor(*h.record))) {
      if (std::isfinite(number)) squares[summand] += number * number;
    }
  }
  return squares;
}

/// Adds the bias to each row of the sum. Returns the Frobenius norm of what was added.
double add_bias(const Reference& reference, const Record& bias, HostTensor& whole) {
  const std::vector<double> values = numbers_of(reference.tensor(bias.key));
  std::vector<double> numbers = numbers_of(whole);
  if (values.empty() || numbers.size() % values.size() != 0 ||
      whole.shape.back() != static_cast<std::int64_t>(values.size()))
    throw Refused<VacuousError>(said(RuleId::kBiasDoesNotFit, {{"tensor", describe(bias.key)}}));
  double squares = 0;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const double added = values[i % values.size()];
    numbers[i] += added;
    squares += added * added;
  }
  const auto owner =
      std::make_shared<const std::vector<std::byte>>(bytes_of(numbers, Dtype::kFloat64));
  whole = {Dtype::kFloat64, whole.shape, *owner, owner};
  return std::sqrt(squares);
}

}  // namespace

bool has_known_sum(const Reference& reference, const RecordKey& summand) {
  return role_of(summand) == NameRole::kSummand && bias_of(reference, base_of(summand)).is_known;
}

// Sums of n numbers in any order, each rounded once, are off by at most (n - 1) roundoffs of the
// sum of their magnitudes to first order (Higham, Accuracy and Stability of Numerical Algorithms,
// 2nd ed., sec. 4.2); the bias is one more, and is rounded itself where it is finer.
Summed summed(const Reference& reference, const Record& wanted, const Trace& actual,
              const std::vector<Held>& held) {
  Summed result{actual.assemble(wanted.key, wanted.grad_scale)};
  // A bias is added to the output alone, not to its gradient.
  if (role_of(wanted.key) != NameRole::kSummand || wanted.key.kind != RecordKind::kActivation ||
      reference.find(wanted.key) != nullptr)
    return result;
  const BiasOfModule bias = bias_of(reference, base_of(wanted.key));
  if (!bias.is_known)
    throw Refused<VacuousError>(said(RuleId::kBiasMissing, {{"tensor", describe(wanted.key)}}));
  const double unit = unit_roundoff(held.front().record->dtype);
  double magnitude = 0;
  const std::map<std::vector<int>, double> squares = squares_of(actual, held);
  for (const auto& [summand, square] : squares) magnitude += std::sqrt(square);
  auto roundings = static_cast<double>(squares.size());
  if (bias.bias != nullptr) {
    magnitude += add_bias(reference, *bias.bias, result.whole);
    roundings += 2;
  }
  const double subnormal = least_positive(held.front().record->dtype) *
                           std::sqrt(static_cast<double>(result.whole.numel()));
  result.order_error = roundings * (unit * magnitude + subnormal);
  return result;
}

}  // namespace isoshard::detail
