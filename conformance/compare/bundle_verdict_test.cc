// SPDX-License-Identifier: Apache-2.0
/// compare says of two dumped runs what verify said when they ran, number by number.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "fixtures/cases/case_settings.h"
#include "harness/bundle/bundle.h"
#include "harness/judge/compare_bundles.h"
#include "harness/judge/judge.h"
#include "harness/report/json/verdict_json.h"
#include "suite/faults/fault.h"
#include "suite/record/run_case.h"
#include "suite/reference/reference.h"
#include "suite/testing/step_cases.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

struct Written {
  Case item;
  std::string fault;  ///< empty: none
};

Case adamw(Case item, int steps) {
  item.settings.optimizer.kind = OptimizerSettings::Kind::kAdamW;
  item.settings.optimizer.learning_rate = 1e-2;
  item.steps = steps;
  return item;
}

class BundleVerdict : public ::testing::TestWithParam<Written> {
 protected:
  BundleVerdict()
      : folder_(fs::temp_directory_path() / fmt::format("isoshard-bundle-verdict-{}", getpid())) {
    fs::create_directories(folder_);
  }
  ~BundleVerdict() override { fs::remove_all(folder_); }

  /// Runs, judges and writes both runs, as verify --dump does.
  Verdict run_and_write(const Case& item, const std::string& fault) const {
    const Reference reference = reference_of(item);
    RunOptions options;
    options.keep = Keep::kEverything;
    const FaultProbe probe;
    if (!fault.empty()) options = with_fault(options, find_fault(fault), item, probe);
    const Trace trace = run_case(item, reference, options);
    const JudgePolicy judging = policy_of(item);
    write_bundle(folder_ / "reference", reference, bundle_settings(item, judging));
    write_bundle(folder_ / "actual", trace, bundle_settings(item, judging));
    return judge(reference, trace, judging);
  }

  fs::path folder_;
};

TEST_P(BundleVerdict, OfCompareIsThatOfVerify) {
  const auto& [item, fault] = GetParam();
  ASSERT_GT(item.world_size(), 1);

  const Verdict verify = run_and_write(item, fault);
  const Verdict compare = compare_bundles(folder_ / "reference", folder_ / "actual", {});

  EXPECT_EQ(verify.status, fault.empty() ? Status::kConforms : Status::kDiverges) << verify.reason;
  EXPECT_EQ(verdict_json(compare).dump(1), verdict_json(verify).dump(1));
}

INSTANTIATE_TEST_SUITE_P(
    Runs, BundleVerdict,
    ::testing::Values(Written{step_case("ddp", {.dp = 2}, Dtype::kFloat64), ""},
                      Written{adamw(step_case("autotp", {.dp = 2, .tp = 3}), 2), ""},
                      Written{adamw(step_case("ddp", {.dp = 3}, Dtype::kBFloat16), 1), ""},
                      Written{step_case("autotp", {.dp = 2, .tp = 3}), "mlp_input_grad_partial"},
                      Written{adamw(step_case("ddp", {.dp = 3}), 2), "dp_sum_missing"}),
    [](const auto& test) {
      return test.param.item.slug() + (test.param.fault.empty() ? "" : "_" + test.param.fault);
    });

using BundleSettings = BundleVerdict;

TEST_F(BundleSettings, ThatDifferAreNamedAndRefusedUnlessAllowed) {
  const Case item = step_case("ddp", {.dp = 2});
  Case other = item;
  other.settings.max_grad_norm = 0.25;
  (void)run_and_write(item, "");
  const Reference reference = reference_of(item);
  write_bundle(folder_ / "other", run_case(other, reference, {.keep = Keep::kEverything}),
               bundle_settings(other, policy_of(other)));

  EXPECT_THAT([&] { (void)compare_bundles(folder_ / "reference", folder_ / "other", {}); },
              ThrowsMessage<UsageError>(HasSubstr("max_grad_norm: reference 1.0, actual 0.25")));
  EXPECT_EQ(compare_bundles(folder_ / "reference", folder_ / "other", {},
                            {.different = DifferentSettings::kAllowed})
                .status,
            Status::kDiverges);
}

TEST_F(BundleSettings, OfSubjectAndTpDoNotMatter) {
  const auto settings = [](const Case& item) { return bundle_settings(item, policy_of(item)); };

  EXPECT_EQ(settings(step_case("ddp", {.dp = 2})),
            settings(step_case("autotp", {.dp = 2, .tp = 3})));
  EXPECT_NE(settings(step_case("ddp", {.dp = 2})), settings(step_case("ddp", {.dp = 3})));
}

}  // namespace
}  // namespace isoshard
