// SPDX-License-Identifier: Apache-2.0
// A hundred steps at the width of a real model.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <map>
#include <string>

#include "fixtures/cases/presets.h"
#include "subjects/optim/optimizer.h"
#include "suite/record/registry.h"
#include "suite/train/judge_training.h"

namespace isoshard {
namespace {

constexpr int kSteps = 100;
constexpr rlim_t kBytesPerProcess = rlim_t{4} << 30;  // of at most four at a time

class RealWidth : public testing::TestWithParam<OptimizerSettings::Kind> {};

/// Qwen2.5-0.5B cut to 2 layers, bf16, 2 samples of 128 tokens per dp rank. About half an hour on 2
/// cores.
TEST_P(RealWidth, HundredStepsOfEverySubjectStayWithinTheEnvelope) {
  rlimit limit{kBytesPerProcess, kBytesPerProcess};
  ASSERT_EQ(::setrlimit(RLIMIT_DATA, &limit), 0);
  Case base = default_preset().front();
  ASSERT_EQ(base.config.hidden_size, 896);
  ASSERT_EQ(base.seq_length, 128);
  base.steps = kSteps;
  if (GetParam() == OptimizerSettings::Kind::kAdamW) {
    base.settings.optimizer = OptimizerSettings{};
    base.settings.optimizer.learning_rate = 1e-5;  // the published one
  } else {
    base.settings.optimizer.learning_rate = largest_rate(base);
  }
  base.degrees.dp = 2;
  std::map<std::string, TrainedCase> references;
  for (const SubjectInfo& subject : subjects()) {
    Case item = base;
    item.subject = subject.name;
    item.degrees.tp = subject.name == "ddp" ? 1 : 2;
    // it has no others
    if (subject.name == "megatron") item.settings.master_dtype = Dtype::kFloat32;
    const auto [reference, is_new] = references.try_emplace(item.reference_slug());
    if (is_new) reference->second = train_reference(item);
    ASSERT_EQ(item.world_size(), subject.name == "ddp" ? 2 : 4);

    const CurveVerdict verdict = judge_training(reference->second.curve, train_case(item));

    EXPECT_EQ(verdict.status, Status::kConforms) << render(verdict);
    EXPECT_EQ(verdict.steps, kSteps);
  }
}

INSTANTIATE_TEST_SUITE_P(, RealWidth,
                         testing::Values(OptimizerSettings::Kind::kAdamW,
                                         OptimizerSettings::Kind::kSgd),
                         [](const auto& kind) { return std::string(name_of(kind.param)); });

}  // namespace
}  // namespace isoshard
