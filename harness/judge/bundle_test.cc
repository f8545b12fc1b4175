// SPDX-License-Identifier: Apache-2.0
/// Claims about bundles: what is written comes back bit by bit, what is broken is refused, two
/// bundles can be judged.
#include "harness/bundle/bundle.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "core/base/error.h"
#include "harness/judge/compare_bundles.h"
#include "harness/testing/bundle_edit.h"
#include "harness/testing/is_cause.h"
#include "harness/testing/said_matchers.h"
#include "harness/testing/synthetic.h"
#include "harness/verdict/verdict.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using namespace synthetic;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

/// What every bundle must state before it is compared. "w" carries the factor 2 on six ranks.
constexpr const char* kSettings =
    R"({"training": {"dtype": "bf16"}, "judging": {"grad_scale": 2}})";
/// Of a run on one rank.
constexpr const char* kWhole = R"({"training": {"dtype": "bf16"}})";

class BundleTest : public testing::Test {
 protected:
  BundleTest() : folder_(fs::temp_directory_path() / fmt::format("isoshard-bundle-{}", getpid())) {
    fs::create_directories(folder_);
  }
  ~BundleTest() override { fs::remove_all(folder_); }

  /// The bundle "right" conforms to itself in so many tensors; "wrong" diverges first in this one.
  void expect_right_and_wrong(std::int64_t compared, const std::string& first) const {
    const Verdict right = compare_bundles(folder_ / "right", folder_ / "right", {});
    const Verdict wrong = compare_bundles(folder_ / "right", folder_ / "wrong", {});

    EXPECT_EQ(right.status, Status::kConforms) << right.reason;
    EXPECT_EQ(right.compared, compared);
    ASSERT_EQ(wrong.status, Status::kDiverges);
    EXPECT_EQ(wrong.findings.at(0).key.name, first);
  }

  fs::path folder_;
};
using Bundles = BundleTest;

Body body(bool whole, double factor = 1) {
  return [=](Sink& sink, int rank) {
    const at::Tensor x = values({4, 6}, 1, at::kBFloat16);
    const at::Tensor poisoned = at::tensor({-0.0F, static_cast<float>(NAN), INFINITY, 1e-42F});
    sink.on_record(site(RecordKind::kScalar, "loss", layout_of({1})),
                   at::full({1}, 5.5, at::kDouble));
    (void)sink.on_activation(site(RecordKind::kActivation, "x",
                                  layout_of({4, 6}, {shard(Axis::kDp, 0), shard(Axis::kTp, 1)})),
                             whole ? x : x.narrow(0, rank / 3 * 2, 2).narrow(1, rank % 3 * 2, 2));
    sink.on_record(site(RecordKind::kMask, "odd", layout_of({4})), poisoned);
    sink.begin_step(1);
    sink.on_record(site(RecordKind::kGrad, "w", layout_of({3}), whole ? 1 : 2),
                   values({3}, 3) * (whole ? 1 : 2) * factor);
  };
}

Trace six_ranks(double factor = 1) {
  return run(kDp2Tp3, nullptr, body(false, factor), Keep::kEverything);
}

TEST_F(Bundles, ComeBackBitByBit) {
  const Trace trace = six_ranks();

  write_bundle(folder_ / "b", trace, R"({"seed":7})");
  const Bundle got = read_bundle(folder_ / "b");

  EXPECT_EQ(got.trace.subject, trace.subject);
  EXPECT_EQ(got.trace.mesh, trace.mesh);
  EXPECT_EQ(got.settings, R"({"seed":7})");
  ASSERT_EQ(got.trace.ranks.size(), 6U);
  for (std::size_t r = 0; r < 6; ++r) {
    ASSERT_EQ(got.trace.ranks[r].records.size(), trace.ranks[r].records.size());
    for (std::size_t i = 0; i < trace.ranks[r].records.size(); ++i) {
      const Record& a = trace.ranks[r].records[i];
      const Record& b = got.trace.ranks[r].records[i];
      EXPECT_EQ(a.key, b.key);
      EXPECT_EQ(a.layout, b.layout);
      EXPECT_EQ(a.grad_scale, b.grad_scale);
      EXPECT_EQ(a.dtype, b.dtype);
      EXPECT_EQ(a.parts.at(0).digest, b.parts.at(0).digest) << describe(a.key);
      ASSERT_EQ(a.bytes, b.bytes);
      EXPECT_EQ(std::memcmp(trace.ranks[r].arena->data() + a.offset,
                            got.trace.ranks[r].arena->data() + b.offset,
                            static_cast<std::size_t>(a.bytes)),
                0);
    }
  }
}

TEST_F(Bundles, OfAReferenceHoldItsResponses) {
  const Reference r = reference(body(true), [](int i) { return body(true, 1 + 1e-3 * i); });

  write_bundle(folder_ / "b", r);
  const Bundle got = read_bundle(folder_ / "b");

  EXPECT_EQ(got.response_runs, 3);
  const RecordKey key{1, RecordKind::kGrad, "w", 0};
  ASSERT_TRUE(got.responses.contains(key));
  EXPECT_EQ(got.responses.at(key).relative_error, r.response(key)->relative_error);
  EXPECT_EQ(got.responses.size(), r.responses().size());
}

TEST_F(Bundles, ReplaceAnOlderBundleAndNothingElse) {
  write_bundle(folder_ / "b", six_ranks(1));
  EXPECT_NO_THROW(write_bundle(folder_ / "b", six_ranks(2)));
  EXPECT_NO_THROW((void)read_bundle(folder_ / "b"));
  fs::create_directories(folder_ / "mine");
  std::ofstream(folder_ / "mine" / "thesis.txt") << "x";
  EXPECT_THROW(write_bundle(folder_ / "mine", six_ranks()), UsageError);
  EXPECT_TRUE(fs::exists(folder_ / "mine" / "thesis.txt"));
}

TEST_F(Bundles, WithoutARankOrItsDoneAreIncomplete) {
  for (const char* suffix : {".done", ".json", ".safetensors"}) {
    write_bundle(folder_ / "b", six_ranks());
    fs::remove(folder_ / "b" / "step0001" / fmt::format("rank00004{}", suffix));
    EXPECT_THAT([&] { (void)read_bundle(folder_ / "b"); },
                RefusesBy<FileError>(RuleId::kFileMissing))
        << suffix;
    bundle_edit::seal(folder_ / "b");
    EXPECT_THAT([&] { (void)read_bundle(folder_ / "b"); },
                RefusesBy<InfrastructureError>(RuleId::kRunIncomplete))
        << suffix;
  }
}

TEST_F(Bundles, OfMixedRunsAreRefused) {
  write_bundle(folder_ / "a", six_ranks(1));
  write_bundle(folder_ / "b", six_ranks(2));
  for (const char* suffix : {".done", ".json", ".safetensors"}) {
    const std::string name = fmt::format("step0001/rank00004{}", suffix);
    fs::copy_file(folder_ / "b" / name, folder_ / "a" / name, fs::copy_options::overwrite_existing);
  }
  EXPECT_THAT([&] { (void)read_bundle(folder_ / "a"); },
              RefusesBy<FileError>(RuleId::kFileChanged));
  bundle_edit::seal(folder_ / "a");

  EXPECT_THAT([&] { (void)read_bundle(folder_ / "a"); }, RefusesBy<FileError>(RuleId::kOtherRun));
}

TEST_F(Bundles, WhosePartsDoNotTileAreRefused) {
  Trace trace = six_ranks();
  for (RankTrace& rank : trace.ranks) {
    for (Record& record : rank.records) {
      if (record.key.name == "x") record.layout.global_shape = {8, 6};
      if (record.key.name == "x") record.layout.placements = {shard(Axis::kTp, 1)};
    }
  }
  write_bundle(folder_ / "b", trace);

  EXPECT_THROW((void)read_bundle(folder_ / "b"), FileError);
}

TEST_F(Bundles, WithBrokenFilesAreRefused) {
  for (const char* name :
       {"manifest.json", "step0000/rank00000.json", "step0000/rank00000.safetensors"}) {
    write_bundle(folder_ / "b", six_ranks());
    fs::resize_file(folder_ / "b" / name, fs::file_size(folder_ / "b" / name) / 2);
    EXPECT_THROW((void)read_bundle(folder_ / "b"), FileError) << name;
  }
  EXPECT_THROW((void)read_bundle(folder_ / "nowhere"), FileError);
}

TEST_F(Bundles, CanBeJudgedAgainstEachOther) {
  write_bundle(folder_ / "whole", run(MeshShape(), nullptr, body(true), Keep::kEverything),
               kSettings);
  write_bundle(folder_ / "sharded", six_ranks(), kSettings);
  write_bundle(folder_ / "wrong", six_ranks(3), kSettings);

  const Verdict same = compare_bundles(folder_ / "whole", folder_ / "sharded", {});
  const Verdict assembled_reference = compare_bundles(folder_ / "sharded", folder_ / "sharded", {});
  const Verdict wrong = compare_bundles(folder_ / "whole", folder_ / "wrong", {});

  EXPECT_EQ(same.status, Status::kConforms) << same.reason;
  EXPECT_EQ(same.compared, 4);
  EXPECT_EQ(assembled_reference.status, Status::kConforms) << assembled_reference.reason;
  ASSERT_EQ(wrong.status, Status::kDiverges);
  EXPECT_EQ(wrong.findings.at(0).key.name, "w");
  EXPECT_THAT(wrong.findings[0].cause,
              IsCause(CauseId::kScaleOfFormula, {{"scale", 3}, {"formula", "tp"}}));
}

TEST_F(Bundles, HoldEachRecordInOneDtype) {
  const Trace mixed = run(
      kDp2Tp3, nullptr,
      [](Sink& sink, int rank) {
        const at::Tensor x =
            values({4, 6}, 1, at::kBFloat16).to(rank < 3 ? at::kBFloat16 : at::kFloat);
        (void)sink.on_activation(
            site(RecordKind::kActivation, "x",
                 layout_of({4, 6}, {shard(Axis::kDp, 0), shard(Axis::kTp, 1)})),
            x.narrow(0, rank / 3 * 2, 2).narrow(1, rank % 3 * 2, 2));
      },
      Keep::kEverything);
  const Trace whole = run(
      MeshShape(), nullptr,
      [](Sink& sink, int) {
        (void)sink.on_activation(site(RecordKind::kActivation, "x", layout_of({4, 6})),
                                 values({4, 6}, 1, at::kBFloat16));
      },
      Keep::kEverything);
  write_bundle(folder_ / "whole", whole, kWhole);
  write_bundle(folder_ / "mixed", mixed, kWhole);

  const Verdict verdict = compare_bundles(folder_ / "whole", folder_ / "mixed", {});

  ASSERT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  EXPECT_EQ(verdict.findings.at(0).key.name, "x");
  EXPECT_THAT(verdict.findings[0].ranks, testing::ElementsAre(3, 4, 5));
  EXPECT_THAT(
      [&] { (void)compare_bundles(folder_ / "mixed", folder_ / "mixed", {}); },
      ThrowsMessage<FileError>(AllOf(HasSubstr("dtype bf16"), HasSubstr("[4, 6] and fp32"))));
}

TEST_F(Bundles, UseTheReferencesResponses) {
  write_bundle(folder_ / "reference",
               reference(body(true), [](int i) { return body(true, 1 + 1e-3 * i); }), kSettings);
  write_bundle(folder_ / "near", six_ranks(1 + 2e-3), kSettings);
  write_bundle(folder_ / "far", six_ranks(1.5), kSettings);

  EXPECT_EQ(compare_bundles(folder_ / "reference", folder_ / "near", {}).status, Status::kConforms);
  EXPECT_EQ(compare_bundles(folder_ / "reference", folder_ / "far", {}).status, Status::kDiverges);
}

TEST_F(Bundles, WhoseSettingsDifferAreRefusedByNameUnlessAllowed) {
  const Reference r = reference(body(true), [](int i) { return body(true, 1 + 1e-3 * i); });
  write_bundle(folder_ / "reference", r,
               R"({"training": {"dtype": "bf16", "optimizer": {"kind": "sgd"}},
                   "judging": {"grad_scale": 2}})");
  write_bundle(folder_ / "same", six_ranks(),
               R"({"training": {"dtype": "bf16", "optimizer": {"kind": "sgd"}}})");
  write_bundle(folder_ / "other", six_ranks(),
               R"({"training": {"dtype": "bf16", "optimizer": {"kind": "adamw"}}})");
  write_bundle(folder_ / "silent", six_ranks());
  const BundleRules allowed{.different = DifferentSettings::kAllowed};

  EXPECT_EQ(compare_bundles(folder_ / "reference", folder_ / "same", {}).status, Status::kConforms);
  EXPECT_THAT([&] { (void)compare_bundles(folder_ / "reference", folder_ / "silent", {}); },
              RefusesBy<FileError>(RuleId::kSettingsMissing));
  EXPECT_THAT([&] { (void)compare_bundles(folder_ / "silent", folder_ / "same", {}); },
              RefusesBy<FileError>(RuleId::kSettingsMissing));
  EXPECT_THAT(
      [&] { (void)compare_bundles(folder_ / "reference", folder_ / "other", {}); },
      RefusesBy<UsageError>(
          RuleId::kSettingsDiffer,
          {{"settings", std::vector{R"(optimizer.kind: reference "sgd", actual "adamw")"}}}));
  for (const char* name : {"other", "silent"}) {
    const Verdict verdict = compare_bundles(folder_ / "reference", folder_ / name, {}, allowed);
    EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
    EXPECT_THAT(verdict.notes, testing::Contains(HasSubstr("--allow-different-settings"))) << name;
  }
}

TEST_F(Bundles, OfAnotherSchemaAreRefused) {
  write_bundle(folder_ / "b", six_ranks(), kSettings);
  bundle_edit::edit_json(folder_ / "b" / "manifest.json",
                         [](nlohmann::json& manifest) { manifest["schema"] = 1; });

  EXPECT_THAT([&] { (void)read_bundle(folder_ / "b"); },
              RefusesBy<FileError>(RuleId::kUnknownSchema));
}

TEST_F(Bundles, UseRecordsThatOnlySomeRanksOfTheReferenceHave) {
  const auto on_ranks = [&](double value) {
    return run(
        MeshShape({{Axis::kPp, 2}}), nullptr,
        [=](Sink& sink, int rank) {
          sink.on_record(site(RecordKind::kGrad, rank == 0 ? "first" : "second",
                              layout_of({3}, {only_at(Axis::kPp, rank)})),
                         at::full({3}, rank == 0 ? 2.0 : value));
        },
        Keep::kEverything);
  };
  write_bundle(folder_ / "right", on_ranks(3), kWhole);
  write_bundle(folder_ / "wrong", on_ranks(4), kWhole);

  expect_right_and_wrong(2, "second");
}

/// Two stages of a pipeline: ids on the first one, the loss on the last. `shared`: both ranks hold
/// a copy of the weight.
Trace stages(bool shared, double loss = 3) {
  return run(
      MeshShape({{Axis::kPp, 2}}), nullptr,
      [=](Sink& sink, int rank) {
        const std::vector<Placement> own = {only_at(Axis::kPp, rank)};
        const std::string name = rank == 0 ? "first" : "last";
        if (shared)
          sink.on_record(site(RecordKind::kParam, "shared", layout_of({3})), at::full({3}, 2.0));
        sink.on_record(site(RecordKind::kParam, name, layout_of({3}, own)), at::full({3}, 2.0));
        if (rank == 0)
          sink.on_record(site(RecordKind::kDataId, "ids", layout_of({4}, own)),
                         at::full({4}, 7, at::kLong));
        else
          sink.on_record(site(RecordKind::kScalar, "loss", layout_of({1}, own)),
                         at::full({1}, loss, at::kDouble));
      },
      Keep::kEverything);
}

TEST_F(Bundles, OfPipelinesMayHaveIdsAndLossesOnOneStage) {
  write_bundle(folder_ / "right", stages(false), kWhole);
  write_bundle(folder_ / "wrong", stages(false, 4), kWhole);
  write_bundle(folder_ / "shared", stages(true), kWhole);

  expect_right_and_wrong(4, "loss");
  EXPECT_THAT([&] { (void)compare_bundles(folder_ / "right", folder_ / "shared", {}); },
              RefusesBy<FileError>(RuleId::kRankHoldsNothing));
}

// The first and the last of three stages read one embedding.
TEST_F(Bundles, OfPipelinesMayDeclareATensorOnTwoStages) {
  const auto tied = [](double on_last) {
    return run(
        MeshShape({{Axis::kPp, 3}}), nullptr,
        [=](Sink& sink, int rank) {
          const std::string name = "layer" + std::to_string(rank);
          sink.on_record(site(RecordKind::kParam, name, layout_of({3}, {only_at(Axis::kPp, rank)})),
                         at::full({3}, 2.0));
          if (rank == 1) return;
          const std::vector<Placement> both = {only_at(Axis::kPp, std::vector<int>{0, 2})};
          sink.on_record(site(RecordKind::kParam, "tied", layout_of({3}, both)),
                         at::full({3}, rank == 0 ? 3.0 : on_last));
        },
        Keep::kEverything);
  };
  write_bundle(folder_ / "right", tied(3), kWhole);
  write_bundle(folder_ / "wrong", tied(4), kWhole);

  expect_right_and_wrong(4, "tied");
}

/// Two stages that read one embedding. `holders`: the ranks that record their copy of it; `places`:
/// what they say of where it is; `head`: the rank that computes the logits.
Trace tied_stages(const std::vector<int>& holders, const std::vector<Placement>& places, int head) {
  return run(
      MeshShape({{Axis::kPp, 2}}), nullptr,
      [=](Sink& sink, int rank) {
        const std::vector<Placement> own = {only_at(Axis::kPp, rank)};
        const auto record = [&](RecordKind kind, const std::string& name,
                                const std::vector<Placement>& placements) {
          sink.on_record(site(kind, name, layout_of({3}, placements)), at::full({3}, 2.0));
        };
        record(RecordKind::kParam, "layer" + std::to_string(rank), own);
        record(RecordKind::kActivation, rank == 0 ? "embed" : "layer", own);
        if (rank == head) record(RecordKind::kActivation, "lm_head", own);
        if (std::ranges::find(holders, rank) != holders.end())
          record(RecordKind::kParam, "embed.weight", places);
      },
      Keep::kEverything);
}

// Copies that are there need not be declared, as they were not in older bundles of two stages.
TEST_F(Bundles, OfPipelinesHaveATiedTensorWhereItIsRead) {
  const std::string settings =
      R"({"training": {"dtype": "bf16"}, "judging": {"num_names": {"embed.weight": 2}}})";
  const std::vector<Placement> first = {only_at(Axis::kPp, 0)};
  const std::vector<Placement> both = {only_at(Axis::kPp, std::vector<int>{0, 1})};
  write_bundle(folder_ / "undeclared", tied_stages({0, 1}, {}, 1), settings);
  write_bundle(folder_ / "declared", tied_stages({0, 1}, both, 1), settings);
  write_bundle(folder_ / "hidden", tied_stages({0}, first, 1), settings);
  write_bundle(folder_ / "one_stage", tied_stages({0}, first, 0), settings);
  const auto verdict = [&](const char* name) {
    return compare_bundles(folder_ / "declared", folder_ / name, {});
  };

  for (const char* const name : {"undeclared", "declared", "one_stage"})
    EXPECT_EQ(verdict(name).status, Status::kConforms) << name << ": " << verdict(name).reason;
  EXPECT_THAT([&] { (void)verdict("hidden"); },
              RefusesBy<FileError>(RuleId::kTiedCopyMissing, {{"stage", 1}}));
}

// All gradients are said to be on both stages, so that none looks like a copy over dp: the copy
// that a dp rank leaves out is missed all the same.
TEST_F(Bundles, MayNotHideACopyBehindTensorsOnTwoStages) {
  const Trace trace = run(
      MeshShape({{Axis::kPp, 2}, {Axis::kDp, 2}}), nullptr,
      [](Sink& sink, int rank) {
        const int stage = rank / 2;
        const std::vector<Placement> both = {only_at(Axis::kPp, std::vector<int>{0, 1})};
        const std::string own = "layer" + std::to_string(stage);
        sink.on_record(site(RecordKind::kParam, own, layout_of({4}, {only_at(Axis::kPp, stage)})),
                       at::full({4}, 2.0));
        for (const char* const name : {"layer0", "layer1"}) {
          Layout layout = layout_of({4}, both);
          const bool is_left_out = rank == 1 && std::string(name) == "layer0";
          layout.explicit_parts = is_left_out;
          sink.on_record(site(RecordKind::kGrad, name, layout),
                         is_left_out ? at::empty({0}) : at::full({4}, 3.0));
        }
      },
      Keep::kEverything);
  write_bundle(folder_ / "hidden", trace, kWhole);

  EXPECT_THAT([&] { (void)compare_bundles(folder_ / "hidden", folder_ / "hidden", {}); },
              RefusesBy<FileError>(RuleId::kRankHoldsNothing));
}

TEST_F(Bundles, OfPipelinesMayNotHaveAStageWithoutGradients) {
  for (const RecordKind kind : {RecordKind::kGrad, RecordKind::kActivation,
                                RecordKind::kActivationGrad, RecordKind::kOptimizer}) {
    const Trace trace = run(
        MeshShape({{Axis::kPp, 2}}), nullptr,
        [=](Sink& sink, int rank) {
          const std::vector<Placement> own = {only_at(Axis::kPp, rank)};
          const std::string name = rank == 0 ? "first" : "last";
          sink.on_record(site(RecordKind::kParam, name, layout_of({3}, own)), at::full({3}, 2.0));
          if (rank == 0) sink.on_record(site(kind, name, layout_of({3}, own)), at::full({3}, 2.0));
        },
        Keep::kEverything);
    write_bundle(folder_ / name_of(kind), trace, kWhole);

    EXPECT_THAT(
        [&] { (void)compare_bundles(folder_ / name_of(kind), folder_ / name_of(kind), {}); },
        RefusesBy<FileError>(RuleId::kRankHoldsNothing))
        << name_of(kind);
  }
}

TEST_F(Bundles, MayInferLayoutsAmongTheRanksOfAStage) {
  const auto infer = [](const nlohmann::json& placements) {
    return [=](int, nlohmann::json& description) {
      for (nlohmann::json& record : description["records"]) {
        record["layout"] = "infer";
        record["placements"] = placements.is_null() ? record["placements"] : placements;
        record.erase("global_shape");
      }
    };
  };
  write_bundle(folder_ / "right", stages(false), kWhole);
  write_bundle(folder_ / "inferred", stages(false), kWhole);
  write_bundle(folder_ / "cut", stages(false), kWhole);
  bundle_edit::edit_ranks(folder_ / "inferred", infer(nullptr));
  bundle_edit::edit_ranks(folder_ / "cut",
                          infer({{{"axis", "pp"}, {"kind", "shard"}, {"dim", 0}}}));
  for (const char* name : {"inferred", "cut"}) bundle_edit::seal(folder_ / name);

  const Verdict inferred = compare_bundles(folder_ / "right", folder_ / "inferred", {});

  EXPECT_EQ(inferred.status, Status::kConforms) << inferred.reason;
  EXPECT_EQ(inferred.compared, 4);
  EXPECT_THAT([&] { (void)compare_bundles(folder_ / "right", folder_ / "cut", {}); },
              RefusesBy<FileError>(RuleId::kFileForm));
}

/// A batch of four samples over dp 2, and its loss as a part of the mean.
Trace loss_on(int ranks, double factor = 1) {
  return run(
      MeshShape({{Axis::kDp, ranks}}), nullptr,
      [=](Sink& sink, int rank) {
        const at::Tensor x = values({4, 3}, 7);
        sink.on_record(site(RecordKind::kActivation, "x", layout_of({4, 3}, {shard(Axis::kDp, 0)})),
                       x.narrow(0, rank * 4 / ranks, 4 / ranks));
        const double loss = ranks == 1 ? 3.0 : rank == 0 ? 1.0 : 2.0 * factor;
        sink.on_record(site(RecordKind::kScalar, "loss",
                            ranks == 1 ? layout_of({1}) : layout_of({1}, {partial(Axis::kDp)})),
                       at::full({1}, loss, at::kDouble));
      },
      Keep::kEverything);
}

TEST_F(Bundles, MayHaveALossThatIsAPartWhereThatIsAllowed) {
  write_bundle(folder_ / "whole", loss_on(1), kWhole);
  write_bundle(folder_ / "parts", loss_on(2), kWhole);
  write_bundle(folder_ / "wrong", loss_on(2, 1.5), kWhole);
  const BundleRules allowed{.partial = {"scalar/loss"}};

  EXPECT_EQ(compare_bundles(folder_ / "whole", folder_ / "parts", {}).status, Status::kDiverges);
  EXPECT_EQ(compare_bundles(folder_ / "whole", folder_ / "parts", {}, allowed).status,
            Status::kConforms);
  EXPECT_EQ(compare_bundles(folder_ / "whole", folder_ / "wrong", {}, allowed).status,
            Status::kDiverges);
}

TEST_F(Bundles, WithAMaximumOverRanksAreTakenWhereTheTrustedSideSaysSo) {
  const at::Tensor value = values({4}, 5);
  const auto largest_of = [&](const Layout& layout, double of_rank_1) {
    return run(
        layout.placements.empty() ? MeshShape() : MeshShape({{Axis::kTp, 2}}), nullptr,
        [=](Sink& sink, int rank) {
          sink.on_record(site(RecordKind::kActivation, "max", layout),
                         rank == 0 ? value : value + of_rank_1);
        },
        Keep::kEverything);
  };
  const Layout maximum = layout_of({4}, {partial(Axis::kTp, Reduction::kMax)});
  write_bundle(folder_ / "whole", largest_of(layout_of({4}), 0), kWhole);
  write_bundle(folder_ / "right", largest_of(maximum, -1), kWhole);
  write_bundle(folder_ / "wrong", largest_of(maximum, 1), kWhole);
  const BundleRules sums{.partial = {"activation/*"}}, allowed{.partial = {"activation/max=max"}};
  const auto status = [&](const char* name, const BundleRules& rules) {
    return compare_bundles(folder_ / "whole", folder_ / name, {}, rules).status;
  };

  EXPECT_EQ(status("right", allowed), Status::kConforms);
  EXPECT_EQ(status("wrong", allowed), Status::kDiverges);
  EXPECT_EQ(status("right", sums), Status::kDiverges) << "a maximum hides copies";
}

/// A square weight, cut over one of two axes, whose bundle does not say which.
Trace square(Axis cut, double factor = 1, double offset = 0) {
  const MeshShape mesh({{Axis::kDpShard, 2}, {Axis::kTp, 2}});
  return run(
      mesh, nullptr,
      [=](Sink& sink, int rank) {
        const int part = mesh.coordinate(rank, cut);
        sink.on_record(site(RecordKind::kParam, "w", layout_of({4, 4}, {shard(cut, 0)})),
                       (values({4, 4}, 5) * factor + offset).narrow(0, 2 * part, 2));
      },
      Keep::kEverything);
}

/// Makes all records of a bundle leave their layout to the judge.
void leave_layouts_open(const std::filesystem::path& bundle) {
  bundle_edit::edit_records(bundle, [](int, const std::string&, nlohmann::json& record) {
    for (const char* field : {"global_shape", "placements", "boxes", "flat"}) record.erase(field);
    record["layout"] = "infer";
  });
  bundle_edit::seal(bundle);
}

TEST_F(Bundles, WithCopiedHeadsAreInferredByNeighboursOrByTurns) {
  const MeshShape mesh({{Axis::kTp, 4}});
  const at::Tensor heads = values({6, 3}, 7);    // two heads of three rows
  const at::Tensor queries = values({4, 3}, 8);  // one row for each rank
  const auto held = [&](const std::vector<int>& part_of_rank, double factor_on_rank_2) {
    return run(
        mesh, nullptr,
        [=](Sink& sink, int rank) {
          const int part = part_of_rank[static_cast<std::size_t>(rank)];
          Layout layout = layout_of({6, 3});
          layout.explicit_parts = true;
          layout.boxes = {{{0, 0}, {3 * part, 0}, {3, 3}}};
          sink.on_record(site(RecordKind::kParam, "k", layout),
                         heads.narrow(0, 3 * part, 3) * (rank == 2 ? factor_on_rank_2 : 1));
          sink.on_record(site(RecordKind::kParam, "q", layout_of({4, 3}, {shard(Axis::kTp, 0)})),
                         queries.narrow(0, rank, 1));
        },
        Keep::kEverything);
  };
  write_bundle(folder_ / "whole",
               run(
                   MeshShape(), nullptr,
                   [=](Sink& sink, int) {
                     sink.on_record(site(RecordKind::kParam, "k", layout_of({6, 3})), heads);
                     sink.on_record(site(RecordKind::kParam, "q", layout_of({4, 3})), queries);
                   },
                   Keep::kEverything),
               kWhole);
  for (const std::vector<int>& parts : {std::vector{0, 0, 1, 1}, std::vector{0, 1, 0, 1}}) {
    write_bundle(folder_ / "right", held(parts, 1), kWhole);
    write_bundle(folder_ / "wrong", held(parts, 1.01), kWhole);
    leave_layouts_open(folder_ / "right");
    leave_layouts_open(folder_ / "wrong");

    EXPECT_EQ(compare_bundles(folder_ / "whole", folder_ / "right", {}).status, Status::kConforms);
    const Verdict wrong = compare_bundles(folder_ / "whole", folder_ / "wrong", {});
    EXPECT_EQ(wrong.status, Status::kDiverges) << wrong.reason;
    EXPECT_THAT(wrong.findings.at(0).ranks, testing::ElementsAre(2));
  }
  write_bundle(folder_ / "other", held({0, 0, 0, 1}, 1), kWhole);
  leave_layouts_open(folder_ / "other");
  EXPECT_THAT([&] { (void)compare_bundles(folder_ / "whole", folder_ / "other", {}); },
              RefusesBy<FileError>(RuleId::kLayoutNotInferable));
}

TEST_F(Bundles, WithAnInferredLayoutTakeTheReadingThatFitsOrAreRefused) {
  const auto whole = [&](bool is_zero) {
    return run(
        MeshShape(), nullptr,
        [=](Sink& sink, int) {
          sink.on_record(site(RecordKind::kParam, "w", layout_of({4, 4})),
                         is_zero ? at::zeros({4, 4}) : values({4, 4}, 5));
        },
        Keep::kEverything);
  };
  write_bundle(folder_ / "whole", whole(false), kWhole);
  write_bundle(folder_ / "zero", whole(true), kWhole);
  for (const Axis axis : {Axis::kDpShard, Axis::kTp}) {
    write_bundle(folder_ / "open", square(axis), kWhole);
    leave_layouts_open(folder_ / "open");
    const Verdict verdict = compare_bundles(folder_ / "whole", folder_ / "open", {});
    EXPECT_TRUE(verdict.findings.empty()) << name_of(axis) << verdict.reason;
    const auto found = std::ranges::find(verdict.witnesses, axis, &AxisWitness::axis);
    ASSERT_NE(found, verdict.witnesses.end());
    // shards of parameters say nothing of the samples of dp_shard
    EXPECT_EQ(found->tensor, axis == Axis::kTp ? "weight as read w (step 0)" : "");
    EXPECT_EQ(found->is_demanded, axis == Axis::kTp);
  }
  write_bundle(folder_ / "wrong", square(Axis::kTp, 1.01), kWhole);
  leave_layouts_open(folder_ / "wrong");
  write_bundle(folder_ / "nothing", square(Axis::kTp, 0, 1), kWhole);
  leave_layouts_open(folder_ / "nothing");

  EXPECT_EQ(compare_bundles(folder_ / "whole", folder_ / "wrong", {}).status, Status::kDiverges);
  EXPECT_THAT([&] { (void)compare_bundles(folder_ / "zero", folder_ / "nothing", {}); },
              RefusesBy<FileError>(RuleId::kLayoutNotInferable));
}

}  // namespace
}  // namespace isoshard
