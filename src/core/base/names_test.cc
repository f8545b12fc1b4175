// SPDX-License-Identifier: Apache-2.0
// Names, their parsing and the suggestions for mistyped ones.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/base/axis.h"
#include "core/base/dtype.h"
#include "core/base/error.h"
#include "core/base/param_class.h"
#include "core/base/suggest.h"

namespace isoshard {
namespace {

using ::testing::HasSubstr;

const std::vector<Dtype> kAllDtypes{
    Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16, Dtype::kInt64,
    Dtype::kInt32,   Dtype::kInt16,   Dtype::kInt8,     Dtype::kUint8,   Dtype::kBool};

template <class Function>
std::string usage_error_of(Function&& function) {
  try {
    function();
  } catch (const UsageError& error) {
    return error.what();
  }
  ADD_FAILURE() << "no UsageError";
  return "";
}

TEST(DtypeNames, EveryNameParsesBackToItsDtype) {
  for (const Dtype dtype : kAllDtypes)
    EXPECT_EQ(parse_dtype(name_of(dtype)), dtype) << name_of(dtype);
}

TEST(DtypeNames, TorchAndHuggingFaceSpellingsAreAccepted) {
  EXPECT_EQ(parse_dtype("float32"), Dtype::kFloat32);
  EXPECT_EQ(parse_dtype("torch.float32"), Dtype::kFloat32);
  EXPECT_EQ(parse_dtype("torch.bfloat16"), Dtype::kBFloat16);
  EXPECT_EQ(parse_dtype("half"), Dtype::kFloat16);
  EXPECT_EQ(parse_dtype("double"), Dtype::kFloat64);
  EXPECT_EQ(parse_dtype("torch.long"), Dtype::kInt64);
}

TEST(DtypeNames, UnknownNameListsTheNamesAndSuggests) {
  const std::string message = usage_error_of([] { (void)parse_dtype("pf32"); });

  EXPECT_THAT(message, HasSubstr("'pf32'"));
  EXPECT_THAT(message, HasSubstr("did you mean 'fp32'?"));
  EXPECT_THAT(message, HasSubstr("fp64, fp32, bf16"));
}

TEST(DtypeProperties, SizesRoundoffsAndFileNames) {
  EXPECT_EQ(size_of(Dtype::kFloat64), 8U);
  EXPECT_EQ(size_of(Dtype::kBFloat16), 2U);
  EXPECT_EQ(size_of(Dtype::kInt16), 2U);
  EXPECT_EQ(size_of(Dtype::kBool), 1U);
  EXPECT_EQ(unit_roundoff(Dtype::kFloat64), 0x1p-53);
  EXPECT_EQ(unit_roundoff(Dtype::kFloat32), 0x1p-24);
  EXPECT_EQ(unit_roundoff(Dtype::kBFloat16), 0x1p-8);
  EXPECT_EQ(unit_roundoff(Dtype::kFloat16), 0x1p-11);
  EXPECT_EQ(unit_roundoff(Dtype::kInt32), 0.0);
  EXPECT_EQ(safetensors_name_of(Dtype::kBFloat16), "BF16");
  EXPECT_EQ(safetensors_name_of(Dtype::kUint8), "U8");
  EXPECT_EQ(safetensors_name_of(Dtype::kBool), "BOOL");
  for (const Dtype dtype : kAllDtypes)
    EXPECT_EQ(is_floating(dtype), dtype <= Dtype::kFloat16) << name_of(dtype);
}

TEST(DtypeNames, AndAxesArePrintedByGoogleTest) {
  EXPECT_EQ(::testing::PrintToString(Dtype::kBFloat16), "bf16");
  EXPECT_EQ(::testing::PrintToString(std::vector{Dtype::kFloat32, Dtype::kInt64}),
            "{ fp32, int64 }");
  EXPECT_EQ(::testing::PrintToString(Axis::kDpShard), "dp_shard");
}

TEST(AxisNames, ParseBackAndRefuseOthers) {
  for (const Axis axis : {Axis::kWorld, Axis::kDp, Axis::kTp, Axis::kPp, Axis::kCp, Axis::kEp,
                          Axis::kDpReplicate, Axis::kDpShard})
    EXPECT_EQ(parse_axis(name_of(axis)), axis);

  EXPECT_THAT(usage_error_of([] { (void)parse_axis("wrold"); }),
              HasSubstr("did you mean 'world'?"));
  EXPECT_THAT(usage_error_of([] { (void)parse_axis(""); }),
              HasSubstr("world, dp, tp, pp, cp, ep, dp_replicate, dp_shard"));
}

TEST(ParamClassNames, AreTheDocumentedOnes) {
  EXPECT_EQ(name_of(ParamClass::kOther), "other");
  EXPECT_EQ(name_of(ParamClass::kRowBias), "row_bias");
  EXPECT_EQ(name_of(ParamClass::kKvReplica), "kv_replica");
  EXPECT_EQ(name_of(ParamClass::kTied), "tied");
}

TEST(DidYouMean, CountsInsertionsDeletionsAndSubstitutions) {
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3U);
  EXPECT_EQ(edit_distance("", "abc"), 3U);
  EXPECT_EQ(edit_distance("same", "same"), 0U);
}

TEST(DidYouMean, FindsTheNearestName) {
  const std::vector<std::string> known{"mlp_input_grad_partial", "dp_sum_missing",
                                       "embed_out_split_without_sp"};

  EXPECT_EQ(did_you_mean("dp_sum_mising", known), " (did you mean 'dp_sum_missing'?)");
  EXPECT_EQ(did_you_mean("DP-SUM-MISSING", known), " (did you mean 'dp_sum_missing'?)");
  EXPECT_EQ(did_you_mean("embed_out", known), " (did you mean 'embed_out_split_without_sp'?)");
}

TEST(DidYouMean, ComparesANameWithoutAFolderWithTheLastPartOfTheOthers) {
  const std::vector<std::string> known{"tiny", "Qwen/Qwen2.5-0.5B"};

  EXPECT_EQ(did_you_mean("qwen2.5-0.6b", known), " (did you mean 'Qwen/Qwen2.5-0.5B'?)");
  EXPECT_EQ(did_you_mean("Qwne/Qwen2.5-0.5B", known), " (did you mean 'Qwen/Qwen2.5-0.5B'?)");
}

TEST(DidYouMean, IsSilentWhenNothingIsNear) {
  const std::vector<std::string> known{"ddp", "autotp"};

  EXPECT_EQ(did_you_mean("xyzzy", known), "");
  EXPECT_EQ(did_you_mean("", known), "");
  EXPECT_EQ(did_you_mean("q", known), "");
  EXPECT_EQ(did_you_mean(std::string(100000, 'a'), known), "");
  EXPECT_EQ(did_you_mean("ddp", {}), "");
}

}  // namespace
}  // namespace isoshard
