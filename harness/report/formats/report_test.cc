// SPDX-License-Identifier: Apache-2.0
/// Claims about what a report shows.
#include "harness/report/text/verdict_text.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "harness/judge/judge.h"
#include "harness/report/json/verdict_json.h"
#include "harness/testing/is_cause.h"
#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;
using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;

/// A run on dp 2 whose gradient is scaled by `factor`.
Verdict verdict_of(double factor) {
  const auto body = [](bool whole, double f) {
    return Body([=](Sink& sink, int rank) {
      const at::Tensor losses = at::tensor({5.5, 5.25}, at::kDouble);
      const at::Tensor x = values({4, 6}, 2);
      sink.on_record(site(RecordKind::kDataId, "sample_ids", layout_of({2}, {shard(Axis::kDp, 0)})),
                     at::arange(2, at::kLong).narrow(0, whole ? 0 : rank, whole ? 2 : 1));
      (void)sink.on_activation(
          site(RecordKind::kActivation, "model.layers.0.mlp", layout_of({4, 6})), x);
      (void)sink.on_activation(
          site(RecordKind::kActivation, "model.layers.0.mlp.down_proj", layout_of({4, 6})), x);
      sink.on_record(
          site(RecordKind::kScalar, "loss_per_dp_rank", layout_of({2}, {shard(Axis::kDp, 0)})),
          whole ? losses : losses.narrow(0, rank, 1));
      sink.on_record(site(RecordKind::kGrad, "w", layout_of({4, 6})), x * f);
      sink.on_record(site(RecordKind::kScalar, "grad_norm", layout_of({1})), at::full({1}, 1.25));
    });
  };
  const Reference r = reference(body(true, 1));
  JudgePolicy options;
  options.rtol = 1e-6;
  return judge(r, run(MeshShape({{Axis::kDp, 2}}), &r, body(false, factor)), options);
}

TEST(Report, ShowsLossesNormsGradientsAndOneVerdictLineLast) {
  const std::string text = render(verdict_of(1));

  EXPECT_THAT(
      text,
      AllOf(HasSubstr("case  synthetic  (dp 2)"),
            HasSubstr("data ids              1 tensors, all equal"),
            HasSubstr("loss_per_dp_rank[0]   reference 5.5, actual 5.5 (rel. 0.00e+00)"),
            HasSubstr("loss_per_dp_rank[1]   reference 5.25"), HasSubstr("model.layers.0.mlp "),
            HasSubstr("gradients             1 tensors, all equal"),
            HasSubstr("grad_norm             reference 1.25")));
  EXPECT_THAT(text, Not(HasSubstr("down_proj")))
      << "tensors inside a module are shown on request, or when they are wrong";
  EXPECT_THAT(
      text, EndsWith("CONFORMS (within tolerance)  synthetic case (dp 2): 6 tensors compared, the "
                     "largest error is 0 of what is allowed\n"));
  EXPECT_THAT(text, Not(HasSubstr("\033")));
}

// But for sentences: the verdict line, findings and what explains them.
TEST(Report, FitsEightyColumns) {
  Verdict verdict = verdict_of(2);
  verdict.would_miss =
      std::string(30, 'a') + " " + std::string(30, 'b') + " " + std::string(9, 'c');
  for (TensorComparison& tensor : verdict.tensors)
    if (tensor.key.name == "w") tensor.key.name = "model.layers.11.post_attention_layernorm.weight";

  const std::string text = render(verdict, {.all_tensors = true});

  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("DIVERGES") || line.find("first: ") != line.npos ||
        line.ends_with("(confirmed by the controller)"))
      continue;
    EXPECT_LE(line.size(), 80U) << line;
  }
  EXPECT_THAT(text, HasSubstr("  would miss            " + std::string(30, 'a') + "\n" +
                              std::string(24, ' ') + std::string(30, 'b') + " ccccccccc\n"));
  EXPECT_THAT(text,
              HasSubstr("    model.layers.11.post_attention_layernorm.weight  <-- not within\n"))
      << "a long name has a line of its own, with its mark";
}

TEST(Report, SaysInAFewWordsHowStrongAVerdictIsAndWhereItIsWeakest) {
  Verdict verdict = verdict_of(1);
  EXPECT_EQ(short_verdict_line(verdict),
            "CONFORMS (within tolerance)  synthetic case (dp 2): 6 tensors; weakest: misses scale "
            "errors below 0.0001 % in w");
  verdict.judged.of_steps = 0.25;
  EXPECT_THAT(short_verdict_line(verdict),
              EndsWith("; weakest: 25 % of the parameters' elements after the step were judged"));
  verdict.strength = Strength::kExact;
  EXPECT_EQ(short_verdict_line(verdict), "CONFORMS (exact)  synthetic case (dp 2): 6 tensors");
  EXPECT_EQ(short_verdict_line(verdict_of(2)), "DIVERGES  synthetic case (dp 2)");
}

TEST(Report, ShowsTheFindingWithItsCause) {
  const Verdict verdict = verdict_of(2);
  const Finding& first = verdict.findings.at(0);
  ASSERT_THAT(first.cause, IsCause(CauseId::kScaleOfFormula, {{"scale", 2.0}, {"formula", "dp"}}));

  EXPECT_THAT(
      render(verdict),
      AllOf(HasSubstr("<-- not within"), HasSubstr("first: " + first.what + "; ranks 0, 1"),
            HasSubstr("likely cause: " + first.diagnosis),
            HasSubstr("(confirmed by the controller)"), HasSubstr("\nDIVERGES  synthetic case")));
}

TEST(Report, HasTwoWordsForTwoStrengths) {
  const Verdict within = verdict_of(1);
  Verdict equal = within;
  equal.strength = Strength::kExact;
  const Verdict as_declared = verdict_through_record(within, 6);

  EXPECT_EQ(words_of_verdict(within), "CONFORMS (within tolerance)");
  EXPECT_EQ(words_of_verdict(equal), "CONFORMS (exact: equal to its reference bit by bit)");
  EXPECT_EQ(words_of_verdict(as_declared),
            "CONFORMS (exact: equal to its declared arithmetic, which is within bounds)");
  EXPECT_EQ(words_of_verdict(verdict_of(2)), "DIVERGES");
  EXPECT_EQ(words_of_verdict(verdict_through_record(verdict_of(2), 6)), "DIVERGES");
  EXPECT_EQ(verdict_json(within)["strength"], "within tolerance");
  EXPECT_EQ(verdict_json(as_declared)["strength"], "exact");
  EXPECT_TRUE(verdict_json(verdict_of(2))["strength"].is_null());
}

TEST(Report, NamesACopyAsACopyAndHowOftenItRan) {
  Verdict verdict = verdict_of(1);
  EXPECT_THAT(render(verdict), Not(HasSubstr("copy of")));
  EXPECT_TRUE(verdict_json(verdict)["copy_of"].is_null());
  verdict.copy_of = "DeepSpeed AutoTP";
  verdict.runs = 3;

  EXPECT_THAT(render(verdict),
              AllOf(HasSubstr("case  synthetic, copy of DeepSpeed AutoTP  (dp 2)"),
                    HasSubstr("repeated              3 runs, all equal bit by bit")));
  EXPECT_EQ(verdict_json(verdict)["copy_of"], "DeepSpeed AutoTP");
  EXPECT_EQ(verdict_json(verdict)["runs"], 3);
}

TEST(Report, ShowsEveryTensorAndColorOnRequest) {
  const std::string text = render(verdict_of(1), {.color = true, .all_tensors = true});

  EXPECT_THAT(text, AllOf(HasSubstr("down_proj"), HasSubstr("\033[1;32mCONFORMS")));
}

TEST(Report, ShowsSensitivitiesInsensitiveTensorsAndPublishedBounds) {
  const auto body = [](double factor) {
    return Body([=](Sink& sink, int) {
      (void)sink.on_activation(site(RecordKind::kActivation, "model.layers.0", layout_of({4, 6})),
                               values({4, 6}, 2) * (1 + 1e-6 * factor));
      sink.on_record(site(RecordKind::kGrad, "key.bias", layout_of({8})),
                     values({8}, 90 + static_cast<int>(factor)) * 1e-9);
    });
  };
  const Reference r = reference(body(0), [&](int i) { return body(i + 1); });

  const Verdict verdict = judge(r, run(MeshShape(), &r, body(1)), {});
  const std::string text = render(verdict);
  const nlohmann::json report = verdict_json(verdict);

  EXPECT_THAT(text, AllOf(HasSubstr("sensitivity           a scale error of "),
                          HasSubstr("rejected everywhere (weakest:\n" + std::string(24, ' ') +
                                    "forward at model.layers.0"),
                          HasSubstr("a rolled copy in 1\n" + std::string(24, ' ') + "of 1"),
                          HasSubstr("insensitive           1 tensors, judged by absolute error"),
                          HasSubstr("gradient of key.bias"),
                          HasSubstr("published bound       layer outputs, max abs: ")));
  EXPECT_EQ(report["published_bounds"][0]["limit"], 1e-3);
  EXPECT_EQ(report["published_bounds"][0]["holds"], true);
  EXPECT_EQ(report["tensors"][0]["rolled_copy"], "rejected");
  EXPECT_GT(report["tensors"][0]["rolled_error"], 0.5);
  EXPECT_EQ(report["tensors"][1]["insensitive"], true);
}

TEST(Report, NamesWhatShowsTooLittle) {
  Verdict verdict = verdict_of(1);
  verdict.tensors[2].level = Level::kPerturbed;
  verdict.tensors[2].weakness = "a rolled copy would pass";

  EXPECT_THAT(render(verdict), HasSubstr("a rolled copy would pass"));
}

TEST(Report, CountsWhatSkippedStepsLeaveOut) {
  Verdict verdict = verdict_of(1);
  EXPECT_THAT(render(verdict), Not(HasSubstr("not compared")));
  EXPECT_EQ(verdict_json(verdict)["skipped"], 0);

  verdict.skipped = 61;

  EXPECT_THAT(render(verdict), HasSubstr("  not compared          61 tensors of steps whose"));
  EXPECT_EQ(verdict_json(verdict)["skipped"], 61);
}

TEST(Report, ListsEveryMissingTensor) {
  Verdict verdict = verdict_of(1);
  verdict.missing = {"gradient of a", "gradient of b"};

  EXPECT_THAT(render(verdict), AllOf(HasSubstr("missing (2)"), HasSubstr("gradient of a\n"),
                                     HasSubstr("gradient of b\n")));
}

TEST(ReportJson, HoldsStatusTensorsAndFindings) {
  const nlohmann::json report = verdict_json(verdict_of(2));

  EXPECT_EQ(report["schema"], 2);
  EXPECT_EQ(report["status"], "diverges");
  EXPECT_EQ(report["mesh"][0]["axis"], "dp");
  EXPECT_EQ(report["tensors"].size(), 6U);
  EXPECT_EQ(report["tensors"][3]["reference_values"], nlohmann::json({5.5, 5.25}));
  EXPECT_EQ(report["findings"][0]["ranks"], nlohmann::json({0, 1}));
  EXPECT_EQ(report["findings"][0]["stage"], "parameter gradient");
}

TEST(ReportJson, NumbersThatJsonLacksAreStrings) {
  Verdict verdict = verdict_of(1);
  verdict.tensors[0].stats.max_abs = NAN;
  verdict.tensors[1].stats.max_abs = INFINITY;

  const nlohmann::json report = verdict_json(verdict);

  EXPECT_EQ(report["tensors"][0]["max_abs"], "nan");
  EXPECT_EQ(report["tensors"][1]["max_abs"], "inf");
  EXPECT_NO_THROW((void)report.dump());
}

}  // namespace
}  // namespace isoshard
