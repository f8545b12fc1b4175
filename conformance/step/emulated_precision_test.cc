// SPDX-License-Identifier: Apache-2.0
// Steps in fp16 and under autocast are, bit by bit, what the subject's arithmetic record says.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "suite/testing/emulated_cases.h"

namespace isoshard {
namespace {

Case under_autocast(Dtype dtype, Case item) {
  item.settings.autocast = dtype;
  return item;
}

// Every architecture under ddp and autotp; biases after the sum of row layers; copied kv heads;
// norms over heads; attention of one kernel.
std::vector<Case> autocast_cases() {
  std::vector<Case> cases;
  for (const Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat16}) {
    const auto add = [&](Case item) { cases.push_back(under_autocast(dtype, std::move(item))); };
    for (const char* type : {"qwen2", "qwen3", "llama", "gpt2", "megatron_gpt"}) {
      add(step_case("ddp", {.dp = 3}, Dtype::kFloat32, type));
      add(step_case("autotp", {.dp = 3, .tp = 2}, Dtype::kFloat32, type));
    }
    add(step_case("autotp", {.dp = 2, .tp = 3}));
    add(four_head_case({.tp = 4}));
    add(with_biases(step_case("autotp", {.dp = 2, .tp = 3}, Dtype::kFloat32, "llama")));
    add(with_heads(with_biases(step_case("autotp", {.dp = 2, .tp = 3}, Dtype::kFloat32, "qwen3")),
                   6, 1));
    add(with(step_case("autotp", {.dp = 2, .tp = 3}),
             [](Case& c) { c.attention = AttentionImpl::kSdpa; }));
    add(with(smoothed(step_case("ddp", {.dp = 2})), [](Case& c) { c.micro_batches = 2; }));
    add(with(smoothed(with_tied_head(
                 split(with_vocabulary(step_case("autotp", {.dp = 2, .tp = 3}), 97), 8))),
             [](Case& c) { c.micro_batches = 2; }));
    add(split(step_case("autotp", {.dp = 3, .tp = 2}, Dtype::kFloat32, "gpt2"), 1));
    add(with(step_case("autotp", {.dp = 2, .tp = 3}), [](Case& c) {
      c.settings.record_partials = true;
      c.model_name += "_partials";
    }));
    add(with(step_case("autotp", {.dp = 2, .tp = 2}), [](Case& c) {
      c.settings.optimizer = OptimizerSettings{};
      c.steps = 2;
    }));
    for (const ReductionOrder order : {ReductionOrder::kRing, ReductionOrder::kTree}) {
      add(in_order(order, split(with_biases(step_case("autotp", {.dp = 2, .tp = 3}, Dtype::kFloat32,
                                                      "llama")),
                                8)));
      add(in_order(order, step_case("ddp", {.dp = 3})));
    }
  }
  return cases;
}

std::vector<Case> fp16_cases() {
  std::vector<Case> cases;
  for (const char* type : {"qwen2", "qwen3", "llama", "gpt2"})
    cases.push_back(step_case("autotp", {.dp = 3, .tp = 2}, Dtype::kFloat16, type));
  cases.push_back(step_case("ddp", {.dp = 3}, Dtype::kFloat16));
  cases.push_back(copied_heads_case({.dp = 2, .tp = 3}, 6, 1, Dtype::kFloat16));
  cases.push_back(with(step_case("autotp", {.dp = 2, .tp = 3}, Dtype::kFloat16),
                       [](Case& c) { c.micro_batches = 2; }));
  for (const ReductionOrder order : {ReductionOrder::kRing, ReductionOrder::kTree}) {
    cases.push_back(in_order(
        order,
        split(with_vocabulary(step_case("autotp", {.dp = 2, .tp = 3}, Dtype::kFloat16), 97), 1)));
  }
  return cases;
}

// A few of each kind; the others are slow tests.
std::vector<Case> core_cases() {
  std::vector<Case> cases;
  for (const Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat16}) {
    const auto add = [&](Case item) { cases.push_back(under_autocast(dtype, std::move(item))); };
    add(step_case("ddp", {.dp = 3}));
    add(step_case("autotp", {.dp = 2, .tp = 3}, Dtype::kFloat32, "qwen3"));
    add(with_biases(step_case("autotp", {.dp = 3, .tp = 2}, Dtype::kFloat32, "llama")));
    add(with(
        smoothed(with_tied_head(split(
            with_vocabulary(step_case("autotp", {.dp = 2, .tp = 3}, Dtype::kFloat32, "gpt2"), 97),
            8))),
        [](Case& c) { c.micro_batches = 2; }));
    add(in_order(ReductionOrder::kRing,
                 with_biases(step_case("autotp", {.dp = 2, .tp = 3}, Dtype::kFloat32, "llama"))));
    add(in_order(ReductionOrder::kTree, four_head_case({.tp = 4})));
  }
  cases.push_back(step_case("autotp", {.dp = 3, .tp = 2}, Dtype::kFloat16));
  cases.push_back(in_order(ReductionOrder::kRing,
                           step_case("autotp", {.dp = 2, .tp = 3}, Dtype::kFloat16, "gpt2")));
  return cases;
}

class EmulatedPrecision : public ::testing::TestWithParam<Case> {};
class EmulatedPrecisionWide : public EmulatedPrecision {};

TEST_P(EmulatedPrecision, IsBitEqualToTheSubject) {
  expect_bit_equal_to_the_subject(GetParam());
}

TEST_P(EmulatedPrecisionWide, IsBitEqualToTheSubject) {
  expect_bit_equal_to_the_subject(GetParam());
}

INSTANTIATE_TEST_SUITE_P(Core, EmulatedPrecision, ::testing::ValuesIn(core_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Autocast, EmulatedPrecisionWide, ::testing::ValuesIn(autocast_cases()),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Fp16, EmulatedPrecisionWide, ::testing::ValuesIn(fp16_cases()), case_name);

}  // namespace
}  // namespace isoshard
