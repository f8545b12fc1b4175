// SPDX-License-Identifier: Apache-2.0 Training steps are, bit by bit, what a subject's arithmetic
// record says - with no tolerance anywhere.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "suite/testing/emulated_cases.h"

namespace isoshard {
namespace {

std::vector<Case> step_cases() {
  std::vector<Case> cases;
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16}) {
    for (const int dp : {1, 2, 3}) cases.push_back(step_case("ddp", {.dp = dp}, dtype));
    for (const Degrees& degrees : {Degrees{.tp = 2},
                                   {.tp = 3},
                                   {.dp = 2},
                                   {.dp = 2, .tp = 2},
                                   {.dp = 3, .tp = 2},
                                   {.dp = 2, .tp = 3}})
      cases.push_back(step_case("autotp", degrees, dtype));
    for (const Degrees& degrees : {Degrees{.tp = 4}, {.dp = 3, .tp = 4}})
      cases.push_back(four_head_case(degrees, dtype));
  }
  return cases;
}

// Kv heads that several tp ranks hold: all of them one head; two ranks each; also where dp and tp
// differ.
std::vector<Case> copied_cases() {
  std::vector<Case> cases;
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16}) {
    cases.push_back(copied_heads_case({.tp = 3}, 6, 1, dtype));
    cases.push_back(copied_heads_case({.dp = 3, .tp = 2}, 6, 1, dtype));
    cases.push_back(copied_heads_case({.dp = 2, .tp = 4}, 8, 2, dtype));
  }
  cases.push_back(
      with(copied_heads_case({.dp = 3, .tp = 2}, 6, 1), [](Case& c) { c.micro_batches = 2; }));
  return cases;
}

// What else may change the arithmetic, each on a mesh whose degrees differ.
std::vector<Case> setting_cases() {
  std::vector<Case> cases;
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
    const Case base = step_case("autotp", {.dp = 2, .tp = 3}, dtype);
    cases.push_back(with(base, [](Case& c) { c.attention = AttentionImpl::kSdpa; }));
    cases.push_back(with(base, [](Case& c) { c.data.unequal_labels = true; }));
    cases.push_back(with(base, [](Case& c) { c.settings.loss_mean = LossMean::kLocal; }));
    cases.push_back(with(base, [](Case& c) { c.settings.max_grad_norm = 0; }));
    cases.push_back(with(base, [](Case& c) { c.micro_batches = 3; }));
    cases.push_back(with(base, [](Case& c) { c.settings.label_smoothing = 0.1; }));
    cases.push_back(with(base, [](Case& c) {
      c.batch_size = 1;
      c.seq_length = 13;
    }));
    cases.push_back(with(base, [](Case& c) {
      c.settings.optimizer = OptimizerSettings{};
      c.settings.optimizer.weight_decay = 0.1;
      c.steps = 3;
    }));
    cases.push_back(with(base, [](Case& c) {
      c.settings.bucket_bytes = 4096;
      c.model_name += "_small_buckets";
    }));
    cases.push_back(with(base, [](Case& c) {
      c.model_name = "tiny_tied_gqa";
      c.config.tie_word_embeddings = true;
      c.config.num_kv_heads = 3;
    }));
  }
  return cases;
}

// Every architecture: norms over heads (qwen3), fused weights and biases after the sum (gpt2,
// llama), summands recorded.
std::vector<Case> architecture_cases() {
  std::vector<Case> cases;
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
    for (const char* type : {"qwen3", "llama", "gpt2"}) {
      cases.push_back(step_case("ddp", {.dp = 3}, dtype, type));
      cases.push_back(step_case("autotp", {.dp = 3, .tp = 2}, dtype, type));
      cases.push_back(step_case("autotp", {.dp = 2, .tp = 3}, dtype, type));
    }
    cases.push_back(with_biases(step_case("autotp", {.dp = 3, .tp = 2}, dtype, "llama")));
    cases.push_back(
        with_heads(with_biases(step_case("autotp", {.dp = 2, .tp = 3}, dtype, "qwen3")), 6, 1));
    cases.push_back(with(step_case("autotp", {.dp = 2, .tp = 3}, dtype), [](Case& c) {
      c.settings.record_partials = true;
      c.model_name += "_partials";
    }));
  }
  return cases;
}

class EmulatedStep : public ::testing::TestWithParam<Case> {};

TEST_P(EmulatedStep, IsBitEqualToTheSubject) {
  expect_bit_equal_to_the_subject(GetParam());
}

std::vector<Case> ordered_cases() {
  std::vector<Case> cases;
  for (const ReductionOrder order : {ReductionOrder::kRing, ReductionOrder::kTree}) {
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
      cases.push_back(in_order(order, step_case("ddp", {.dp = 3}, dtype)));
      cases.push_back(in_order(order, step_case("autotp", {.dp = 3, .tp = 2}, dtype)));
      cases.push_back(in_order(order, step_case("autotp", {.dp = 2, .tp = 3}, dtype)));
      cases.push_back(in_order(order, four_head_case({.dp = 3, .tp = 4}, dtype)));
      cases.push_back(in_order(order, copied_heads_case({.dp = 2, .tp = 3}, 6, 1, dtype)));
      // Where a gradient lies in its bucket decides how a ring adds it.
      cases.push_back(in_order(order, with(step_case("ddp", {.dp = 3}, dtype), [](Case& c) {
                                 c.settings.bucket_bytes = 4096;
                                 c.model_name += "_small_buckets";
                               })));
    }
  }
  return cases;
}

class EmulatedOrders : public ::testing::TestWithParam<Case> {};

// In fp32 a tree of up to three ranks adds as rank order does, (0 + 1) + 2; a ring rotates, and 16
// bits round at every addition.
bool differs_from_rank_order(const Case& item) {
  const int largest = std::max(item.degrees.dp, item.degrees.tp);
  return item.reduction_order == ReductionOrder::kRing || item.dtype == Dtype::kBFloat16 ||
         largest > 3;
}

TEST_P(EmulatedOrders, AreBitEqualToTheSubjectAndDifferFromOrdered) {
  const Case& item = GetParam();
  const Case in_rank_order = in_order(ReductionOrder::kOrdered, item);
  const Trace emulated = emulate(item, arithmetic_of(item));
  const Reference reference = reference_of_emulated(emulated);

  const Trace actual = run_case(item, reference);
  const Trace ordered = emulate(in_rank_order, arithmetic_of(in_rank_order));

  EXPECT_THAT(actual, conforms_to(reference, exact_options(item)));
  EXPECT_EQ(first_difference(emulated, actual), "");
  EXPECT_EQ(first_difference(ordered, actual).empty(), !differs_from_rank_order(item))
      << first_difference(ordered, actual);
}

// Where nothing rounds, the emulated run is the plain one as well.
class EmulatedLattice : public ::testing::TestWithParam<Case> {};

TEST_P(EmulatedLattice, IsBitEqualToTheSubjectAndConformsToThePlainReference) {
  const Case& item = GetParam();
  const Reference& plain = reference_of(item);
  const Trace emulated = emulate(item, arithmetic_of(item), {&plain});
  const Reference reference = reference_of_emulated(emulated);

  const Trace actual = run_case(item, reference);

  EXPECT_THAT(emulated, conforms_to(plain, judge_options(item)));
  EXPECT_THAT(actual, conforms_to(reference, exact_options(item)));
  EXPECT_EQ(first_difference(emulated, actual), "");
}

std::vector<Case> lattice_cases() {
  const auto on = [](const char* subject, const Degrees& degrees, Dtype dtype, int row_nonzeros) {
    return with(lattice_case(row_nonzeros), [&](Case& c) {
      c.subject = subject;
      c.degrees = degrees;
      c.dtype = dtype;
    });
  };
  return {on("ddp", {.dp = 3}, Dtype::kBFloat16, 1),
          on("autotp", {.dp = 3, .tp = 2}, Dtype::kBFloat16, 1),
          in_order(ReductionOrder::kRing, on("autotp", {.dp = 2, .tp = 3}, Dtype::kFloat32, 2)),
          split(on("autotp", {.dp = 2, .tp = 3}, Dtype::kBFloat16, 1), 64),
          with(on("autotp", {.dp = 2, .tp = 3}, Dtype::kFloat16, 1), [](Case& c) {
            c.batch_size = 1;
            c.micro_batches = 2;
          })};
}

INSTANTIATE_TEST_SUITE_P(Cases, EmulatedLattice, ::testing::ValuesIn(lattice_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Cases, EmulatedOrders, ::testing::ValuesIn(ordered_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Architectures, EmulatedStep, ::testing::ValuesIn(architecture_cases()),
                         case_name);
INSTANTIATE_TEST_SUITE_P(CopiedHeads, EmulatedStep, ::testing::ValuesIn(copied_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Meshes, EmulatedStep, ::testing::ValuesIn(step_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Settings, EmulatedStep, ::testing::ValuesIn(setting_cases()), case_name);

}  // namespace
}  // namespace isoshard
