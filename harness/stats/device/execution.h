// SPDX-License-Identifier: Apache-2.0
/// A warp whose lanes are threads of a GPU, and one whose lanes are emulated on a CPU: kernel
/// bodies are written once against both.
///
/// A body is a function over a Warp. It says what every lane does (each) and asks for numbers of
/// all lanes together (largest, least, sum, total), so a body has no other place where lanes meet,
/// and its branches are the same on all lanes. What is a lane's own lies in the Lane that each
/// function is given.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>

#include "core/base/host_device.h"

#if defined(__CUDA_ARCH__)
#define ISOSHARD_UNROLL _Pragma("unroll 8")
#else
#define ISOSHARD_UNROLL
#endif
#if defined(__CUDACC__)
/// Of templates over a Warp: one kind of warp is of the CPU, the other of a GPU.
#define ISOSHARD_WARP_BODY _Pragma("nv_exec_check_disable")
#else
#define ISOSHARD_WARP_BODY
#endif

namespace isoshard::device {

inline constexpr int kLanes = 32;

/// The lanes of a warp one after the other, for tests of the bodies.
template <class Lane>
class EmulatedWarp {
 public:
  template <class F>
  void each(F&& f) {
    for (int lane = 0; lane < kLanes; ++lane) f(lane, lanes_[lane]);
  }
  /// Of what `f` says of each lane.
  template <class F>
  std::int32_t largest(F&& f) {
    std::int32_t result = f(0, lanes_[0]);
    for (int lane = 1; lane < kLanes; ++lane) {
      const std::int32_t value = f(lane, lanes_[lane]);
      result = value > result ? value : result;
    }
    return result;
  }
  template <class F>
  std::int64_t least(F&& f) {
    std::int64_t result = f(0, lanes_[0]);
    for (int lane = 1; lane < kLanes; ++lane) {
      const std::int64_t value = f(lane, lanes_[lane]);
      result = value < result ? value : result;
    }
    return result;
  }
  template <class F>
  std::int64_t sum(F&& f) {
    std::int64_t result = 0;
    for (int lane = 0; lane < kLanes; ++lane) result += f(lane, lanes_[lane]);
    return result;
  }
  template <class F>
  double largest_number(F&& f) {
    double result = f(0, lanes_[0]);
    for (int lane = 1; lane < kLanes; ++lane) {
      const double value = f(lane, lanes_[lane]);
      result = value > result ? value : result;
    }
    return result;
  }
  /// Lane l with lane l + 16, then with l + 8, and so on, as on the CPU (stats_floats.cc).
  template <class F>
  double total(F&& f) {
    double values[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) values[lane] = f(lane, lanes_[lane]);
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) values[lane] += values[lane + half];
    }
    return values[0];
  }

 private:
  Lane lanes_[kLanes];
};

#if defined(__CUDACC__)
/// The warp that a thread of a GPU belongs to. All of its lanes must be in every call.
template <class Lane>
class DeviceWarp {
 public:
  template <class F>
  __device__ void each(F&& f) {
    f(lane(), own_);
  }
  template <class F>
  __device__ std::int32_t largest(F&& f) {
    return __reduce_max_sync(kAll, static_cast<int>(f(lane(), own_)));
  }
  template <class F>
  __device__ std::int64_t least(F&& f) {
    long long value = f(lane(), own_);
    for (int half = kLanes / 2; half > 0; half /= 2) {
      const long long other = __shfl_xor_sync(kAll, value, half);
      value = other < value ? other : value;
    }
    return value;
  }
  template <class F>
  __device__ std::int64_t sum(F&& f) {
    long long value = f(lane(), own_);
    for (int half = kLanes / 2; half > 0; half /= 2) value += __shfl_xor_sync(kAll, value, half);
    return value;
  }
  template <class F>
  __device__ double largest_number(F&& f) {
    double value = f(lane(), own_);
    for (int half = kLanes / 2; half > 0; half /= 2) {
      const double other = __shfl_xor_sync(kAll, value, half);
      value = other > value ? other : value;
    }
    return value;
  }
  /// x + y is y + x, so lanes l and l + half hold the same sum after each step, and lane 0's order
  /// is the emulated one's.
  template <class F>
  __device__ double total(F&& f) {
    double value = f(lane(), own_);
    for (int half = kLanes / 2; half > 0; half /= 2) value += __shfl_xor_sync(kAll, value, half);
    return value;
  }

 private:
  static constexpr unsigned kAll = 0xffffffffU;
  __device__ static int lane() { return static_cast<int>(threadIdx.x % kLanes); }
  Lane own_;
};
#endif

/// sum + x * y, where x * y is exact: fused or not, the bits are the same.
ISOSHARD_HOST_DEVICE inline double add_exact_product(double sum, double x, double y) {
#if defined(__CUDA_ARCH__)
  return __fma_rn(x, y, sum);
#else
  return sum + x * y;
#endif
}
ISOSHARD_HOST_DEVICE inline float add_exact_product(float sum, float x, float y) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(x, y, sum);
#else
  return sum + x * y;
#endif
}

/// A number of 2, 4 or 8 bytes from anywhere: GPUs read such a number from its own alignment only.
template <class T>
ISOSHARD_HOST_DEVICE inline T load(const std::byte* from) {
#if defined(__CUDA_ARCH__)
  if (reinterpret_cast<std::uintptr_t>(from) % sizeof(T) == 0)
    return *reinterpret_cast<const T*>(from);
#endif
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <class To, class From>
ISOSHARD_HOST_DEVICE inline To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

}  // namespace isoshard::device
