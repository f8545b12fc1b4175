/* SPDX-License-Identifier: Apache-2.0 */
/* The C interface from C: the header compiles as C, numbers are right, and errors change nothing.
 */
#include "harness/stats/isoshard_stats.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static int failures = 0;

#define EXPECT(condition)                                                      \
  do {                                                                         \
    if (!(condition)) {                                                        \
      fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
      ++failures;                                                              \
    }                                                                          \
  } while (0)

static void accumulate_finds_what_differs(void) {
  const float reference[4] = {1, 2, 3, 4};
  const float actual[4] = {1, 2, 3, 6};
  isoshard_stats stats;
  EXPECT(isoshard_stats_init(&stats) == ISOSHARD_STATS_OK);
  EXPECT(stats.first_unequal == -1 && stats.worst == -1);
  EXPECT(isoshard_stats_accumulate(&stats, reference, ISOSHARD_FLOAT32, actual, ISOSHARD_FLOAT32, 4,
                                   10, 1.0, NULL) == ISOSHARD_STATS_OK);
  EXPECT(stats.numel == 4 && stats.unequal_values == 1 && stats.unequal_bits == 1);
  EXPECT(stats.first_unequal == 13 && stats.worst == 13);
  EXPECT(stats.max_abs == 2 && stats.sum_sq_diff == 4 && stats.sum_sq_reference == 30);
  EXPECT(isoshard_stats_relative_error(&stats) == sqrt(4.0 / 30.0));
  EXPECT(isoshard_stats_scale(&stats) == 38.0 / 30.0);
}

static void merge_adds_runs(void) {
  const double reference[2] = {1, 2}, actual[2] = {1, 3};
  const uint8_t second_only[2] = {0, 1};
  isoshard_stats first, second;
  isoshard_stats_init(&first);
  isoshard_stats_init(&second);
  isoshard_stats_accumulate(&first, reference, ISOSHARD_FLOAT64, actual, ISOSHARD_FLOAT64, 1, 0,
                            1.0, NULL);
  isoshard_stats_accumulate(&second, reference, ISOSHARD_FLOAT64, actual, ISOSHARD_FLOAT64, 2, 0,
                            1.0, second_only);
  EXPECT(second.numel == 1 && second.unequal_values == 1);
  EXPECT(isoshard_stats_merge(&first, &second) == ISOSHARD_STATS_OK);
  EXPECT(first.numel == 2 && first.first_unequal == 1 && first.sum_sq_diff == 1);
}

static void errors_are_told_and_change_nothing(void) {
  const float values[2] = {1, 2};
  isoshard_stats stats, before;
  isoshard_stats_init(&stats);
  before = stats;
  EXPECT(isoshard_stats_init(NULL) == ISOSHARD_STATS_NULL);
  EXPECT(isoshard_stats_accumulate(&stats, NULL, ISOSHARD_FLOAT32, values, ISOSHARD_FLOAT32, 2, 0,
                                   1.0, NULL) == ISOSHARD_STATS_NULL);
  EXPECT(isoshard_stats_accumulate(&stats, values, 10, values, ISOSHARD_FLOAT32, 2, 0, 1.0, NULL) ==
         ISOSHARD_STATS_DTYPE);
  EXPECT(isoshard_stats_accumulate(&stats, values, ISOSHARD_FLOAT32, values, -1, 2, 0, 1.0, NULL) ==
         ISOSHARD_STATS_DTYPE);
  EXPECT(isoshard_stats_accumulate(&stats, values, ISOSHARD_FLOAT32, values, ISOSHARD_FLOAT32, -1,
                                   0, 1.0, NULL) == ISOSHARD_STATS_COUNT);
  EXPECT(isoshard_stats_accumulate(&stats, values, ISOSHARD_FLOAT32, values, ISOSHARD_FLOAT32,
                                   INT64_MAX, 0, 1.0, NULL) == ISOSHARD_STATS_COUNT);
  EXPECT(isoshard_stats_accumulate(&stats, values, ISOSHARD_FLOAT32, values, ISOSHARD_FLOAT32, 2, 0,
                                   0.0, NULL) == ISOSHARD_STATS_SCALE);
  EXPECT(isoshard_stats_merge(&stats, NULL) == ISOSHARD_STATS_NULL);
  EXPECT(memcmp(&stats, &before, sizeof stats) == 0);
  EXPECT(isoshard_stats_accumulate(&stats, NULL, ISOSHARD_FLOAT32, NULL, ISOSHARD_FLOAT32, 0, 0,
                                   1.0, NULL) == ISOSHARD_STATS_OK);
  EXPECT(isnan(isoshard_stats_relative_error(NULL)));
  EXPECT(strcmp(isoshard_stats_status_text(99), "unknown status") == 0);
  EXPECT(isoshard_stats_size_of(ISOSHARD_BFLOAT16) == 2 && isoshard_stats_size_of(10) == 0);
}

static void digests_are_the_published_ones(void) {
  uint64_t digest = 0;
  char hex[65];
  EXPECT(isoshard_stats_xxh3("", 0, 0, &digest) == ISOSHARD_STATS_OK);
  EXPECT(digest == UINT64_C(0x2d06800538d394c2));
  EXPECT(isoshard_stats_sha256("abc", 3, hex) == ISOSHARD_STATS_OK);
  EXPECT(strcmp(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad") == 0);
  EXPECT(isoshard_stats_sha256(NULL, 3, hex) == ISOSHARD_STATS_NULL);
  EXPECT(isoshard_stats_xxh3(NULL, 0, 0, NULL) == ISOSHARD_STATS_NULL);
}

int main(void) {
  EXPECT(isoshard_stats_abi() == ISOSHARD_STATS_ABI);
  accumulate_finds_what_differs();
  merge_adds_runs();
  errors_are_told_and_change_nothing();
  digests_are_the_published_ones();
  return failures == 0 ? 0 : 1;
}
