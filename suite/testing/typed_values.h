// SPDX-License-Identifier: Apache-2.0
/// Small integers in any dtype, so that one test covers all dtypes with exact expectations.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/float_bits.h"
#include "core/comm/communicator.h"

namespace isoshard {

inline constexpr Dtype kAllDtypes[] = {
    Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16, Dtype::kInt64,
    Dtype::kInt32,   Dtype::kInt16,   Dtype::kInt8,     Dtype::kUint8,   Dtype::kBool};

/// A buffer of one dtype whose elements are set and read as integers that every dtype holds exactly
/// (0..125; bool 0, 1).
class TypedValues {
 public:
  TypedValues(Dtype dtype, std::int64_t count)
      : dtype_(dtype), count_(count), bytes_(static_cast<std::size_t>(count) * size_of(dtype)) {}

  template <class Value>
  TypedValues(Dtype dtype, std::int64_t count, const Value& value) : TypedValues(dtype, count) {
    for (std::int64_t i = 0; i < count; ++i) set(i, value(i));
  }

  /// Element i is period[(first + i) % period.size()].
  static TypedValues repeating(Dtype dtype, std::int64_t count, std::span<const int> period,
                               std::int64_t first = 0) {
    TypedValues values(dtype, count);
    const auto length = static_cast<std::int64_t>(period.size());
    for (std::int64_t i = 0; i < std::min(count, length); ++i)
      values.set(i, period[static_cast<std::size_t>((first + i) % length)]);
    // in whole periods, each time as many as there are
    const std::size_t size = values.bytes_.size();
    for (std::size_t done = period.size() * size_of(dtype); done < size; done *= 2) {
      std::memcpy(values.bytes_.data() + done, values.bytes_.data(), std::min(done, size - done));
    }
    return values;
  }

  [[nodiscard]] Buffer buffer() { return {bytes_.data(), count_, dtype_}; }

  void set(std::int64_t i, int value) {
    switch (dtype_) {
      case Dtype::kFloat64:
        return store(i, static_cast<double>(value));
      case Dtype::kFloat32:
        return store(i, static_cast<float>(value));
      case Dtype::kBFloat16:
        return store(i, float_to_bf16(static_cast<float>(value)));
      case Dtype::kFloat16:
        return store(i, float_to_fp16(static_cast<float>(value)));
      case Dtype::kInt64:
        return store(i, static_cast<std::int64_t>(value));
      case Dtype::kInt32:
        return store(i, static_cast<std::int32_t>(value));
      case Dtype::kInt16:
        return store(i, static_cast<std::int16_t>(value));
      default:
        return store(i, static_cast<std::uint8_t>(value));
    }
  }

  [[nodiscard]] double get(std::int64_t i) const {
    switch (dtype_) {
      case Dtype::kFloat64:
        return load<double>(i);
      case Dtype::kFloat32:
        return load<float>(i);
      case Dtype::kBFloat16:
        return bf16_to_float(load<std::uint16_t>(i));
      case Dtype::kFloat16:
        return fp16_to_float(load<std::uint16_t>(i));
      case Dtype::kInt64:
        return static_cast<double>(load<std::int64_t>(i));
      case Dtype::kInt32:
        return load<std::int32_t>(i);
      case Dtype::kInt16:
        return load<std::int16_t>(i);
      default:
        return load<std::uint8_t>(i);
    }
  }

  /// The first element whose bits are not those of `other`, which has the same dtype and count, or
  /// -1.
  [[nodiscard]] std::int64_t first_other_than(const TypedValues& other) const {
    if (std::memcmp(bytes_.data(), other.bytes_.data(), bytes_.size()) == 0) return -1;
    const auto differs = std::ranges::mismatch(bytes_, other.bytes_).in1;
    return (differs - bytes_.begin()) / static_cast<std::int64_t>(size_of(dtype_));
  }

  /// The first element that is not value(i), or -1.
  template <class Value>
  [[nodiscard]] std::int64_t first_other_than(const Value& value) const {
    switch (dtype_) {  // outside the loop: it runs over many millions of elements
      case Dtype::kFloat64:
        return first_other<double>(value);
      case Dtype::kFloat32:
        return first_other<float>(value);
      case Dtype::kInt64:
        return first_other<std::int64_t>(value);
      case Dtype::kInt32:
        return first_other<std::int32_t>(value);
      case Dtype::kInt16:
        return first_other<std::int16_t>(value);
      case Dtype::kInt8:
      case Dtype::kUint8:
      case Dtype::kBool:
        return first_other<std::uint8_t>(value);
      default:
        break;
    }
    for (std::int64_t i = 0; i < count_; ++i) {
      if (get(i) != value(i)) return i;
    }
    return -1;
  }

 private:
  template <class T>
  void store(std::int64_t i, T value) {
    std::memcpy(bytes_.data() + static_cast<std::size_t>(i) * sizeof(T), &value, sizeof(T));
  }
  template <class T>
  [[nodiscard]] T load(std::int64_t i) const {
    T value;
    std::memcpy(&value, bytes_.data() + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
    return value;
  }

  template <class T, class Value>
  [[nodiscard]] std::int64_t first_other(const Value& value) const {
    for (std::int64_t i = 0; i < count_; ++i) {
      if (load<T>(i) != static_cast<T>(value(i))) return i;
    }
    return -1;
  }

  Dtype dtype_;
  std::int64_t count_;
  std::vector<std::byte> bytes_;
};

}  // namespace isoshard
