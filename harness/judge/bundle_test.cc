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
#include "harness/testing/synthetic.h"
#include "harness/verdict/verdict.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using namespace synthetic;
using testing::HasSubstr;
using testing::ThrowsMessage;

class BundleTest : public testing::Test {
 protected:
  BundleTest() : folder_(fs::temp_directory_path() / fmt::format("isoshard-bundle-{}", getpid())) {
    fs::create_directories(folder_);
  }
  ~BundleTest() override { fs::remove_all(folder_); }
  fs::path folder_;
};
using Bundles = BundleTest;

const MeshShape kMesh({{Axis::kDp, 2}, {Axis::kTp, 3}});

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
  return run(kMesh, nullptr, body(false, factor), Keep::kEverything);
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
                ThrowsMessage<InfrastructureError>(HasSubstr("rank00004")))
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
              ThrowsMessage<FileError>(HasSubstr("another run")));
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
  write_bundle(folder_ / "whole", run(MeshShape(), nullptr, body(true), Keep::kEverything));
  write_bundle(folder_ / "sharded", six_ranks());
  write_bundle(folder_ / "wrong", six_ranks(3));

  const Verdict same = compare_bundles(folder_ / "whole", folder_ / "sharded", {});
  const Verdict assembled_reference = compare_bundles(folder_ / "sharded", folder_ / "sharded", {});
  const Verdict wrong = compare_bundles(folder_ / "whole", folder_ / "wrong", {});

  EXPECT_EQ(same.status, Status::kConforms) << same.reason;
  EXPECT_EQ(same.compared, 4);
  EXPECT_EQ(assembled_reference.status, Status::kConforms) << assembled_reference.reason;
  ASSERT_EQ(wrong.status, Status::kDiverges);
  EXPECT_EQ(wrong.findings.at(0).key.name, "w");
  EXPECT_THAT(wrong.findings[0].diagnosis, HasSubstr("scale 3 = tp"));
}

TEST_F(Bundles, UseTheReferencesResponses) {
  write_bundle(folder_ / "reference",
               reference(body(true), [](int i) { return body(true, 1 + 1e-3 * i); }));
  write_bundle(folder_ / "near", six_ranks(1 + 2e-3));
  write_bundle(folder_ / "far", six_ranks(1.5));

  EXPECT_EQ(compare_bundles(folder_ / "reference", folder_ / "near", {}).status, Status::kConforms);
  EXPECT_EQ(compare_bundles(folder_ / "reference", folder_ / "far", {}).status, Status::kDiverges);
}

TEST_F(Bundles, WhoseSettingsDifferAreRefusedByNameUnlessAllowed) {
  const Reference r = reference(body(true), [](int i) { return body(true, 1 + 1e-3 * i); });
  write_bundle(folder_ / "reference", r,
               R"({"training": {"dtype": "bf16", "optimizer": {"kind": "sgd"}}})");
  write_bundle(folder_ / "same", six_ranks(),
               R"({"training": {"dtype": "bf16", "optimizer": {"kind": "sgd"}}})");
  write_bundle(folder_ / "other", six_ranks(),
               R"({"training": {"dtype": "bf16", "optimizer": {"kind": "adamw"}}})");
  write_bundle(folder_ / "silent", six_ranks());

  EXPECT_EQ(compare_bundles(folder_ / "reference", folder_ / "same", {}).status, Status::kConforms);
  EXPECT_EQ(compare_bundles(folder_ / "reference", folder_ / "silent", {}).status,
            Status::kConforms);
  EXPECT_THAT(
      [&] { (void)compare_bundles(folder_ / "reference", folder_ / "other", {}); },
      ThrowsMessage<UsageError>(HasSubstr(R"(optimizer.kind: reference "sgd", actual "adamw")")));
  EXPECT_EQ(
      compare_bundles(folder_ / "reference", folder_ / "other", {}, DifferentSettings::kAllowed)
          .status,
      Status::kConforms);
}

}  // namespace
}  // namespace isoshard
