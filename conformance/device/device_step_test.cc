// SPDX-License-Identifier: Apache-2.0
// Training steps on a device that is not the CPU: the one of tests, which computes as the CPU does
// and refuses what a GPU refuses. So whatever assumes host memory shows here, without a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "harness/testing/device/test_device.h"
#include "harness/verdict/equal_runs.h"
#include "subjects/model/zoo/registry.h"
#include "suite/testing/emulated_cases.h"
#include "suite/testing/every_subject.h"

namespace isoshard {
namespace {

// Before the first world, in the controller: ranks are forked with it.
const c10::Device kTestDevice = test_device();

Case on_device(Case item) {
  item.device = Device::Kind::kCuda;
  return item;
}

Case dropped_step(const Combination& c) {
  Case item = step_case(c.subject, c.degrees, c.dtype, "gpt2");
  set_dropout(item.config, 0.1);
  item.micro_batches = 2;
  item.data.unequal_labels = true;
  return item;
}

std::vector<Case> few_cases() {
  return every_subject(Coverage::kPairs, dropped_step).cases;
}

/// What a run recorded, as digests.
Trace recorded(const Case& item) {
  return run_case(item, Reference(), digests_only({}));
}

class DeviceStep : public ::testing::TestWithParam<Case> {};

TEST_P(DeviceStep, HasTheBitsOfTheSameStepInHostMemory) {
  ASSERT_EQ(kTestDevice.type(), c10::DeviceType::PrivateUse1);

  const RunEquality equality = equality_of(recorded(GetParam()), recorded(on_device(GetParam())));

  EXPECT_EQ(equality.difference, "");
  EXPECT_GT(equality.tensors, 50);
}
INSTANTIATE_TEST_SUITE_P(EverySubject, DeviceStep, ::testing::ValuesIn(few_cases()), case_name);

class DeviceEmulated : public ::testing::TestWithParam<Case> {};

TEST_P(DeviceEmulated, IsBitEqualToItsDeclaredArithmeticOnTheDevice) {
  (void)run_bit_equal_to_its_emulation(on_device(GetParam()));
}
INSTANTIATE_TEST_SUITE_P(EverySubject, DeviceEmulated, ::testing::ValuesIn(few_cases()), case_name);

}  // namespace
}  // namespace isoshard
