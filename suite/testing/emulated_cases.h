// SPDX-License-Identifier: Apache-2.0
/// Cases and judging options that the suites of emulated references share.
#pragma once
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "harness/trace/collective_calls.h"
#include "harness/trace/stage.h"
#include "suite/emulation/emulated_reference.h"
#include "suite/record/make_subject.h"
#include "suite/testing/step_cases.h"

namespace isoshard {

/// The tiny model with 4 heads, which tp 4 divides.
inline Case four_head_case(const Degrees& degrees, Dtype dtype = Dtype::kFloat32) {
  Case item = step_case("autotp", degrees, dtype);
  item.model_name = "tiny4h";
  item.config.num_heads = item.config.num_kv_heads = 4;
  item.config.head_dim = item.config.hidden_size / 4;
  return item;
}

inline Case with(Case item, const std::function<void(Case&)>& change) {
  change(item);
  return item;
}

inline Case in_order(ReductionOrder order, Case item) {
  item.reduction_order = order;
  return item;
}

/// Embedding, head and loss split along the vocabulary, padded to a multiple of `multiple` x tp.
inline Case split(Case item, std::int64_t multiple) {
  item.settings.make_vocab_size_divisible_by = multiple;
  return item;
}

inline Case with_vocabulary(Case item, std::int64_t size) {
  item.config.vocab_size = size;
  item.model_name += "_v" + std::to_string(size);
  return item;
}

inline Case smoothed(Case item) {
  item.settings.label_smoothing = 0.1;
  item.data.unequal_labels = true;
  return item;
}

/// Where two runs of one mesh first differ in a bit, rank by rank and record by record, in words;
/// empty if nowhere. Nothing is put together first: copies, summands of partial sums and signed
/// zeros count.
inline std::string first_difference(const Trace& emulated, const Trace& actual) {
  if (emulated.ranks.size() != actual.ranks.size()) {
    return std::to_string(emulated.ranks.size()) + " and " + std::to_string(actual.ranks.size()) +
           " ranks";
  }
  // what a run says of itself alone no emulation has
  const auto shared = [](const RankTrace& rank) {
    std::vector<Record> records;
    std::ranges::copy_if(rank.records, std::back_inserter(records), [](const Record& record) {
      const bool is_second_pass = record.key.kind == RecordKind::kActivation &&
                                  role_of(record.key) == NameRole::kRecomputed;
      return !is_second_pass && role_of(record.key) != NameRole::kReadAgain &&
             role_of(record.key) != NameRole::kCollectives;
    });
    return records;
  };
  for (std::size_t r = 0; r < actual.ranks.size(); ++r) {
    const std::vector<Record> ours = shared(emulated.ranks[r]), theirs = shared(actual.ranks[r]);
    const std::string on_rank = " on rank " + std::to_string(r);
    for (std::size_t i = 0; i < std::max(ours.size(), theirs.size()); ++i) {
      if (i >= ours.size() || i >= theirs.size())
        return describe((i < ours.size() ? ours : theirs)[i].key) + " is in one run only" + on_rank;
      if (ours[i].key != theirs[i].key)
        return describe(ours[i].key) + " stands where " + describe(theirs[i].key) + " stands" +
               on_rank;
      const std::vector<PartStats>&a = ours[i].parts, &b = theirs[i].parts;
      bool equal = ours[i].dtype == theirs[i].dtype &&
                   ours[i].layout.global_shape == theirs[i].layout.global_shape &&
                   ours[i].grad_scale == theirs[i].grad_scale && a.size() == b.size();
      for (std::size_t k = 0; equal && k < a.size(); ++k)
        equal = a[k].box == b[k].box && a[k].range == b[k].range && a[k].digest == b[k].digest;
      if (!equal) return describe(ours[i].key) + " differs" + on_rank;
    }
  }
  return "";
}

/// How many records of each kind all ranks have; none may have been judged in parts only.
inline std::map<RecordKind, int> count_kinds(const Trace& trace) {
  std::map<RecordKind, int> counts;
  for (const RankTrace& rank : trace.ranks) {
    for (const Record& record : rank.records) {
      EXPECT_EQ(record.unmasked, -1) << describe(record.key);
      ++counts[record.key.kind];
    }
  }
  return counts;
}

struct EmulatedAndActual {
  Trace emulated;
  Reference reference;  ///< of what was emulated
  Trace actual;
};

/// Emulates the case by its declared arithmetic and runs it: the judge, who allows nothing, must
/// find nothing.
inline EmulatedAndActual run_beside_its_emulation(const Case& item) {
  EmulatedAndActual both;
  both.emulated = emulate(item, numerics_of(item));
  both.reference = reference_of_emulated(both.emulated);

  both.actual = run_case(item, both.reference);

  EXPECT_EQ(static_cast<int>(both.actual.ranks.size()), item.world_size());
  EXPECT_THAT(both.actual, conforms_to(both.reference, exact_policy_of(item)));
  return both;
}

/// The same, and every record of every rank has the same bits. The run.
inline Trace run_bit_equal_to_its_emulation(const Case& item) {
  EmulatedAndActual both = run_beside_its_emulation(item);
  EXPECT_EQ(first_difference(both.emulated, both.actual), "");
  return std::move(both.actual);
}

/// The same, and it recorded as much as a step of a transformer gives.
inline void expect_bit_equal_to_the_subject(const Case& item) {
  const Trace actual = run_bit_equal_to_its_emulation(item);
  std::map<RecordKind, int> counts = count_kinds(actual);
  int clipped = 0, between = 0, read = 0, collectives = 0, counters = 0;
  for (const RankTrace& rank : actual.ranks) {
    for (const Record& record : rank.records) {
      clipped += role_of(record.key) == NameRole::kClipped ? 1 : 0;
      between += role_of(record.key) == NameRole::kMicroBatch ? 1 : 0;
      read += role_of(record.key) == NameRole::kReadAgain ? 1 : 0;
      collectives += role_of(record.key) == NameRole::kCollectives ? 1 : 0;
      counters += stage_of(record.key) == Stage::kProgress &&
                          role_of(record.key) != NameRole::kCollectives &&
                          record.key.kind == RecordKind::kScalar
                      ? 1
                      : 0;
    }
  }
  counts[RecordKind::kGrad] -= clipped + between;
  counts[RecordKind::kParam] -= read;
  counts[RecordKind::kScalar] -= collectives + counters;
  if (item.settings.max_grad_norm > 0) {
    EXPECT_EQ(clipped, counts[RecordKind::kGrad]);
  }
  // some parameters have no layout then
  EXPECT_EQ(between > 0, item.micro_batches > 1);
  EXPECT_LE(between, counts[RecordKind::kGrad] * (item.micro_batches - 1));
  EXPECT_EQ(read, counts[RecordKind::kGrad] - counts[RecordKind::kGrad] / item.steps);
  EXPECT_EQ(collectives > 0, item.world_size() > 1);
  const int per_rank = item.world_size() * item.steps;
  EXPECT_GE(counts[RecordKind::kActivation], 25 * per_rank);
  EXPECT_GE(counts[RecordKind::kActivationGrad], 25 * per_rank);
  EXPECT_GE(counts[RecordKind::kGrad], 20 * per_rank);
  EXPECT_EQ(counts[RecordKind::kOptimizer] % counts[RecordKind::kGrad], 0);
  EXPECT_EQ(counts[RecordKind::kParam],
            counts[RecordKind::kGrad] + counts[RecordKind::kGrad] / item.steps);
  EXPECT_EQ(counts[RecordKind::kScalar], (item.settings.loss_scale.is_on() ? 7 : 5) * per_rank);
}

/// The same case on four and more heads of 8, with fewer kv heads than tp ranks where `kv_heads` <
/// tp.
inline Case copied_heads_case(const Degrees& degrees, std::int64_t heads, std::int64_t kv_heads,
                              Dtype dtype = Dtype::kFloat32) {
  return with_heads(step_case("autotp", degrees, dtype), heads, kv_heads);
}

}  // namespace isoshard
