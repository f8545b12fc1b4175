// SPDX-License-Identifier: Apache-2.0
// ZeRO and master weights: bit-equal to the emulation of what
// they declare, and each rank steps its own part only.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "suite/reference/reference.h"
#include "suite/testing/emulated_cases.h"

namespace isoshard {
namespace {

Case zero_case(int stage, const Degrees& degrees, Dtype dtype = Dtype::kFloat32) {
  Case item = step_case("autotp", degrees, dtype);
  item.settings.zero_stage = stage;
  item.steps = 2;
  return item;
}

Case mixed(Case item) {
  return with_masters(std::move(item), Dtype::kBFloat16);
}

Case adam(Case item) {
  item.settings.optimizer.kind = OptimizerSettings::Kind::kAdamW;
  item.settings.optimizer.learning_rate = 1e-3;
  item.settings.optimizer.weight_decay = 0.01;
  return item;
}

/// Parameters begin at any multiple of 8 bytes of the flat buffer, and fp64 products on some CPUs
/// have other last bits then.
Case odd_places(const Degrees& degrees) {
  Case item = step_case("autotp", degrees, Dtype::kFloat64, "gpt2");
  item.settings.zero_stage = 1;
  item.steps = 2;
  item.model_name += "_odd";
  item.config.num_heads = item.config.num_kv_heads = 2;
  item.config.head_dim = 9;
  item.config.hidden_size = 18;
  item.config.intermediate_size = 54;
  item.seq_length = 19;
  return item;
}

class EmulatedZero : public testing::TestWithParam<Case> {};

TEST_P(EmulatedZero, EveryRecordOfEveryRankIsBitEqual) {
  const Case& item = GetParam();
  const Trace actual = run_bit_equal_to_its_emulation(item);

  // Elements of optimizer state over all ranks: with stage 0 every dp rank has all, from stage 1 on
  // they share them out.
  std::int64_t own = 0, whole = 0;
  for (const Record& record : actual.ranks.front().records) {
    if (record.key.kind != RecordKind::kGrad || record.key.step != 0 ||
        is_gradient_besides(record.key))
      continue;
    own += numel_of(record.local_shape);
  }
  for (const Record& record : actual.ranks.front().records) {
    if (record.key.kind == RecordKind::kParam && record.key.step == 0 && record.key.call == 0)
      whole += numel_of(record.local_shape);
  }
  if (item.settings.zero_stage == 0) {
    EXPECT_EQ(own, whole);
  } else {
    EXPECT_LE(own, whole / item.degrees.dp + 2 * item.degrees.dp);
    EXPECT_GE(own, whole / item.degrees.dp - 2 * item.degrees.dp);
  }
}

std::vector<Case> zero_cases() {
  std::vector<Case> cases = {
      zero_case(1, {.dp = 3}),
      zero_case(1, {.dp = 3, .tp = 2}),
      mixed(zero_case(1, {.dp = 3, .tp = 2})),
      adam(zero_case(1, {.dp = 3, .tp = 2})),
      adam(mixed(zero_case(1, {.dp = 3, .tp = 2}))),
      mixed(zero_case(0, {.dp = 3, .tp = 2})),
      adam(mixed(zero_case(0, {.dp = 2}))),
      zero_case(1, {.tp = 2}),
      in_order(ReductionOrder::kRing, zero_case(1, {.dp = 3, .tp = 2})),
      with(zero_case(1, {.dp = 3, .tp = 2}, Dtype::kBFloat16),
           [](Case& c) {
             c.micro_batches = 2;
             c.settings.bucket_bytes = 4096;
           }),
      with_heads(zero_case(1, {.dp = 3, .tp = 4}), 8, 2),
      split(with_vocabulary(zero_case(1, {.dp = 3, .tp = 2}), 97), 8),
      zero_case(2, {.dp = 3}),
      zero_case(2, {.dp = 3, .tp = 2}),
      zero_case(2, {.tp = 2}),
      adam(mixed(zero_case(2, {.dp = 3, .tp = 2}))),
      with(in_order(ReductionOrder::kRing, zero_case(2, {.dp = 3, .tp = 2})),
           [](Case& c) { c.settings.bucket_bytes = 4096; }),
      with(in_order(ReductionOrder::kTree, zero_case(2, {.dp = 3})),
           [](Case& c) { c.settings.bucket_bytes = 100; }),
      with(zero_case(2, {.dp = 3, .tp = 2}, Dtype::kBFloat16),
           [](Case& c) {
             c.micro_batches = 3;
             c.settings.bucket_bytes = 2304 * 2;  // exactly q_proj.weight
             c.data.unequal_labels = true;
           }),
      with_heads(zero_case(2, {.dp = 3, .tp = 4}), 8, 2),
      odd_places({.dp = 3, .tp = 2}),
      odd_places({.tp = 2}),
  };
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, EmulatedZero, testing::ValuesIn(zero_cases()), case_name);

}  // namespace
}  // namespace isoshard
