// SPDX-License-Identifier: Apache-2.0
// From its second step on ddp reduces gradients in the order in
// which they became ready in the first.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "harness/fault/collective_fault.h"
#include "harness/judge/judge.h"
#include "harness/testing/run_world.h"
#include "suite/record/batches.h"
#include "suite/testing/checkpoint_cases.h"
#include "suite/testing/emulated_cases.h"

namespace isoshard {
namespace {

/// Three steps in ring order, where the bits of a sum depend on the chunk of the bucket that it is
/// in.
Case ring_case(Dtype dtype = Dtype::kFloat32, std::string_view model_type = "qwen2") {
  Case item = in_order(ReductionOrder::kRing, step_case("ddp", {.dp = 3}, dtype, model_type));
  item.settings.bucket_bytes = 64 << 10;
  item.steps = 3;
  return item;
}

std::vector<Case> cases() {
  return {ring_case(),
          ring_case(Dtype::kBFloat16),
          ring_case(Dtype::kFloat32, "gpt2"),
          ring_case(Dtype::kFloat32, "llama"),
          ring_case(Dtype::kFloat32, "qwen3"),
          ring_case(Dtype::kFloat32, "megatron_gpt"),
          with_tied_head(ring_case()),
          with(ring_case(), [](Case& c) { c.micro_batches = 2; }),
          with(ring_case(), [](Case& c) { c.settings.recompute_every = 1; }),
          with(ring_case(),
               [](Case& c) {
                 c.settings.bucket_bytes = 1;
                 c.model_name += "_buckets_of_one";
               }),
          with(ring_case(), [](Case& c) { c.settings.master_dtype = Dtype::kFloat64; }),
          with(ring_case(), [](Case& c) { c.settings.autocast = Dtype::kBFloat16; })};
}

class RebuiltBuckets : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Cases, RebuiltBuckets, ::testing::ValuesIn(cases()), case_name);

TEST_P(RebuiltBuckets, StepsAreBitEqualToTheEmulation) {
  expect_bit_equal_to_the_subject(GetParam());
}

// It is a new one, and reduces for the first time.
TEST(RebuiltBuckets, ASubjectThatIsReloadedBeginsAnew) {
  Case item = ring_case();
  item.reload_after = 1;

  (void)run_bit_equal_to_its_emulation(item);
}

// So is one that goes on from a checkpoint: first buckets in its first step, others in its second.
TEST(RebuiltBuckets, ASubjectThatResumesBeginsAnew) {
  const TestFolder folder;
  Case item = ring_case();
  item.steps = 1;
  (void)run_alone(saved_to(item, folder.path(), 1));
  item.steps = 3;

  (void)run_bit_equal_to_its_emulation(resumed_case(item, folder.path()));
}

// The negative control: a spec that leaves the rebuilding out is seen in the second step, and not
// in the first.
TEST(RebuiltBuckets, ASpecWithoutRebuildingIsSeen) {
  const Case item = ring_case();
  NumericsSpec fixed = numerics_of(item);
  ASSERT_TRUE(fixed.data.buckets.rebuilt.has_value());
  fixed.data.buckets.rebuilt.reset();
  const Reference reference = make_emulated_reference(item, fixed);

  const Verdict verdict = judge(reference, run_case(item, reference), exact_policy_of(item));

  ASSERT_EQ(verdict.status, Status::kDiverges);
  EXPECT_EQ(verdict.findings.front().key.step, 1);
  EXPECT_EQ(verdict.findings.front().stage, Stage::kParameterGrad);
}

/// Writes down the names in every gradient call, and changes nothing.
class BucketSpy final : public CollectiveFault {
 public:
  bool applies(const InterceptedCall& call) const override {
    if (call.info.purpose != Purpose::kGradReduce) return false;
    for (const Segment& segment : call.info.segments) seen += segment.name + " ";
    seen += "| ";
    return false;
  }
  Work apply(const InterceptedCall& call) const override { return call.pass(); }
  mutable std::string seen;
};

/// Buckets of each of three steps, on every rank.
std::vector<std::string> buckets_of(const Case& item) {
  const auto spy = std::make_shared<BucketSpy>();
  WorldOptions world{.size = item.degrees.dp};
  world.decorate = [&, probe = FaultProbe()](std::unique_ptr<Communicator> inner, int) {
    return decorate_with_fault(std::move(inner), spy, probe, item.mesh());
  };
  return run_world(std::move(world), [item, spy](Rank& rank) {
    EXPECT_EQ(rank.size(), item.degrees.dp);
    const CaseData data(item);
    const std::unique_ptr<Subject> subject = make_subject(item, rank, nullptr);
    subject->setup();
    for (int step = 0; step < 3; ++step) {
      spy->seen += fmt::format("step {}: ", step);
      subject->train_step(batches_of(item, data, rank.rank(), step));
    }
    return spy->seen;
  });
}

TEST(RebuiltBuckets, AreReducedInTheOrderInWhichGradientsBecomeReady) {
  Case item = ring_case(Dtype::kFloat32, "gpt2");
  item.config.num_layers = 1;
  item.settings.bucket_bytes = 25 << 20;

  const std::vector<std::string> ranks = buckets_of(item);

  ASSERT_EQ(ranks.size(), 3U);
  EXPECT_EQ(ranks[1], ranks[0]);
  EXPECT_EQ(ranks[2], ranks[0]);
  const auto step = [&](int s) {
    const std::size_t begin = ranks[0].find(fmt::format("step {}: ", s)) + 8;
    return ranks[0].substr(begin, ranks[0].find("step ", begin) - begin);
  };
  // Reversed model order: the embeddings, which a tied head makes the last ones to be ready, end
  // both; a bias is ready before its weight.
  EXPECT_THAT(step(0),
              ::testing::StartsWith(
                  "transformer.ln_f.bias transformer.ln_f.weight transformer.h.0.mlp.c_proj.bias"));
  EXPECT_NE(step(1), step(0)) << "what is ready when is not the model's order";
  EXPECT_EQ(step(2), step(1)) << "rebuilt once";
}

TEST(RebuiltBuckets, OtherSubjectsKeepTheirs) {
  Case item = ring_case();
  item.subject = "autotp";
  EXPECT_FALSE(numerics_of(item).data.buckets.rebuilt.has_value());

  const std::vector<std::string> ranks = buckets_of(item);

  const std::size_t first = ranks[0].find("step 0: ") + 8, second = ranks[0].find("step 1: ") + 8,
                    third = ranks[0].find("step 2: ");
  EXPECT_EQ(ranks[0].substr(first, second - 8 - first), ranks[0].substr(second, third - second));
}

}  // namespace
}  // namespace isoshard
