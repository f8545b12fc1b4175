// SPDX-License-Identifier: Apache-2.0
/// The C interface: checks what it is given, and calls what the judge calls.
#include "harness/stats/isoshard_stats.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#include "core/base/sha256.h"
#include "harness/stats/stats.h"

namespace {

using isoshard::Dtype;
using isoshard::Stats;

static_assert(static_cast<int>(Dtype::kFloat64) == ISOSHARD_FLOAT64 &&
              static_cast<int>(Dtype::kFloat32) == ISOSHARD_FLOAT32 &&
              static_cast<int>(Dtype::kBFloat16) == ISOSHARD_BFLOAT16 &&
              static_cast<int>(Dtype::kFloat16) == ISOSHARD_FLOAT16 &&
              static_cast<int>(Dtype::kInt64) == ISOSHARD_INT64 &&
              static_cast<int>(Dtype::kInt32) == ISOSHARD_INT32 &&
              static_cast<int>(Dtype::kInt16) == ISOSHARD_INT16 &&
              static_cast<int>(Dtype::kInt8) == ISOSHARD_INT8 &&
              static_cast<int>(Dtype::kUint8) == ISOSHARD_UINT8 &&
              static_cast<int>(Dtype::kBool) == ISOSHARD_BOOL);

bool is_dtype(int dtype) noexcept {
  return dtype >= ISOSHARD_FLOAT64 && dtype <= ISOSHARD_BOOL;
}

Stats from_c(const isoshard_stats& c) noexcept {
  Stats s;
  s.numel = c.numel;
  s.unequal_bits = c.unequal_bits;
  s.unequal_values = c.unequal_values;
  s.nan_reference = c.nan_reference;
  s.nan_actual = c.nan_actual;
  s.inf_reference = c.inf_reference;
  s.inf_actual = c.inf_actual;
  s.nonfinite_mismatch = c.nonfinite_mismatch;
  s.max_abs = c.max_abs;
  s.max_ulp = c.max_ulp;
  s.sum_sq_reference = c.sum_sq_reference;
  s.sum_sq_actual = c.sum_sq_actual;
  s.sum_sq_diff = c.sum_sq_diff;
  s.dot = c.dot;
  s.sum_abs_diff = c.sum_abs_diff;
  s.max_abs_reference = c.max_abs_reference;
  s.first_unequal = c.first_unequal;
  s.worst = c.worst;
  return s;
}

isoshard_stats to_c(const Stats& s) noexcept {
  return {s.numel,         s.unequal_bits,  s.unequal_values,   s.nan_reference,
          s.nan_actual,    s.inf_reference, s.inf_actual,       s.nonfinite_mismatch,
          s.max_abs,       s.max_ulp,       s.sum_sq_reference, s.sum_sq_actual,
          s.sum_sq_diff,   s.dot,           s.sum_abs_diff,     s.max_abs_reference,
          s.first_unequal, s.worst};
}

/// Whether so many elements fit into a buffer, and their indices into an int64.
bool are_counts(std::int64_t count, std::int64_t index, int dtype) noexcept {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  const auto size = static_cast<std::int64_t>(isoshard::size_of(static_cast<Dtype>(dtype)));
  return count >= 0 && index >= 0 && count <= kMost / size && index <= kMost - count;
}

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

}  // namespace

int isoshard_stats_abi(void) {
  return ISOSHARD_STATS_ABI;
}

const char* isoshard_stats_status_text(int status) {
  switch (status) {
    case ISOSHARD_STATS_OK:
      return "no error";
    case ISOSHARD_STATS_NULL:
      return "a pointer must not be null";
    case ISOSHARD_STATS_DTYPE:
      return "a dtype must be one of isoshard_dtype";
    case ISOSHARD_STATS_COUNT:
      return "counts and indices must be 0 or more and fit into 63 bits";
    case ISOSHARD_STATS_SCALE:
      return "grad_scale must be finite and not 0";
    case ISOSHARD_STATS_INTERNAL:
      return "memory or the hash library failed";
    default:
      return "unknown status";
  }
}

size_t isoshard_stats_size_of(int dtype) {
  return is_dtype(dtype) ? isoshard::size_of(static_cast<Dtype>(dtype)) : 0;
}

int isoshard_stats_init(isoshard_stats* stats) {
  if (stats == nullptr) return ISOSHARD_STATS_NULL;
  *stats = to_c(Stats());
  return ISOSHARD_STATS_OK;
}

int isoshard_stats_accumulate(isoshard_stats* stats, const void* reference, int reference_dtype,
                              const void* actual, int actual_dtype, int64_t count, int64_t index,
                              double grad_scale, const uint8_t* selected) {
  if (stats == nullptr) return ISOSHARD_STATS_NULL;
  if (!is_dtype(reference_dtype) || !is_dtype(actual_dtype)) return ISOSHARD_STATS_DTYPE;
  if (!are_counts(count, index, reference_dtype) || !are_counts(count, index, actual_dtype))
    return ISOSHARD_STATS_COUNT;
  if (!std::isfinite(grad_scale) || grad_scale == 0) return ISOSHARD_STATS_SCALE;
  if (count == 0) return ISOSHARD_STATS_OK;
  if (reference == nullptr || actual == nullptr) return ISOSHARD_STATS_NULL;
  try {
    Stats sum = from_c(*stats);
    isoshard::accumulate(sum, static_cast<const std::byte*>(reference),
                         static_cast<Dtype>(reference_dtype), static_cast<const std::byte*>(actual),
                         static_cast<Dtype>(actual_dtype), count, index, grad_scale, selected);
    *stats = to_c(sum);
    return ISOSHARD_STATS_OK;
  } catch (...) {
    return ISOSHARD_STATS_INTERNAL;
  }
}

int isoshard_stats_merge(isoshard_stats* stats, const isoshard_stats* more) {
  if (stats == nullptr || more == nullptr) return ISOSHARD_STATS_NULL;
  Stats sum = from_c(*stats);
  isoshard::merge(sum, from_c(*more));
  *stats = to_c(sum);
  return ISOSHARD_STATS_OK;
}

double isoshard_stats_relative_error(const isoshard_stats* stats) {
  return stats == nullptr ? kNan : from_c(*stats).relative_error();
}

double isoshard_stats_scale(const isoshard_stats* stats) {
  return stats == nullptr ? kNan : from_c(*stats).scale();
}

double isoshard_stats_cosine(const isoshard_stats* stats) {
  return stats == nullptr ? kNan : from_c(*stats).cosine();
}

int isoshard_stats_xxh3(const void* data, size_t bytes, uint64_t seed, uint64_t* digest) {
  if (digest == nullptr || (data == nullptr && bytes != 0)) return ISOSHARD_STATS_NULL;
  *digest = isoshard::digest_of(static_cast<const std::byte*>(data), bytes, seed);
  return ISOSHARD_STATS_OK;
}

int isoshard_stats_sha256(const void* data, size_t bytes, char digest[65]) {
  if (digest == nullptr || (data == nullptr && bytes != 0)) return ISOSHARD_STATS_NULL;
  try {
    const std::string hex =
        isoshard::sha256_hex(std::span(static_cast<const std::byte*>(data), bytes));
    if (hex.size() != 64) return ISOSHARD_STATS_INTERNAL;
    std::memcpy(digest, hex.c_str(), hex.size() + 1);
    return ISOSHARD_STATS_OK;
  } catch (...) {
    return ISOSHARD_STATS_INTERNAL;
  }
}
