/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The statistics of a verdict for programs in any language: libisoshard_stats.so, in plain C.
 *
 * Buffers      Contiguous elements in the machine's byte order. They need no alignment and are only
 *              read. A null pointer is allowed where a buffer has no bytes.
 * Errors       Each function that can fail returns an isoshard_stats_status and then has changed
 *              nothing. No function prints, throws, or ends the process.
 * Ranks        Functions keep no state. Threads may call them at once on different results.
 * Determinism  A result depends on the values alone, never on alignment, on the CPU or on the
 *              rounding mode that is set.
 * Versions     A library of another ISOSHARD_STATS_ABI has another soname. Within one, structures
 *              and numbers stay as they are, and functions are only added.
 *
 *     isoshard_stats stats;
 *     isoshard_stats_init(&stats);
 *     int status = isoshard_stats_accumulate(&stats, reference, ISOSHARD_FLOAT32, actual,
 *                                            ISOSHARD_BFLOAT16, count, 0, 1.0, NULL);
 *     if (status != ISOSHARD_STATS_OK) puts(isoshard_stats_status_text(status));
 *     printf("%g\n", isoshard_stats_relative_error(&stats));
 */
#ifndef HARNESS_STATS_ISOSHARD_STATS_H_
#define HARNESS_STATS_ISOSHARD_STATS_H_

#include <stddef.h>
#include <stdint.h>

#define ISOSHARD_STATS_ABI 1
#define ISOSHARD_STATS_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef enum isoshard_dtype {
  ISOSHARD_FLOAT64 = 0,
  ISOSHARD_FLOAT32 = 1,
  ISOSHARD_BFLOAT16 = 2,
  ISOSHARD_FLOAT16 = 3,
  ISOSHARD_INT64 = 4,
  ISOSHARD_INT32 = 5,
  ISOSHARD_INT16 = 6,
  ISOSHARD_INT8 = 7,
  ISOSHARD_UINT8 = 8,
  ISOSHARD_BOOL = 9 /* one byte, 0 or 1 */
} isoshard_dtype;

typedef enum isoshard_stats_status {
  ISOSHARD_STATS_OK = 0,
  ISOSHARD_STATS_NULL = 1,    /* a pointer that must not be null is */
  ISOSHARD_STATS_DTYPE = 2,   /* a dtype is none of isoshard_dtype */
  ISOSHARD_STATS_COUNT = 3,   /* a count or index is negative, or too large for its buffer */
  ISOSHARD_STATS_SCALE = 4,   /* grad_scale is 0 or not finite */
  ISOSHARD_STATS_INTERNAL = 5 /* memory or the hash library failed */
} isoshard_stats_status;

/* How two tensors differ. Sums are over elements that are finite on both sides, in fp64. */
typedef struct isoshard_stats {
  int64_t numel;
  int64_t unequal_bits;   /* elements whose bits differ */
  int64_t unequal_values; /* elements whose values differ: -0 equals 0, a NaN equals a NaN */
  int64_t nan_reference;
  int64_t nan_actual;
  int64_t inf_reference;
  int64_t inf_actual;
  int64_t nonfinite_mismatch; /* not finite on one side only, or not the same infinity */
  double max_abs;             /* largest |actual - reference| */
  double max_ulp;             /* the same in steps of the coarser dtype */
  double sum_sq_reference;
  double sum_sq_actual;
  double sum_sq_diff;
  double dot;
  double sum_abs_diff;
  double max_abs_reference;
  int64_t first_unequal; /* index of the first element whose value differs; -1: none */
  int64_t worst;         /* index of max_abs; -1: no finite difference */
} isoshard_stats;

/* ISOSHARD_STATS_ABI of the library that is loaded. */
ISOSHARD_STATS_API int isoshard_stats_abi(void);

/* A sentence without an end; "unknown status" for other numbers. Never null. */
ISOSHARD_STATS_API const char* isoshard_stats_status_text(int status);

/* Bytes of one element; 0 for an unknown dtype. */
ISOSHARD_STATS_API size_t isoshard_stats_size_of(int dtype);

/* The statistics of no element, which accumulate and merge add to. */
ISOSHARD_STATS_API int isoshard_stats_init(isoshard_stats* stats);

/*
 * Adds `count` elements, of which the first has the index `index` in its tensor. `actual` is
 * divided by grad_scale, in fp64, before it is compared; 1 leaves it alone. `selected` is null, or
 * holds `count` bytes: elements whose byte is 0 are left out of everything.
 */
ISOSHARD_STATS_API int isoshard_stats_accumulate(isoshard_stats* stats, const void* reference,
                                                 int reference_dtype, const void* actual,
                                                 int actual_dtype, int64_t count, int64_t index,
                                                 double grad_scale, const uint8_t* selected);

/* Adds `more`, which is of other elements of the same tensor. */
ISOSHARD_STATS_API int isoshard_stats_merge(isoshard_stats* stats, const isoshard_stats* more);

/* sqrt(sum_sq_diff / sum_sq_reference); 0 if both are 0, infinity if only the reference is 0. */
ISOSHARD_STATS_API double isoshard_stats_relative_error(const isoshard_stats* stats);
/* dot / sum_sq_reference, the factor that fits best; 1 if the reference is 0. */
ISOSHARD_STATS_API double isoshard_stats_scale(const isoshard_stats* stats);
/* Of the angle between the two tensors. */
ISOSHARD_STATS_API double isoshard_stats_cosine(const isoshard_stats* stats);
/* All three are NaN where `stats` is null. */

/* XXH3, 64 bits. A digest as the next one's seed chains buffers; the first one's is 0. */
ISOSHARD_STATS_API int isoshard_stats_xxh3(const void* data, size_t bytes, uint64_t seed,
                                           uint64_t* digest);
/* SHA-256 as 64 lower-case hexadecimal digits and a 0. */
ISOSHARD_STATS_API int isoshard_stats_sha256(const void* data, size_t bytes, char digest[65]);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* HARNESS_STATS_ISOSHARD_STATS_H_ */
