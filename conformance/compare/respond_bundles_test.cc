// SPDX-License-Identifier: Apache-2.0
/// Responses that are measured by perturbed runs on disk are those of a reference that measured
/// them itself, and runs that show no response are refused.
#include "harness/judge/respond_bundles.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>

#include "fixtures/inputs/inputs.h"
#include "harness/run/record.h"
#include "harness/world/forked/forked_world.h"
#include "suite/reference/perturbed_weights.h"
#include "suite/reference/plain_run.h"
#include "suite/testing/dumped_bundles.h"

namespace isoshard {
namespace {

using namespace dumped;
using testing::HasSubstr;

/// A reference without responses, three perturbed runs of it, and a run of two ranks.
class RespondBundles : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    case_ = std::make_unique<Case>(adamw("autotp"));
    case_->degrees = {.tp = 2};
    ASSERT_EQ(case_->world_size(), 2);
    folder_ = std::make_unique<TestFolder>();
    reference_ = std::make_unique<Reference>(make_reference(*case_, {.responses = 0}));
    const Reference bare(reference_->trace());
    const std::string settings = bundle_settings(*case_, policy_of(*case_));
    write_bundle(*folder_ / "reference", reference_->trace(), settings);
    write_bundle(*folder_ / "run", run_case(*case_, *reference_, {.keep = Keep::kEverything}),
                 settings);
    const CaseData data(*case_);
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      const auto weights =
          std::make_shared<PerturbedWeights>(case_weights(*case_), seed, case_->dtype);
      const RunSpec spec = plain_spec(*case_, whole_batch_run(data, weights));
      write_bundle(perturbed(seed), record(forked_launcher(), spec, {}), settings);
      reference_->add_response(
          record(forked_launcher(), spec,
                 {.reference = &bare, .keep = Keep::kNothing, .purpose = RunPurpose::kResponse}));
    }
  }
  static void TearDownTestSuite() {
    reference_.reset();
    folder_.reset();
    case_.reset();
  }

  static fs::path perturbed(std::uint64_t seed) {
    return *folder_ / ("perturbed" + std::to_string(seed));
  }
  static std::vector<fs::path> all() { return {perturbed(1), perturbed(2), perturbed(3)}; }

  /// What is said of a perturbed run that was edited and sealed again.
  static std::string refusal_of(const std::function<void(const fs::path&)>& edit) {
    const TestFolder bad;
    fs::copy(perturbed(1), bad / "perturbed", fs::copy_options::recursive);
    edit(bad / "perturbed");
    bundle_edit::seal(bad / "perturbed");
    try {
      (void)respond_bundles(*folder_ / "reference", {bad / "perturbed"});
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }

  static std::unique_ptr<Case> case_;
  static std::unique_ptr<TestFolder> folder_;
  static std::unique_ptr<Reference> reference_;
};
std::unique_ptr<Case> RespondBundles::case_;
std::unique_ptr<TestFolder> RespondBundles::folder_;
std::unique_ptr<Reference> RespondBundles::reference_;

TEST_F(RespondBundles, AreThoseOfTheReferenceItself) {
  const std::size_t records = respond_bundles(*folder_ / "reference", all());

  const Bundle bundle = read_bundle(*folder_ / "reference");
  EXPECT_EQ(bundle.response_runs, 3);
  EXPECT_EQ(bundle.responses.size(), records);
  ASSERT_EQ(bundle.responses.size(), reference_->responses().size());
  for (const auto& [key, expected] : reference_->responses()) {
    const Response& actual = bundle.responses.at(key);
    EXPECT_EQ(actual.relative_error, expected.relative_error) << describe(key);
    EXPECT_EQ(actual.scale_error, expected.scale_error) << describe(key);
    EXPECT_EQ(actual.absolute_norm, expected.absolute_norm) << describe(key);
    EXPECT_EQ(actual.max_abs, expected.max_abs) << describe(key);
    EXPECT_EQ(actual.reference_norm, expected.reference_norm) << describe(key);
    EXPECT_EQ(actual.reference_max_abs, expected.reference_max_abs) << describe(key);
    EXPECT_EQ(actual.runs, expected.runs) << describe(key);
  }
  EXPECT_EQ(compared(*folder_ / "reference", *folder_ / "run").code, 0);
}

TEST_F(RespondBundles, ReplaceOlderOnesAndAreTheSameAgain) {
  (void)respond_bundles(*folder_ / "reference", {perturbed(1)});
  const Bundle one = read_bundle(*folder_ / "reference");
  (void)respond_bundles(*folder_ / "reference", all());
  const Bundle three = read_bundle(*folder_ / "reference");
  (void)respond_bundles(*folder_ / "reference", {perturbed(1)});
  const Bundle again = read_bundle(*folder_ / "reference");

  EXPECT_EQ(one.response_runs, 1);
  EXPECT_EQ(three.response_runs, 3);
  EXPECT_EQ(again.response_runs, 1);
  for (const auto& [key, response] : one.responses)
    EXPECT_EQ(again.responses.at(key).absolute_norm, response.absolute_norm) << describe(key);
}

TEST_F(RespondBundles, RunsThatShowNoneAreRefused) {
  EXPECT_THROW((void)respond_bundles(*folder_ / "reference", {}), UsageError);
  try {
    (void)respond_bundles(*folder_ / "reference", {*folder_ / "reference"});
    ADD_FAILURE() << "the reference is no perturbed run of itself";
  } catch (const FileError& error) {
    EXPECT_THAT(error.what(), HasSubstr("moved by one ulp"));
  }
  EXPECT_THAT(refusal_of([](const fs::path& bundle) {
                fs::remove_all(bundle);
                Case other = *case_;
                other.seed += 1;
                const CaseData data(other);
                const auto weights =
                    std::make_shared<PerturbedWeights>(case_weights(*case_), 1, other.dtype);
                write_bundle(bundle,
                             record(forked_launcher(),
                                    plain_spec(other, whole_batch_run(data, weights)), {}),
                             bundle_settings(*case_, policy_of(*case_)));
              }),
              HasSubstr("must read the reference's data and masks"));
  EXPECT_THROW(
      (void)respond_bundles(*folder_ / "reference", {perturbed(1), perturbed(2), perturbed(1)}),
      UsageError);
  const auto initial_weights = [](double factor) {
    return [factor](const fs::path& bundle) {
      const SafetensorsFile reference =
          SafetensorsFile::open(*folder_ / "reference/step0000/rank00000.safetensors");
      edit_values(bundle, [&](int, const std::string& name, auto& values) {
        if (!name.starts_with("param/") || !name.ends_with("/0") || !reference.contains(name))
          return;
        const HostTensor own = reference.tensor(name);
        for (std::size_t i = 0; i < values.size(); ++i)
          values[i] = factor * value_at(own.bytes.data(), own.dtype, static_cast<std::int64_t>(i));
      });
    };
  };
  EXPECT_THAT(refusal_of(initial_weights(1)), HasSubstr("moved by one ulp, got the reference's"))
      << "all but the first weights move";
  EXPECT_THAT(refusal_of(initial_weights(1.02)), HasSubstr("must be moved by one ulp"));
  EXPECT_THAT(refusal_of([](const fs::path& bundle) {
                rename(bundle, std::string("grad/") + kNorm + "/0", "another.weight");
              }),
              HasSubstr("must record what the reference records"));
  EXPECT_THAT(refusal_of([](const fs::path& bundle) {
                edit_manifest(bundle, [](json& manifest) {
                  manifest["settings"]["training"]["optimizer"]["learning_rate"] = 0.5;
                });
              }),
              HasSubstr("must have the reference's settings"));
}

}  // namespace
}  // namespace isoshard
