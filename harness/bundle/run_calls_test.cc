// SPDX-License-Identifier: Apache-2.0
#include "harness/bundle/run_calls.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/base/error.h"

namespace isoshard {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

/// Rank 1 calls twice in step 3; whatever else is asked for calls once along dp, and nobody
/// elsewhere.
std::vector<ExpectedCall> calls_at(int rank, int step, Axis axis) {
  if (axis != Axis::kDp) return {};
  ExpectedCall call;
  call.call.op = CollectiveOp::kAllGather;
  call.call.purpose = Purpose::kParamGather;
  call.call.axis = axis;
  call.call.dtype = Dtype::kBFloat16;
  call.call.count = 100;
  call.only_if_stepped = true;
  std::vector<ExpectedCall> calls{call};
  if (rank == 1 && step == 3) {
    call.call.op = CollectiveOp::kAllReduce;
    call.call.reduction = Reduction::kAvg;
    call.only_if_stepped = false;
    call.may_be_split = true;
    calls.push_back(call);
  }
  return calls;
}

json written() {
  return json::array(
      {calls_json("mine", MeshShape({{Axis::kDp, 2}, {Axis::kTp, 1}}), 2, 4, calls_at)});
}

TEST(RunCalls, AreReadAsTheyWereWritten) {
  const std::vector<RunCalls> read = run_calls_of(written(), "manifest.json");

  ASSERT_EQ(read.size(), 1U);
  EXPECT_EQ(read[0].subject, "mine");
  EXPECT_EQ(read[0].mesh, MeshShape({{Axis::kDp, 2}, {Axis::kTp, 1}}));
  const CollectiveTable table = table_of(read[0]);
  for (int rank = 0; rank < 2; ++rank) {
    for (int step = 2; step < 4; ++step) {
      const std::vector<ExpectedCall> wanted = calls_at(rank, step, Axis::kDp),
                                      got = table(rank, step, Axis::kDp);
      ASSERT_EQ(got.size(), wanted.size()) << "rank " << rank << ", step " << step;
      for (std::size_t i = 0; i < got.size(); ++i) {
        EXPECT_EQ(describe(got[i].call), describe(wanted[i].call));
        EXPECT_EQ(got[i].only_if_stepped, wanted[i].only_if_stepped);
        EXPECT_EQ(got[i].may_be_split, wanted[i].may_be_split);
        EXPECT_EQ(got[i].any_order, wanted[i].any_order);
      }
      EXPECT_TRUE(table(rank, step, Axis::kTp).empty());
    }
  }
  EXPECT_TRUE(table(0, 1, Axis::kDp).empty()) << "before the first step";
}

TEST(RunCalls, AreWrittenOnceWhereTheyAreEqual) {
  EXPECT_EQ(written()[0]["calls"].size(), 2U);
}

TEST(RunCalls, OfWrongFormAreRefused) {
  const auto message = [](const std::function<void(json&)>& edit) -> std::string {
    json list = written();
    edit(list);
    try {
      (void)run_calls_of(list, "manifest.json");
    } catch (const FileError& error) {
      return error.what();
    }
    return "";
  };

  EXPECT_THAT(message([](json& l) { l = json::object(); }), HasSubstr("must be a list"));
  EXPECT_THAT(message([](json& l) { l[0].erase("mesh"); }), HasSubstr("mesh"));
  EXPECT_THAT(message([](json& l) { l[0]["calls"][0]["axis"] = "up"; }), HasSubstr("up"));
  EXPECT_THAT(message([](json& l) { l[0]["calls"][0]["rows"][0].push_back(1); }),
              HasSubstr("must have 9 numbers, got 10"));
  EXPECT_THAT(message([](json& l) { l[0]["calls"][0]["rows"][0][1] = 1000; }),
              HasSubstr("numbers of enumerators, got 1000"));
}

}  // namespace
}  // namespace isoshard
