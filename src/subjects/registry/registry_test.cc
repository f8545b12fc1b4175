// SPDX-License-Identifier: Apache-2.0
// The rows of the registry, and the questions that the tree asks it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "core/base/error.h"
#include "subjects/registry/subject_spec.h"

namespace isoshard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(SubjectRegistry, EveryRowIsWholeAndEveryNameStandsOnce) {
  std::set<std::string_view> names;
  for (const SubjectSpec& spec : subject_specs()) {
    EXPECT_TRUE(names.insert(spec.name).second) << spec.name;
    for (const std::string_view alias : spec.aliases)
      EXPECT_TRUE(names.insert(alias).second) << alias;
    EXPECT_FALSE(spec.title.empty() || spec.summary.empty()) << spec.name;
    EXPECT_NE(spec.make_parts, nullptr) << spec.name;
    EXPECT_TRUE(spec.has(Axis::kDp)) << spec.name;
    EXPECT_EQ(spec.make_numerics == nullptr, spec.is_reference()) << spec.name;
  }
  EXPECT_TRUE(reference_subject().is_reference());
  EXPECT_TRUE(is_reference(reference_subject().name));
}

TEST(SubjectRegistry, NamesAliasesAndTitlesAreFound) {
  EXPECT_EQ(subject_name("deepspeed"), "autotp");
  EXPECT_EQ(subject_name("fsdp2"), "fsdp_tp");
  EXPECT_EQ(subject_name("mine"), "mine");
  EXPECT_EQ(title_of_subject("megatron"), "Megatron-Core");
  EXPECT_EQ(title_of_subject("mine"), "mine");
  EXPECT_EQ(find_subject("mine"), nullptr);
  EXPECT_THAT([] { (void)subject_spec("megatrn"); },
              ThrowsMessage<UsageError>(HasSubstr("did you mean 'megatron'")));
}

TEST(SubjectRegistry, AsksByAxisAndSetting) {
  EXPECT_THAT(subjects_with(Axis::kTp), ElementsAre("autotp", "fsdp_tp", "megatron", "nd"));
  EXPECT_THAT(subjects_with(Axis::kCp), ElementsAre("nd"));
  EXPECT_THAT(subjects_that_take("zero_stage"), ElementsAre("autotp"));
  EXPECT_THAT(subjects_that_take("reduce_dtype"), ElementsAre("fsdp_tp", "nd"));
  EXPECT_THAT(subjects_that_take("clip_norm"), ElementsAre("ddp", "fsdp_tp", "nd"));
  EXPECT_THAT(subjects_that_take("accumulate_dtype"), ElementsAre("autotp"));
  EXPECT_THAT(subjects_that_take("grad_average"),
              ElementsAre("ddp", "autotp", "fsdp_tp", "megatron", "nd"));
  EXPECT_EQ(usual_subject(/*has_tp=*/true, /*has_dp=*/true), "autotp");
  EXPECT_EQ(usual_subject(/*has_tp=*/false, /*has_dp=*/true), "ddp");
  EXPECT_EQ(usual_subject(/*has_tp=*/false, /*has_dp=*/false), "");
}

}  // namespace
}  // namespace isoshard
