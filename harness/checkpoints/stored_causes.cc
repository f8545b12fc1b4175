// SPDX-License-Identifier: Apache-2.0
#include "harness/checkpoints/stored_causes.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <span>

#include "harness/stats/stats.h"

namespace isoshard {
namespace {

/// The most parts that a fused tensor is taken to have: q, k, v and a gate.
constexpr std::int64_t kMaxParts = 4;

bool is_equal(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

bool is_constant(const HostTensor& tensor) {
  const std::size_t element = size_of(tensor.dtype);
  return tensor.bytes.size() <= element ||
         is_equal(tensor.bytes.first(tensor.bytes.size() - element), tensor.bytes.subspan(element));
}

bool is_transposed(const HostTensor& reference, const HostTensor& actual) {
  if (reference.shape.size() != 2 || actual.shape.size() != 2 ||
      reference.shape[0] != actual.shape[1] || reference.shape[1] != actual.shape[0])
    return false;
  const std::size_t element = size_of(reference.dtype);
  const auto rows = static_cast<std::size_t>(reference.shape[0]),
             columns = static_cast<std::size_t>(reference.shape[1]);
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t column = 0; column < columns; ++column) {
      if (std::memcmp(reference.bytes.data() + (row * columns + column) * element,
                      actual.bytes.data() + (column * rows + row) * element, element) != 0)
        return false;
    }
  }
  return true;
}

/// Dim 0 in 2 to kMaxParts equal parts, each of which lies at another place than it should.
Cause order_of_parts(const HostTensor& reference, const HostTensor& actual) {
  if (reference.shape != actual.shape || reference.shape.empty()) return {};
  for (std::int64_t parts = 2; parts <= kMaxParts; ++parts) {
    if (reference.shape[0] % parts != 0) continue;
    const std::size_t bytes = reference.bytes.size() / static_cast<std::size_t>(parts);
    std::vector<std::int64_t> order;
    for (std::int64_t here = 0; here < parts; ++here) {
      for (std::int64_t there = 0; there < parts; ++there) {
        if (std::find(order.begin(), order.end(), there) == order.end() &&
            is_equal(actual.bytes.subspan(static_cast<std::size_t>(here) * bytes, bytes),
                     reference.bytes.subspan(static_cast<std::size_t>(there) * bytes, bytes))) {
          order.push_back(there);
          break;
        }
      }
    }
    if (static_cast<std::int64_t>(order.size()) == parts)
      return make_cause(parts == 2 ? CauseId::kHalvesExchanged : CauseId::kPartsInOtherOrder,
                        {{"parts", parts}, {"order", order}});
  }
  return {};
}

}  // namespace

Cause StoredCauses::other_tensor(const std::string& name, const HostTensor& actual) {
  if (names_by_digest_.empty()) {
    for (const auto& [other, tensor] : reference_) {
      const HostTensor value = tensor.read();
      names_by_digest_.emplace(digest_of(value.bytes.data(), value.bytes.size()), other);
    }
  }
  const auto [begin, end] =
      names_by_digest_.equal_range(digest_of(actual.bytes.data(), actual.bytes.size()));
  for (auto at = begin; at != end; ++at) {
    const StoredTensor& other = reference_.find(at->second)->second;
    if (at->second == name || other.shape != actual.shape || other.dtype != actual.dtype ||
        !is_equal(other.read().bytes, actual.bytes))
      continue;
    const auto theirs = actual_.find(at->second);
    if (theirs != actual_.end() &&
        is_equal(theirs->second.read().bytes, reference_.find(name)->second.read().bytes))
      return make_cause(CauseId::kTensorsExchanged, {{"first", std::min(name, at->second)},
                                                     {"second", std::max(name, at->second)}});
    return make_cause(CauseId::kEqualsOtherTensor, {{"tensor", at->second}});
  }
  return {};
}

Cause StoredCauses::cause_of(const std::string& name) {
  const auto wanted = reference_.find(name), held = actual_.find(name);
  if (wanted == reference_.end() || held == actual_.end() ||
      wanted->second.dtype != held->second.dtype)
    return {};
  const HostTensor reference = wanted->second.read(), actual = held->second.read();
  if (is_constant(actual)) return {};
  if (Cause cause = other_tensor(name, actual); !cause.empty()) return cause;
  if (is_transposed(reference, actual)) return make_cause(CauseId::kTransposed);
  return order_of_parts(reference, actual);
}

}  // namespace isoshard
