// SPDX-License-Identifier: Apache-2.0
/// The comparing loops, written once over an Isa's vectors and compiled once per instruction set.
///
/// Isa is a type of an unnamed namespace: what is instantiated for it stays in its file, so that
/// code for one instruction set never stands in for another's. For the same reason nothing of the
/// standard library is called here but memcpy.
///
/// Lanes. A step is 128 bytes of each tensor: 32 fp32, or 32 words of two bf16. Element (or word) w
/// of a step belongs to lane w, however many registers the lanes take. Squares of fp32 are summed
/// in fp64: they are exact there. Differences, and everything of bf16, are summed in fp32 over the
/// steps of one block (at most 32, 64 elements of a lane), then added to the fp64 lanes. Squares of
/// bf16 are exact in fp32; where a product is not exact it is rounded before it is added. So a
/// fused multiply-add is used for exact products only, where it changes nothing.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "harness/stats/stats_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/// The vector types of an Isa (GCC takes no attribute that depends on a template's argument).
#define ISOSHARD_STATS_VECTORS(bytes)                                 \
  typedef std::int32_t Ints __attribute__((vector_size(bytes)));      \
  typedef std::int16_t Shorts __attribute__((vector_size(bytes)));    \
  typedef float Floats __attribute__((vector_size(bytes)));           \
  typedef float HalfFloats __attribute__((vector_size((bytes) / 2))); \
  typedef double Doubles __attribute__((vector_size(bytes)))

namespace isoshard {

template <class Isa>
struct StatsLoops {
  using Ints = typename Isa::Ints;
  using Shorts = typename Isa::Shorts;
  using Floats = typename Isa::Floats;
  using HalfFloats = typename Isa::HalfFloats;
  using Doubles = typename Isa::Doubles;
  static constexpr int kBytes = sizeof(Ints);
  static constexpr int kWords = kBytes / 4;                ///< fp32 of a register
  static constexpr int kRegisters = kStatsLanes / kWords;  ///< of a step

  template <class V>
  [[gnu::always_inline]] static V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof(V));
    return v;
  }
  template <class V>
  [[gnu::always_inline]] static void store(void* to, V v) {
    std::memcpy(to, &v, sizeof(V));
  }
  template <class V>
  [[gnu::always_inline]] static V larger(V a, V b) {
    return a > b ? a : b;
  }

  /// sum + x * y, where x * y is exact.
  template <class V>
  [[gnu::always_inline]] static V add_exact_product(V sum, V x, V y) {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64 && sizeof(sum[0]) == 8)
      return (V)_mm512_fmadd_pd((__m512d)x, (__m512d)y, (__m512d)sum);
    if constexpr (sizeof(V) == 64 && sizeof(sum[0]) == 4)
      return (V)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
#endif
#if defined(__FMA__)
    if constexpr (sizeof(V) == 32 && sizeof(sum[0]) == 8)
      return (V)_mm256_fmadd_pd((__m256d)x, (__m256d)y, (__m256d)sum);
    if constexpr (sizeof(V) == 32 && sizeof(sum[0]) == 4)
      return (V)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
#endif
    return sum + x * y;
  }
  template <class V>
  [[gnu::always_inline]] static V add_exact_square(V sum, V x) {
    return add_exact_product(sum, x, x);
  }

  [[gnu::always_inline]] static Doubles widen(HalfFloats x) {
#if defined(__AVX512F__)
    // GCC would make two halves
    if constexpr (sizeof(Doubles) == 64) return (Doubles)_mm512_maskz_cvtps_pd(0xff, (__m256)x);
#endif
    return __builtin_convertvector(x, Doubles);
  }

  [[gnu::always_inline]] static HalfFloats low_half(Floats x) {
    if constexpr (kWords == 16) return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7);
    if constexpr (kWords == 8) return __builtin_shufflevector(x, x, 0, 1, 2, 3);
    if constexpr (kWords == 4) return __builtin_shufflevector(x, x, 0, 1);
  }
  [[gnu::always_inline]] static HalfFloats high_half(Floats x) {
    if constexpr (kWords == 16) return __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    if constexpr (kWords == 8) return __builtin_shufflevector(x, x, 4, 5, 6, 7);
    if constexpr (kWords == 4) return __builtin_shufflevector(x, x, 2, 3);
  }

  /// Adds the fp32 lanes of one register to their fp64 lanes.
  [[gnu::always_inline]] static void add_to_lanes(double* lanes, Floats values) {
    double* const high = lanes + kWords / 2;
    store(lanes, load<Doubles>(lanes) + widen(low_half(values)));
    store(high, load<Doubles>(high) + widen(high_half(values)));
  }

  template <class Element, class V>
  struct Stored {
    Element elements[sizeof(V) / sizeof(Element)];
    [[gnu::always_inline]] explicit Stored(V v) { std::memcpy(elements, &v, sizeof(v)); }
  };
  template <class Element, class V>
  [[gnu::always_inline]] static std::int32_t largest_of(V v) {
    const Stored<Element, V> stored(v);
    std::int32_t result = stored.elements[0];
    for (const Element element : stored.elements) result = element > result ? element : result;
    return result;
  }
  template <class Element, class V>
  [[gnu::always_inline]] static std::int64_t total_of(V v) {
    const Stored<Element, V> stored(v);
    std::int64_t result = 0;
    for (const Element element : stored.elements) result += element;
    return result;
  }
  /// Adds 1 where the mask is set (all ones).
  template <class V>
  [[gnu::always_inline]] static void count(V& counts, V mask) {
    if constexpr (kBytes == 64) {
      counts = mask ? counts + 1 : counts;  // one masked addition
    } else {
      counts -= mask;
    }
  }
  [[gnu::always_inline]] static bool is_zero(Ints v) {
    const Stored<std::int32_t, Ints> stored(v);
    std::int32_t bits = 0;
    for (const std::int32_t element : stored.elements) bits |= element;
    return bits == 0;
  }

  /// A run that no cache holds is fetched ahead of the loads; past its end that does nothing.
  [[gnu::always_inline]] static void fetch_ahead(const std::byte* reference,
                                                 const std::byte* actual, std::int64_t offset) {
    constexpr std::int64_t kAhead = 1024;
    if (offset % 64 != 0) return;
    __builtin_prefetch(reference + offset + kAhead);
    __builtin_prefetch(actual + offset + kAhead);
  }

  /// The first pass over fp32, of all registers of a step.
  struct First32 {
    Ints differ{};
    Ints maximum{};
    Doubles squares[2 * kRegisters];

    [[gnu::always_inline]] explicit First32(const StatsLanes& sums) {
      for (int k = 0; k < 2 * kRegisters; ++k) squares[k] = load<Doubles>(sums + k * (kWords / 2));
    }
    [[gnu::always_inline]] void add(int k, Ints r, Ints a) {
      differ |= r ^ a;
      maximum = larger(maximum, r & 0x7fffffff);
      squares[2 * k] = add_exact_square(squares[2 * k], widen(low_half((Floats)r)));
      squares[2 * k + 1] = add_exact_square(squares[2 * k + 1], widen(high_half((Floats)r)));
    }
    [[gnu::always_inline]] BlockOfReference end(StatsLanes& sums) const {
      for (int k = 0; k < 2 * kRegisters; ++k) store(sums + k * (kWords / 2), squares[k]);
      return {is_zero(differ), largest_of<std::int32_t>(maximum)};
    }
  };

  /// The first pass over bf16.
  struct First16 {
    Ints differ{};
    Shorts maximum{};
    Floats even[kRegisters];
    Floats odd[kRegisters];

    [[gnu::always_inline]] explicit First16(const StatsLanes&) {
      for (int k = 0; k < kRegisters; ++k) even[k] = odd[k] = Floats{};
    }
    [[gnu::always_inline]] void add(int k, Ints r, Ints a) {
      differ |= r ^ a;
      maximum = larger(maximum, (Shorts)(r & 0x7fff7fff));
      even[k] = add_exact_square(even[k], (Floats)(r << 16));
      odd[k] = add_exact_square(odd[k], (Floats)(r & static_cast<std::int32_t>(0xffff0000)));
    }
    [[gnu::always_inline]] BlockOfReference end(StatsLanes& sums) const {
      for (int k = 0; k < kRegisters; ++k) add_to_lanes(sums + k * kWords, even[k] + odd[k]);
      return {is_zero(differ), largest_of<std::int16_t>(maximum) << 16};
    }
  };

  template <class Pass, bool kFromMemory>
  static BlockOfReference first(const std::byte* reference, const std::byte* actual,
                                std::int64_t steps, StatsLanes& sums) {
    Pass pass(sums);
    for (std::int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 16
      for (int k = 0; k < kRegisters; ++k) {
        const std::int64_t offset = step * kStatsStepBytes + k * kBytes;
        if constexpr (kFromMemory) fetch_ahead(reference, actual, offset);
        pass.add(k, load<Ints>(reference + offset), load<Ints>(actual + offset));
      }
    }
    return pass.end(sums);
  }

  /// Sums of one register's lanes over the steps of a block.
  struct Sums {
    Floats squares{}, products{}, magnitudes{}, differences{};

    [[gnu::always_inline]] void add_to(DifferenceSums& sums, int lane) const {
      add_to_lanes(sums.sq_diff + lane, squares);
      add_to_lanes(sums.reference_diff + lane, products);
      add_to_lanes(sums.abs_diff + lane, magnitudes);
      add_to_lanes(sums.diff + lane, differences);
    }
  };

  /// Maxima, which know no order. Keys are at least those of equal elements of the largest
  /// exponent.
  struct Extremes {
    Ints maximum{};
    Ints key = Ints{} - 0x7f800000;
  };

  [[gnu::always_inline]] static void add_difference(Sums& sums, Extremes& extremes, Floats r,
                                                    Floats a) {
    const Floats d = a - r;
    const Ints magnitude = (Ints)d & 0x7fffffff;
    sums.magnitudes += (Floats)magnitude;
    sums.differences += d;
    sums.squares += d * d;
    sums.products += r * d;
    extremes.maximum = larger(extremes.maximum, magnitude);
    const Ints least_exponent = Ints{} + 0x00800000;
    extremes.key = larger(extremes.key, magnitude - larger((Ints)r & 0x7f800000, least_exponent));
  }

  /// The second pass over fp32: what all registers share, and the sums of each.
  struct Second32 {
    using SumsOfRegister = Sums;
    Extremes extremes;
    Ints unequal_bits{};
    Ints unequal_values{};

    [[gnu::always_inline]] void add(Sums& sums, Ints r, Ints a) {
      count(unequal_bits, r != a);
      count(unequal_values, (r != a) & (((r | a) & 0x7fffffff) != 0));
      add_difference(sums, extremes, (Floats)r, (Floats)a);
    }
    [[gnu::always_inline]] BlockOfDifferences end() const {
      return {largest_of<std::int32_t>(extremes.maximum), largest_of<std::int32_t>(extremes.key),
              total_of<std::int32_t>(unequal_bits), total_of<std::int32_t>(unequal_values)};
    }
  };

  /// The second pass over bf16.
  struct Second16 {
    struct SumsOfRegister {
      Sums even, odd;
      [[gnu::always_inline]] void add_to(DifferenceSums& sums, int lane) const {
        const Sums both{even.squares + odd.squares, even.products + odd.products,
                        even.magnitudes + odd.magnitudes, even.differences + odd.differences};
        both.add_to(sums, lane);
      }
    };
    Extremes extremes;
    Shorts unequal_bits{};  // at most 512 each
    Shorts unequal_values{};

    [[gnu::always_inline]] void add(SumsOfRegister& sums, Ints r, Ints a) {
      constexpr auto kHigh = static_cast<std::int32_t>(0xffff0000);
      count(unequal_bits, (Shorts)r != (Shorts)a);
      count(unequal_values, ((Shorts)r != (Shorts)a) & ((Shorts)((r | a) & 0x7fff7fff) != 0));
      add_difference(sums.even, extremes, (Floats)(r << 16), (Floats)(a << 16));
      add_difference(sums.odd, extremes, (Floats)(r & kHigh), (Floats)(a & kHigh));
    }
    [[gnu::always_inline]] BlockOfDifferences end() const {
      return {largest_of<std::int32_t>(extremes.maximum), largest_of<std::int32_t>(extremes.key),
              total_of<std::int16_t>(unequal_bits), total_of<std::int16_t>(unequal_values)};
    }
  };

  /// One register after the other: the block is in the cache, and the sums of one stay in
  /// registers.
  template <class Pass>
  static BlockOfDifferences second(const std::byte* reference, const std::byte* actual,
                                   std::int64_t steps, DifferenceSums& sums) {
    Pass pass;
    for (int k = 0; k < kRegisters; ++k) {
      typename Pass::SumsOfRegister of;
      for (std::int64_t step = 0; step < steps; ++step) {
        const std::int64_t offset = step * kStatsStepBytes + k * kBytes;
        pass.add(of, load<Ints>(reference + offset), load<Ints>(actual + offset));
      }
      of.add_to(sums, k * kWords);
    }
    return pass.end();
  }

  /// Both passes in one, the same sums in the same order: for blocks that are expected to differ,
  /// so that arithmetic and memory work at the same time.
  template <class FirstPass, class SecondPass>
  static BlockOfDifferences both(const std::byte* reference, const std::byte* actual,
                                 std::int64_t steps, StatsLanes& squares, DifferenceSums& sums,
                                 BlockOfReference& block) {
    FirstPass first_pass(squares);
    SecondPass second_pass;
    typename SecondPass::SumsOfRegister of[kRegisters];
    for (std::int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 16
      for (int k = 0; k < kRegisters; ++k) {
        const std::int64_t offset = step * kStatsStepBytes + k * kBytes;
        fetch_ahead(reference, actual, offset);
        const Ints r = load<Ints>(reference + offset);
        const Ints a = load<Ints>(actual + offset);
        first_pass.add(k, r, a);
        second_pass.add(of[k], r, a);
      }
    }
    block = first_pass.end(squares);
    for (int k = 0; k < kRegisters; ++k) of[k].add_to(sums, k * kWords);
    return second_pass.end();
  }

  static void third_fp32(const std::byte* reference, const std::byte* actual, std::int64_t steps,
                         ApartSums& sums) {
    for (int k = 0; k < kRegisters; ++k) {
      for (int half = 0; half < 2; ++half) {
        const std::int64_t lane = k * kWords + half * (kWords / 2);
        Doubles sq_reference = load<Doubles>(sums.sq_reference + lane);
        Doubles sq_actual = load<Doubles>(sums.sq_actual + lane);
        Doubles dot = load<Doubles>(sums.dot + lane);
        for (std::int64_t step = 0; step < steps; ++step) {
          const Doubles r = widen(load<HalfFloats>(reference + step * kStatsStepBytes + lane * 4));
          const Doubles a = widen(load<HalfFloats>(actual + step * kStatsStepBytes + lane * 4));
          sq_reference = add_exact_product(sq_reference, r, r);
          sq_actual = add_exact_product(sq_actual, a, a);
          dot = add_exact_product(dot, r, a);
        }
        store(sums.sq_reference + lane, sq_reference);
        store(sums.sq_actual + lane, sq_actual);
        store(sums.dot + lane, dot);
      }
    }
  }

  /// Squares of the reference, squares of actual and products, of one register's lanes.
  struct Products {
    Floats rr{}, aa{}, ra{};
    [[gnu::always_inline]] void add(Floats r, Floats a) {
      rr = add_exact_product(rr, r, r);
      aa = add_exact_product(aa, a, a);
      ra = add_exact_product(ra, r, a);
    }
  };

  static void third_bf16(const std::byte* reference, const std::byte* actual, std::int64_t steps,
                         ApartSums& sums) {
    constexpr auto kHigh = static_cast<std::int32_t>(0xffff0000);
    for (int k = 0; k < kRegisters; ++k) {
      Products even;
      Products odd;
      for (std::int64_t step = 0; step < steps; ++step) {
        const Ints r = load<Ints>(reference + step * kStatsStepBytes + k * kBytes);
        const Ints a = load<Ints>(actual + step * kStatsStepBytes + k * kBytes);
        even.add((Floats)(r << 16), (Floats)(a << 16));
        odd.add((Floats)(r & kHigh), (Floats)(a & kHigh));
      }
      add_to_lanes(sums.sq_reference + k * kWords, even.rr + odd.rr);
      add_to_lanes(sums.sq_actual + k * kWords, even.aa + odd.aa);
      add_to_lanes(sums.dot + k * kWords, even.ra + odd.ra);
    }
  }

  static void widen_fp32(const std::byte* from, std::int64_t count, double* to) {
    for (std::int64_t i = 0; i < count; ++i) {
      float value;
      std::memcpy(&value, from + i * 4, 4);
      to[i] = static_cast<double>(value);
    }
  }

  static void widen_bf16(const std::byte* from, std::int64_t count, double* to) {
    for (std::int64_t i = 0; i < count; ++i) {
      std::uint16_t bits;
      std::memcpy(&bits, from + i * 2, 2);
      const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
      float value;
      std::memcpy(&value, &wide, 4);
      to[i] = static_cast<double>(value);
    }
  }

  static void divide(double* values, std::int64_t count, double divisor) {
    for (std::int64_t i = 0; i < count; ++i) values[i] /= divisor;
  }

  static bool all_finite(const double* values, std::int64_t count) {
    std::uint64_t bad = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      std::uint64_t bits;
      std::memcpy(&bits, values + i, 8);
      bad |= (bits & 0x7fffffffffffffffULL) >= 0x7ff0000000000000ULL ? 1U : 0U;
    }
    return bad == 0;
  }

  static void add_wide(WideSums& sums, const double* reference, const double* actual,
                       std::int64_t count, std::int64_t min_bits, double ulp_factor) {
    WideSums s = sums;
    for (std::int64_t i = 0; i < count; i += kWideLanes) {
      for (int l = 0; l < kWideLanes; ++l) {
        const double r = reference[i + l];
        const double a = actual[i + l];
        const double d = a - r;
        const double abs_d = __builtin_fabs(d);
        const double abs_r = __builtin_fabs(r);
        s.sq_reference[l] += r * r;
        s.sq_actual[l] += a * a;
        s.sq_diff[l] += d * d;
        s.dot[l] += r * a;
        s.abs_diff[l] += abs_d;
        s.diff[l] += d;
        s.max_abs[l] = abs_d > s.max_abs[l] ? abs_d : s.max_abs[l];
        s.max_reference[l] = abs_r > s.max_reference[l] ? abs_r : s.max_reference[l];
        std::int64_t r_bits;
        std::int64_t a_bits;
        std::memcpy(&r_bits, &r, 8);
        std::memcpy(&a_bits, &a, 8);
        s.unequal_bits[l] += r_bits != a_bits ? 1 : 0;
        s.unequal_values[l] += r != a ? 1 : 0;
        // 2^-e of the reference: the exponent field mirrored at the bias. Both factors are
        // representable.
        std::int64_t exponent = r_bits & 0x7ff0000000000000LL;
        exponent = exponent > min_bits ? exponent : min_bits;
        const std::int64_t mirrored = 0x7fe0000000000000LL - exponent;
        double inverse;
        std::memcpy(&inverse, &mirrored, 8);
        const double ulps = abs_d * inverse * ulp_factor;
        s.max_ulp[l] = ulps > s.max_ulp[l] ? ulps : s.max_ulp[l];
      }
    }
    sums = s;
  }

  static constexpr StatsKernels kKernels{Isa::kName,
                                         {first<First32, false>, first<First32, true>,
                                          second<Second32>, both<First32, Second32>, third_fp32},
                                         {first<First16, false>, first<First16, true>,
                                          second<Second16>, both<First16, Second16>, third_bf16},
                                         widen_fp32,
                                         widen_bf16,
                                         divide,
                                         all_finite,
                                         add_wide};
};

}  // namespace isoshard
