// SPDX-License-Identifier: Apache-2.0
/// Every setting of the table is pinned, read back and put back, and one that does not hold is
/// told.
#include "core/tensor/pinned_settings.h"

#include <ATen/Context.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <string>

#include "core/base/error.h"

namespace isoshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

/// Another value that the setting can have.
std::string other_value(const PinnedSetting& setting) {
  const std::string now(setting.pinned);
  if (now == "on") return "off";
  if (now == "off") return "on";
  if (now == "fp32") return "fp32 without split-k";
  if (now == "math") return "math,flash,cudnn";
  return "something_else";
}

TEST(PinnedSettings, EachIsReadBackAndPutBack) {
  std::set<std::string_view> names;
  for (const PinnedSetting& setting : pinned_settings()) {
    SCOPED_TRACE(std::string(setting.name));
    const std::string before = setting.read();
    const std::string other = other_value(setting);
    {
      const SettingsPin pin(pinned_values({{std::string(setting.name), other}}));

      EXPECT_EQ(setting.read(), other);
      EXPECT_EQ(read_settings(), pin.values());
      {
        const SettingsPin inner(pinned_values());
        EXPECT_EQ(setting.read(), setting.pinned);
      }
      EXPECT_EQ(setting.read(), other);
    }
    EXPECT_EQ(setting.read(), before);
    EXPECT_FALSE(setting.why.empty());
    names.insert(setting.name);
  }
  EXPECT_EQ(names.size(), pinned_settings().size());
  EXPECT_GE(names.size(), 13U);
}

TEST(PinnedSettings, LibTorchHasThemWhileTheyArePinned) {
  const SettingsPin pin(pinned_values({{"tf32_matmul", "on"}}));

  EXPECT_TRUE(at::globalContext().allowTF32CuBLAS());
  EXPECT_TRUE(at::globalContext().deterministicAlgorithms());
  EXPECT_FALSE(at::globalContext().userEnabledFlashSDP());
  EXPECT_STREQ(std::getenv("CUBLAS_WORKSPACE_CONFIG"), ":4096:8");
  EXPECT_STREQ(std::getenv("NCCL_ALGO"), "Ring");
}

TEST(PinnedSettings, OneThatIsChangedMeanwhileIsNamed) {
  const SettingsPin pin(pinned_values());

  at::globalContext().setAllowTF32CuBLAS(true);

  EXPECT_THAT([&] { pin.check(); }, ThrowsMessage<InfrastructureError>(AllOf(
                                        HasSubstr("tf32_matmul must read back as off, got on"))));
}

TEST(PinnedSettings, ValuesAndNamesThatThereAreNotAreRefusedAndChangeNothing) {
  const SettingValues before = read_settings();

  EXPECT_THROW(SettingsPin(pinned_values({{"tf32_matmul", "perhaps"}})), UsageError);
  EXPECT_THROW(SettingsPin(pinned_values({{"attention_kernels", "fast"}})), UsageError);
  EXPECT_THROW((void)pinned_values({{"tf32", "on"}}), UsageError);

  EXPECT_EQ(read_settings(), before);
}

}  // namespace
}  // namespace isoshard
