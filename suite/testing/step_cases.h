// SPDX-License-Identifier: Apache-2.0
/// What the suites about whole training steps share: cases of the tiny model, and looks into a
/// trace.
#pragma once
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include "fixtures/cases/presets.h"
#include "harness/testing/matchers.h"
#include "suite/record/run_case.h"
#include "suite/reference/reference.h"

namespace isoshard {

/// True if every record of the only rank has the bits of the reference.
inline ::testing::AssertionResult is_bit_equal(const Reference& reference, const Trace& trace) {
  std::int64_t compared = 0;
  for (const Record& record : trace.ranks.at(0).records) {
    // a reference has no such records
    if (is_own_repetition(record.key) || role_of(record.key) == NameRole::kClipped) continue;
    if (reference.find(record.key) == nullptr)
      return ::testing::AssertionFailure() << "not in the reference: " << describe(record.key);
    for (const PartStats& part : record.parts) {
      if (part.stats.unequal_bits != 0 || part.stats.numel == 0) {
        return ::testing::AssertionFailure()
               << part.stats.unequal_bits << " of " << part.stats.numel
               << " differ: " << describe(record.key);
      }
    }
    ++compared;
  }
  if (compared < 100) return ::testing::AssertionFailure() << "only " << compared << " records";
  return ::testing::AssertionSuccess();
}

/// The record of one rank, which must exist.
inline const Record& record_of(const Trace& trace, int rank, const RecordKey& key) {
  const Record* record = trace.ranks.at(static_cast<std::size_t>(rank)).find(key);
  if (record == nullptr) throw std::runtime_error("no record of " + describe(key));
  return *record;
}

/// A case of the tiny model of an architecture; fp32, one step.
inline Case step_case(std::string subject, const Degrees& degrees, Dtype dtype = Dtype::kFloat32,
                      std::string_view model_type = "qwen2") {
  Case item = tiny_fault_case(model_type);
  item.subject = std::move(subject);
  item.degrees = degrees;
  item.dtype = dtype;
  return item;
}

/// The same in a dtype of 16 bits, with fp32 masters.
inline Case with_masters(Case item, Dtype dtype) {
  item.dtype = dtype;
  item.settings.master_dtype = Dtype::kFloat32;
  return item;
}

/// The same with a stage of ZeRO.
inline Case with_zero(int stage, Case item) {
  item.settings.zero_stage = stage;
  return item;
}

/// The same with one weight for embedding and head.
inline Case with_tied_head(Case item) {
  item.config.tie_word_embeddings = true;
  item.model_name += "_tied";
  return item;
}

/// The same with a bias on every linear layer (llama, qwen3: the attention's only).
inline Case with_biases(Case item) {
  item.config.qkv_bias = item.config.attention_out_bias = true;
  item.config.mlp_bias = item.config.model_type == "llama";
  item.model_name += "_biases";
  return item;
}

/// The same with other numbers of heads, of 8 features each.
inline Case with_heads(Case item, std::int64_t heads, std::int64_t kv_heads) {
  item.config.num_heads = heads;
  item.config.num_kv_heads = kv_heads;
  item.config.head_dim = 8;
  item.model_name += "_h" + std::to_string(heads) + "kv" + std::to_string(kv_heads);
  return item;
}

/// Every tensor of the case's run is within the bounds of the single process, on every rank.
inline void expect_matches_single_process(const Case& item) {
  const Reference& reference = reference_of(item);

  const Trace actual = run_case(item, reference);

  ASSERT_EQ(static_cast<int>(actual.ranks.size()), item.world_size());
  EXPECT_THAT(actual, conforms_to(reference, policy_of(item)));
}

/// Parametrized tests are named by their case.
inline std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  return info.param.slug();
}

}  // namespace isoshard
