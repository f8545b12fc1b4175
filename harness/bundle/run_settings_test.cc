// SPDX-License-Identifier: Apache-2.0
/// Claims about the settings of bundles.
#include "harness/bundle/run_settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"

namespace isoshard {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::ThrowsMessage;

RunSettings parsed(std::string_view text) {
  return parse_run_settings(text, "run/manifest.json");
}

TEST(RunSettings, GiveTheJudgeWhatItNeeds) {
  const RunSettings settings =
      parsed(R"({"judging": {"coarsest_dtype": "bf16", "mask_small_gradients": true,)"
             R"( "activation_grad_scale": 3, "max_grad_norm": 0.5,
                 "num_names": {"w": 2}}})");

  EXPECT_EQ(settings.coarsest_dtype, Dtype::kBFloat16);
  EXPECT_EQ(settings.mask_small_gradients, true);
  EXPECT_EQ(settings.activation_grad_scale, 3.0);
  EXPECT_EQ(settings.max_grad_norm, 0.5);
  EXPECT_EQ(settings.num_names.at("w"), 2);
  EXPECT_FALSE(parsed("{}").coarsest_dtype.has_value());
}

TEST(RunSettings, NameEachDifference) {
  const RunSettings a =
      parsed(R"({"training": {"dtype": "bf16", "optimizer": {"kind": "sgd", "momentum": 0.9},)"
             R"( "steps": 1}})");
  const RunSettings b =
      parsed(R"({"training": {"dtype": "bf16", "optimizer": {"kind": "adamw", "eps": 1e-8},)"
             R"( "steps": 1}})");

  EXPECT_THAT(differing_settings(a, b),
              ElementsAre(HasSubstr(R"(optimizer.kind: reference "sgd", actual "adamw")"),
                          HasSubstr("optimizer.momentum: reference 0.9"),
                          HasSubstr("optimizer.eps: reference does not say")));
  EXPECT_THAT(setting_differences(a, b).different, ElementsAre(HasSubstr("optimizer.kind")));
  EXPECT_THAT(setting_differences(a, b).unshared,
              ElementsAre(HasSubstr("optimizer.momentum"), HasSubstr("optimizer.eps")));
  EXPECT_THAT(differing_settings(a, a), IsEmpty());
  EXPECT_THAT(differing_settings(a, parsed("{}")), IsEmpty())
      << "a run that says nothing may be compared with any";
}

TEST(RunSettings, OfOtherProgramsAreReadInOneVocabulary) {
  const RunSettings ours = parsed(
      R"({"training": {"dtype": "fp32", "max_grad_norm": 1, "optimizer": {"kind": "adamw",
                       "learning_rate": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}}})");
  const RunSettings theirs = parsed(
      R"({"training": {"torch_dtype": "torch.float32", "gradient_clipping": 1.0,
                       "optimizer": {"type": "torch.optim.AdamW", "lr": 1e-3,
                                     "betas": [0.9, 0.95], "adam_eps": 1e-08}}})");

  EXPECT_THAT(differing_settings(ours, theirs), IsEmpty());
  EXPECT_THAT(differing_settings(ours, parsed(R"({"training": {"precision": "bfloat16"}})")),
              Contains(R"(dtype: reference "fp32", actual "bf16")"));
  EXPECT_THAT(differing_settings(ours, parsed(R"({"training": {"optimizer": {"type": "Adam"}}})")),
              Contains(R"(optimizer.kind: reference "adamw", actual "adam")"));
}

TEST(RunSettings, SayEachSettingOnce) {
  EXPECT_EQ(parsed(R"({"training": {"lr": 0.5, "optimizer": {"learning_rate": 0.5}}})")
                .training.at("optimizer.learning_rate"),
            "0.5");
  EXPECT_THAT([] { (void)parsed(R"({"training": {"lr": 0.5, "optimizer": {"lr": 0.25}}})"); },
              ThrowsMessage<FileError>(
                  HasSubstr("optimizer.learning_rate must have one value, got 0.5 and 0.25")));
}

TEST(RunSettings, AnEnvironmentVariableThatOneRunLacksIsDifferent) {
  const RunSettings with = parsed(R"({"training": {"dtype": "fp32", "te": {"NVTE_X": "1"}}})");
  const RunSettings without = parsed(R"({"training": {"dtype": "fp32"}})");

  EXPECT_THAT(setting_differences(with, without).different, ElementsAre(HasSubstr("te.NVTE_X")));
  EXPECT_THAT(setting_differences(without, with).different, ElementsAre(HasSubstr("te.NVTE_X")));
}

TEST(RunSettings, OfInputsReadFromAFileDoNotSayHowTheyWereMade) {
  const RunSettings made =
      parsed(R"({"training": {"seed": 3, "weights": {"source": "seed", "std": 0.02},
                                      "data": {"source": "text", "shuffle": true, "dp": 2},)"
             R"( "steps": 1}})");
  const RunSettings both = parsed(R"({"training": {"seed": 0, "weights": {"source": "file"},
                                      "data": {"source": "batch file", "shuffle": false,)"
                                  R"( "dp": 2}, "steps": 1}})");
  const RunSettings weights = parsed(R"({"training": {"seed": 0, "weights": {"source": "file"},
                                         "data": {"source": "text", "shuffle": true,)"
                                     R"( "dp": 3}, "steps": 1}})");

  EXPECT_THAT(differing_settings(made, both, BatchFileOf::kEither), IsEmpty());
  EXPECT_THAT(differing_settings(both, made), IsEmpty());
  EXPECT_THAT(differing_settings(made, weights),
              ElementsAre(HasSubstr("data.dp"), HasSubstr("seed")));
  EXPECT_THAT(differing_settings(made, both),
              ElementsAre(HasSubstr("data.shuffle"), HasSubstr("data.source"), HasSubstr("seed")))
      << "the judged run alone says that its batches come from a file";
}

TEST(RunSettings, ThatAreMalformedAreRefusedByName) {
  for (const auto& [text, problem] : std::vector<std::pair<std::string_view, const char*>>{
           {"[1]", "must be a JSON object"},
           {R"({"training": 3})", "\"training\" must be an object, got 3"},
           {R"({"judging": {"coarsest": "bf16"}})", "no key \"coarsest\""},
           {R"({"judging": {"coarsest_dtype": "int64"}})", "must be a floating-point type"},
           {R"({"judging": {"coarsest_dtype": "bf61"}})", "bf61"},
           {R"({"judging": {"mask_small_gradients": 1}})", "must be true or false, got 1"},
           {R"({"judging": {"activation_grad_scale": 0}})", "must be above 0, because"},
           {R"({"judging": {"max_grad_norm": "1"}})", "must be a finite number"},
           {R"({"judging": {"num_names": {"w": 0}}})", "num_names of w must be from 1"}}) {
    EXPECT_THAT([&] { (void)parsed(text); }, ThrowsMessage<FileError>(HasSubstr(problem))) << text;
    EXPECT_THAT([&] { (void)parsed(text); },
                ThrowsMessage<FileError>(HasSubstr("run/manifest.json")))
        << text;
  }
}

}  // namespace
}  // namespace isoshard
