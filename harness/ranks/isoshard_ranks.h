/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Comparing with a reference bundle while a rank runs, for programs in any language:
 * libisoshard_ranks.so, in plain C. The reference's files are mapped, and not copied.
 *
 * Texts        JSON in UTF-8, as docs/reference/bundle.md has it. Results stay valid until the next
 * call on the same object. Buffers      Contiguous elements in the machine's byte order, which are
 * only read. They need no alignment. Errors       Functions that can fail return null, and say why
 * in isoshard_ranks_message. None prints, throws, or ends the process; but a reference that is
 * shortened while it is mapped ends it. Ranks        One object for each rank. An object is used by
 * one thread at a time.
 *
 *     isoshard_ranks* ranks = isoshard_ranks_open(
 *         "{\"reference\": \"runs/reference\", \"rank\": 0, \"run\": \"5f3a\","
 *         " \"mesh\": [{\"axis\": \"tp\", \"degree\": 2}], \"purpose\": \"judged\"}");
 *     if (ranks == NULL) puts(isoshard_ranks_message(NULL));
 *     const char* result = isoshard_ranks_compare(ranks, record, data, bytes);
 */
#ifndef HARNESS_RANKS_ISOSHARD_RANKS_H_
#define HARNESS_RANKS_ISOSHARD_RANKS_H_

#include <stddef.h>

#define ISOSHARD_RANKS_ABI 1
#define ISOSHARD_RANKS_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef struct isoshard_ranks isoshard_ranks;

/* ISOSHARD_RANKS_ABI of the library that is loaded. */
ISOSHARD_RANKS_API int isoshard_ranks_abi(void);

/*
 * Opens a reference of one process. `purpose` is "judged", or "response" for a run whose weights
 * were moved. Null if the reference is not there, or is no bundle, or has several ranks.
 */
ISOSHARD_RANKS_API isoshard_ranks* isoshard_ranks_open(const char* options);
ISOSHARD_RANKS_API void isoshard_ranks_close(isoshard_ranks* ranks);

/* The field "compared_with" of the run's manifest.json. */
ISOSHARD_RANKS_API const char* isoshard_ranks_compared_with(isoshard_ranks* ranks);

/*
 * Compares one local tensor. `record` is its record with "step", "dtype", "local_shape" and a
 * layout that is not to be inferred. Calls of a tensor are compared in ascending order.
 *
 *     {"keep": false, "compared": [{"numel": 64, ...}], "unmasked": 60}
 *
 * `unmasked` is there where a mask leaves elements out.
 * `keep` says that the tensor itself is needed: it differs by more than the reference's responses
 * allow, or is of a kind whose values the judge must see. Null if the record is malformed.
 */
ISOSHARD_RANKS_API const char* isoshard_ranks_compare(isoshard_ranks* ranks, const char* record,
                                                      const void* data, size_t bytes);

/*
 * The sum of squared differences of a local tensor from the reference's, as %a writes it, without
 * remembering it: to find out where a tensor lies. Null if the record is malformed, or the
 * reference has no such tensor.
 */
ISOSHARD_RANKS_API const char* isoshard_ranks_error(isoshard_ranks* ranks, const char* record,
                                                    const void* data, size_t bytes);

/* The samples of the tensor that was compared last; `bytes` gets their size. */
ISOSHARD_RANKS_API const void* isoshard_ranks_samples(isoshard_ranks* ranks, size_t* bytes);

/* Why the last call on this object failed; of null, why the last open on this thread did. */
ISOSHARD_RANKS_API const char* isoshard_ranks_message(const isoshard_ranks* ranks);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* HARNESS_RANKS_ISOSHARD_RANKS_H_ */
