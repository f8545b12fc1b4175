// SPDX-License-Identifier: Apache-2.0
// ZeRO 0, 1 and 2: the step of one process, from a part of the
// memory and with the declared collectives.
#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "harness/testing/run_world.h"
#include "suite/record/batches.h"
#include "suite/record/call_counts.h"
#include "suite/record/make_subject.h"
#include "suite/testing/step_cases.h"

namespace isoshard {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

Case zero_step_case(int stage, const Degrees& degrees) {
  Case item = step_case("autotp", degrees);
  item.settings.zero_stage = stage;
  return item;
}

Case in_bf16_with_masters(Case item) {
  item.dtype = Dtype::kBFloat16;
  item.settings.master_dtype = Dtype::kFloat32;
  item.settings.optimizer.kind = OptimizerSettings::Kind::kAdamW;
  item.settings.optimizer.learning_rate = 1e-3;
  return item;
}

class ZeroStep : public ::testing::TestWithParam<Case> {};

TEST_P(ZeroStep, MatchesSingleProcess) {
  expect_matches_single_process(GetParam());
}

std::vector<Case> step_cases() {
  std::vector<Case> cases;
  for (const int stage : {1, 2}) {
    cases.push_back(zero_step_case(stage, {.dp = 3}));
    cases.push_back(zero_step_case(stage, {.dp = 3, .tp = 2}));
    cases.push_back(in_bf16_with_masters(zero_step_case(stage, {.dp = 2})));
    Case accumulated = zero_step_case(stage, {.dp = 2, .tp = 2});
    accumulated.micro_batches = 3;
    accumulated.batch_size = 1;
    accumulated.steps = 2;
    accumulated.data.unequal_labels = true;
    accumulated.settings.bucket_bytes = 1;
    cases.push_back(accumulated);
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, ZeroStep, ::testing::ValuesIn(step_cases()), case_name);

TEST(ZeroStepOfOneRank, IsBitEqualToTheSingleProcess) {
  for (const int stage : {1, 2}) {
    const Case item = zero_step_case(stage, {});
    const Reference reference = reference_of(item);

    const Trace trace = run_case(item, reference);

    EXPECT_TRUE(is_bit_equal(reference, trace)) << "stage " << stage;
  }
}

// Every parameter in a bucket of its own: 27 of them.
TEST(ZeroCollectives, AreTheDeclaredOnes) {
  const auto num_calls = [](int stage, int micro_batches) {
    Case item = zero_step_case(stage, {.dp = 2});
    item.settings.bucket_bytes = 1;
    item.micro_batches = micro_batches;
    return run_world(2, [item](Rank& rank) {
      EXPECT_EQ(rank.size(), 2);
      const auto counts = std::make_shared<CallCounts>();
      const CaseData data(item);
      CountedRank counted(rank, counts);
      const std::unique_ptr<Subject> subject = make_subject(item, counted, nullptr);
      subject->setup();
      subject->train_step(batches_of(item, data, rank.rank(), 0));
      const auto count = [&](CollectiveOp op, Purpose purpose) {
        const auto found = counts->find({op, purpose, Axis::kDp});
        return found == counts->end() ? std::int64_t{0} : found->second;
      };
      return std::vector<std::int64_t>{
          count(CollectiveOp::kAllReduce, Purpose::kGradReduce),
          count(CollectiveOp::kReduceScatterUneven, Purpose::kGradReduce),
          count(CollectiveOp::kAllGather, Purpose::kParamGather),
          count(CollectiveOp::kAllReduce, Purpose::kClipNorm)};
    });
  };

  EXPECT_THAT(num_calls(0, 3), Each(ElementsAre(27, 0, 0, 0)));
  EXPECT_THAT(num_calls(1, 3), Each(ElementsAre(27, 0, 1, 1)));
  EXPECT_THAT(num_calls(2, 1), Each(ElementsAre(0, 27, 1, 1)));
  // Gradients of each micro-batch are reduced on their own.
  EXPECT_THAT(num_calls(2, 3), Each(ElementsAre(0, 3 * 27, 1, 1)));
}

// Counts the bytes of tensors that are alive in this process: one object, which is never destroyed.
class CountingAllocator final : public c10::Allocator {
 public:
  static CountingAllocator& get() {
    static auto* const counting = new CountingAllocator;
    return *counting;
  }
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, at::kCPU};
    void* const data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    sizes_[data] = static_cast<std::int64_t>(bytes);
    live_ += static_cast<std::int64_t>(bytes);
    return {data, data, &release, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  [[nodiscard]] std::int64_t live_bytes() const noexcept { return live_; }

 private:
  static void release(void* data) {
    if (data == nullptr) return;
    CountingAllocator& counting = get();
    const auto found = counting.sizes_.find(data);
    counting.live_ -= found->second;
    counting.sizes_.erase(found);
    std::free(data);
  }

  std::unordered_map<void*, std::int64_t> sizes_;
  std::int64_t live_ = 0;
};

// Bytes of tensors that a rank holds between two steps.
std::vector<std::int64_t> held_bytes(const Case& item) {
  return run_world<std::int64_t>(item.world_size(), [item](Rank& rank) -> std::int64_t {
    const CaseData data(item);
    CountingAllocator& counting = CountingAllocator::get();
    c10::SetCPUAllocator(&counting, 255);
    std::unique_ptr<Subject> subject = make_subject(item, rank, nullptr);
    subject->setup();
    for (int step = 0; step < 2; ++step)
      subject->train_step(batches_of(item, data, rank.rank(), step));
    const std::int64_t held = counting.live_bytes();
    subject.reset();
    EXPECT_LE(counting.live_bytes(), held / 20) << "what is counted must belong to the subject";
    return held;
  });
}

// docs/reference/subjects.md: P parameters of this tp rank, N = dp, e and m the bytes of an element
// as forward reads it and as it is stepped.
double formula_bytes(const Case& item, std::int64_t P) {
  const double e = static_cast<double>(size_of(item.dtype)),
               m = static_cast<double>(size_of(item.settings.master_dtype.value_or(item.dtype)));
  const double states = item.settings.optimizer.kind == OptimizerSettings::Kind::kAdamW ? 2
                        : item.settings.optimizer.momentum != 0                         ? 1
                                                                                        : 0;
  const bool own_masters = item.settings.master_dtype.has_value() || item.settings.zero_stage > 0;
  const bool own_gradients =
      size_of(item.dtype) != size_of(item.settings.master_dtype.value_or(item.dtype));
  const double pieces = item.settings.zero_stage > 0 ? static_cast<double>(P) / item.degrees.dp
                                                     : static_cast<double>(P);
  const double reduced = item.settings.zero_stage == 2 ? pieces : static_cast<double>(P);
  return static_cast<double>(P) * e + reduced * e +
         pieces * m * (states + (own_masters ? 1 : 0) + (own_gradients ? 1 : 0));
}

class ZeroMemory : public ::testing::TestWithParam<Case> {};

TEST_P(ZeroMemory, IsThatOfTheFormula) {
  const Case& item = GetParam();
  std::int64_t P = 0;
  for (const ParameterSpec& spec : make_model(item.config, item.attention)->parameters()) {
    P += numel_of(spec.shape) /
         (spec.tp.role == TpRole::kColumn || spec.tp.role == TpRole::kRow ? item.degrees.tp : 1);
  }

  const std::vector<std::int64_t> held = held_bytes(item);

  ASSERT_EQ(static_cast<int>(held.size()), item.world_size());
  for (const std::int64_t bytes : held) {
    EXPECT_NEAR(static_cast<double>(bytes) / formula_bytes(item, P), 1, 0.1)
        << bytes << " bytes, " << P << " parameters";
  }
}

std::vector<Case> memory_cases() {
  std::vector<Case> cases;
  for (const int layers : {2, 5}) {
    for (const int stage : {0, 1, 2}) {
      for (const bool is_mixed : {false, true}) {
        Case item = zero_step_case(stage, {.dp = 3, .tp = layers == 2 ? 2 : 1});
        item.config.num_layers = layers;
        item.model_name += "_l" + std::to_string(layers);
        if (layers == 5) {
          item.config.hidden_size *= 2;
          item.config.head_dim *= 2;
          item.config.intermediate_size *= 3;
        }
        cases.push_back(is_mixed ? in_bf16_with_masters(item) : item);
      }
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, ZeroMemory, ::testing::ValuesIn(memory_cases()), case_name);

TEST(ZeroMemoryFormula, TellsTheStagesApart) {
  Case item = in_bf16_with_masters(zero_step_case(0, {.dp = 3}));
  std::vector<double> bytes;
  for (int stage = 0; stage <= 2; ++stage) {
    item.settings.zero_stage = stage;
    bytes.push_back(formula_bytes(item, 3000));
  }

  EXPECT_GT(bytes[0], 1.2 * bytes[1]);
  EXPECT_GT(bytes[1], 1.1 * bytes[2]);
}

}  // namespace
}  // namespace isoshard
