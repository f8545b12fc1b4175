// SPDX-License-Identifier: Apache-2.0
// Journals of collectives: right runs raise nothing, and a rank or a step that calls something else
// is named with the call.
#include "harness/judge/journals/judge_journals.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "core/base/error.h"
#include "harness/judge/journals/align_calls.h"
#include "harness/testing/said_matchers.h"
#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr int kSteps = 3;

JournaledCall call(std::string op, std::int64_t bytes, std::string of = "",
                   std::string phase = "backward") {
  JournaledCall result;
  const bool reduces = op == "all_reduce" || op == "reduce_scatter";
  result.op = std::move(op);
  result.group = "0";
  result.reduction = reduces ? "sum" : "";
  result.dtype = "fp32";
  result.bytes = bytes;
  result.phase = std::move(phase);
  result.at = "train.py:31";
  result.of = std::move(of);
  return result;
}

/// Two ranks, three steps of five reductions: three of them alike.
Bundle clean() {
  Bundle bundle;
  bundle.trace.mesh = MeshShape({{Axis::kDp, 2}});
  for (int step = 0; step < kSteps; ++step) {
    for (int rank = 0; rank < 2; ++rank) {
      CallJournal& journal = bundle.journals[{step, rank}];
      journal.groups["0"] = {0, 1};
      journal.calls = {call("all_gather", 100 + rank, "", "forward"),
                       call("all_reduce", 4096, "gradient of a"),
                       call("all_reduce", 4096, "gradient of b"),
                       call("all_reduce", 4096, "gradient of c"),
                       call("all_reduce", 80000),
                       call("all_reduce", 4, "", "update")};
    }
  }
  return bundle;
}

/// The rows of inputs in each step.
Reference reads(std::vector<std::int64_t> rows) {
  return reference([rows](Sink& sink, int) {
    for (std::size_t step = 0; step < rows.size(); ++step) {
      if (step > 0) sink.begin_step(static_cast<int>(step));
      sink.on_record(site(RecordKind::kDataId, "input_ids", layout_of({rows[step], 2})),
                     at::zeros({rows[step], 2}, at::kLong));
    }
  });
}

JournalVerdict judged(const Bundle& bundle, const std::vector<std::string>& allowed = {},
                      const std::vector<std::int64_t>& rows = {8, 8, 8}) {
  return judge_journals(bundle, reads(rows), allowed);
}

std::vector<JournaledCall>& calls(Bundle& bundle, int step, int rank) {
  return bundle.journals.at({step, rank}).calls;
}

TEST(JudgeJournals, OfARightRunRaiseNothing) {
  const JournalVerdict verdict = judged(clean());

  EXPECT_THAT(verdict.findings, IsEmpty());
  EXPECT_THAT(verdict.notes, IsEmpty());
  EXPECT_THAT(verdict.summary, HasSubstr("36 journaled calls of 2 ranks in 3 steps"));
}

TEST(JudgeJournals, AreNotAskedForWhereThereAreNone) {
  Bundle bundle = clean();
  bundle.journals.clear();

  EXPECT_THAT(judged(bundle).summary, IsEmpty());
  EXPECT_THAT(judged(bundle).findings, IsEmpty());
}

TEST(JudgeJournals, NameACallThatOneRankLacks) {
  Bundle bundle = clean();
  calls(bundle, 1, 1).erase(calls(bundle, 1, 1).begin() + 2);

  const JournalVerdict verdict = judged(bundle);

  ASSERT_THAT(verdict.findings, SizeIs(1));
  const Finding& finding = verdict.findings.front();
  EXPECT_THAT(finding, FindingIs(FindingId::kCallsOfRanksDiffer,
                                 {{"call", 3},
                                  {"calls", 6},
                                  {"must",
                                   "all_reduce (sum) of 4096 bytes in fp32 (gradient of "
                                   "b, backward, train.py:31)"}}));
  EXPECT_THAT(finding.ranks, ElementsAre(1));
  EXPECT_EQ(finding.key.step, 1);
}

TEST(JudgeJournals, NameACallThatOneRankMakesTwice) {
  Bundle bundle = clean();
  calls(bundle, 1, 1).insert(calls(bundle, 1, 1).begin() + 4, call("all_reduce", 80000));

  const JournalVerdict verdict = judged(bundle);

  ASSERT_THAT(verdict.findings, SizeIs(1));
  EXPECT_THAT(verdict.findings.front(),
              FindingIs(FindingId::kCallsOfRanksDiffer,
                        {{"calls", 7},
                         {"got",
                          "all_reduce (sum) of 80000 bytes in fp32 (backward, "
                          "train.py:31)"}}));
  EXPECT_THAT(verdict.findings.front().ranks, ElementsAre(1));
}

TEST(JudgeJournals, NameAnotherDtypeReductionOrSize) {
  const auto change = [](auto edit) {
    Bundle bundle = clean();
    edit(calls(bundle, 0, 1).at(4));
    return judged(bundle).findings;
  };

  const auto dtype = change([](JournaledCall& c) { c.dtype = "int32"; });
  const auto reduction = change([](JournaledCall& c) { c.reduction = "max"; });
  const auto size = change([](JournaledCall& c) { c.bytes = 79996; });

  ASSERT_FALSE(dtype.empty());
  const auto is_instead_of_the_fifth = [](const char* got) {
    return FindingIs(FindingId::kCallsOfRanksDiffer,
                     {{"call", 5},
                      {"calls", 6},
                      {"must", "all_reduce (sum) of 80000 bytes in fp32 (backward, train.py:31)"},
                      {"got", std::string(got) + " (backward, train.py:31)"}});
  };
  EXPECT_THAT(dtype.front(), is_instead_of_the_fifth("all_reduce (sum) of 80000 bytes in int32"));
  ASSERT_FALSE(reduction.empty());
  EXPECT_THAT(reduction.front(),
              is_instead_of_the_fifth("all_reduce (max) of 80000 bytes in fp32"));
  ASSERT_FALSE(size.empty());
  EXPECT_THAT(size.front(), is_instead_of_the_fifth("all_reduce (sum) of 79996 bytes in fp32"));
}

TEST(JudgeJournals, NameAGradientThatIsReducedInPlaceOfAnotherOne) {
  Bundle bundle = clean();
  calls(bundle, 2, 1).at(1).of = "gradient of b";  // a is left out, b goes twice

  const JournalVerdict verdict = judged(bundle);

  ASSERT_THAT(verdict.findings, SizeIs(1));
  EXPECT_THAT(verdict.findings.front(),
              FindingIs(FindingId::kReducedOtherTimes, {{"tensor", "gradient of b"},
                                                        {"times", 2},
                                                        {"usual_times", 1},
                                                        {"never", std::vector{"gradient of a"}}}));
  EXPECT_THAT(verdict.findings.front().ranks, ElementsAre(1));
}

TEST(JudgeJournals, NameFiveOfManyGradientsThatARankNeverReduces) {
  Bundle bundle = clean();
  for (int step = 0; step < kSteps; ++step) {
    for (int layer = 0; layer < 7; ++layer) {
      calls(bundle, step, 0)
          .push_back(call("all_reduce", 64, fmt::format("gradient of d{}", layer)));
      calls(bundle, step, 1)
          .push_back(call("all_reduce", 64, layer < 6 ? "gradient of e" : "gradient of d6"));
    }
  }
  ASSERT_THAT(judged(bundle).findings, IsEmpty());

  calls(bundle, 2, 1).back().of = "gradient of a";
  const JournalVerdict verdict = judged(bundle);

  ASSERT_THAT(verdict.findings, SizeIs(1));
  EXPECT_THAT(verdict.findings.front(),
              FindingIs(FindingId::kReducedOtherTimes,
                        {{"tensor", "gradient of a"},
                         {"times", 2},
                         {"usual_times", 1},
                         {"never", std::vector{"gradient of d0", "gradient of d1", "gradient of d2",
                                               "gradient of d3", "gradient of d4", "gradient of d5",
                                               "gradient of d6"}}}));
}

TEST(JudgeJournals, AllowOneTensorWithANameOnEachRank) {
  Bundle bundle = clean();
  for (int step = 0; step < kSteps; ++step) calls(bundle, step, 1).at(1).of = "gradient of tied";

  EXPECT_THAT(judged(bundle).findings, IsEmpty());
}

TEST(JudgeJournals, NameAStepInWhichAllRanksReduceMore) {
  Bundle bundle = clean();
  for (int rank = 0; rank < 2; ++rank)
    calls(bundle, 1, rank)
        .insert(calls(bundle, 1, rank).begin() + 4, call("all_reduce", 4096, "gradient of c"));

  const JournalVerdict verdict = judged(bundle);

  ASSERT_THAT(verdict.findings, SizeIs(1));
  EXPECT_THAT(verdict.findings.front(),
              FindingIs(FindingId::kCallsOfStepsDiffer,
                        {{"op", "all_reduce (sum) in fp32"},
                         {"calls", 6},
                         {"bytes", 96388},
                         {"usual_step", 0},
                         {"usual_calls", 5},
                         {"usual_bytes", 92292},
                         {"got",
                          "all_reduce (sum) of 4096 bytes in fp32 (gradient of c, "
                          "backward, train.py:31)"}}));
  EXPECT_EQ(verdict.findings.front().key.step, 1);
  EXPECT_THAT(verdict.findings.front().ranks, ElementsAre(0, 1));
}

TEST(JudgeJournals, LetBucketsBeCutAnew) {
  Bundle bundle = clean();
  for (int rank = 0; rank < 2; ++rank) {
    calls(bundle, 0, rank).at(4).bytes = 40000;
    calls(bundle, 0, rank).insert(calls(bundle, 0, rank).begin() + 4, call("all_reduce", 40000));
    calls(bundle, 1, rank)
        .insert(calls(bundle, 1, rank).begin(), call("broadcast", 32, "", "forward"));
  }

  const JournalVerdict verdict = judged(bundle);

  EXPECT_THAT(verdict.findings, IsEmpty());
  EXPECT_THAT(verdict.notes, SizeIs(1));
}

TEST(JudgeJournals, LetWhatIsLoggedOrBetweenStepsDiffer) {
  Bundle bundle = clean();
  for (int rank = 0; rank < 2; ++rank) {
    calls(bundle, 2, rank).push_back(call("all_reduce", 8, "", "update"));
    calls(bundle, 1, rank)
        .insert(calls(bundle, 1, rank).begin(), call("all_reduce", 1 << 20, "", "between"));
    JournaledCall used = call("all_reduce", 4000, "", "backward");  // a map of used parameters
    used.dtype = "int32";
    calls(bundle, 0, rank).push_back(used);
  }

  EXPECT_THAT(judged(bundle).findings, IsEmpty());
}

TEST(JudgeJournals, LetStepsOnOtherInputsDiffer) {
  Bundle bundle = clean();
  for (int rank = 0; rank < 2; ++rank)
    calls(bundle, 2, rank).erase(calls(bundle, 2, rank).begin() + 4);

  EXPECT_THAT(judged(bundle, {}, {8, 8, 4}).findings, IsEmpty());
  EXPECT_THAT(judged(bundle, {}, {8, 8, 8}).findings, SizeIs(1));
}

TEST(JudgeJournals, LetStepsWithOtherGradientsDiffer) {
  Bundle bundle = clean();
  for (int rank = 0; rank < 2; ++rank)
    calls(bundle, 2, rank).erase(calls(bundle, 2, rank).begin() + 1);
  // a is frozen in the steps that are not named
  const auto steps_a = [&](std::set<int> steps) {
    return judge_journals(bundle, reference([steps](Sink& sink, int) {
                            for (int step = 0; step < kSteps; ++step) {
                              if (step > 0) sink.begin_step(step);
                              sink.on_record(
                                  site(RecordKind::kDataId, "input_ids", layout_of({8, 2})),
                                  at::zeros({8, 2}, at::kLong));
                              if (steps.contains(step))
                                sink.on_record(site(RecordKind::kGrad, "a", layout_of({1024})),
                                               at::zeros({1024}));
                            }
                          }),
                          {})
        .findings;
  };

  EXPECT_THAT(steps_a({0, 1}), IsEmpty());
  EXPECT_THAT(steps_a({0, 1, 2}), SizeIs(1));
}

TEST(JudgeJournals, MustBeThereOnAllRanks) {
  Bundle bundle = clean();
  bundle.journals.erase({1, 1});

  const JournalVerdict verdict = judged(bundle);

  ASSERT_THAT(verdict.findings, SizeIs(1));
  EXPECT_THAT(verdict.findings.front(), FindingIs(FindingId::kNoJournal));
  EXPECT_EQ(verdict.findings.front().key.step, 1);
}

TEST(JudgeJournals, AreExcusedByWhoeverCompares) {
  Bundle bundle = clean();
  calls(bundle, 1, 1).pop_back();

  EXPECT_THAT(judged(bundle, {"scalar/calls.rank0"}).findings, SizeIs(1));
  const JournalVerdict verdict = judged(bundle, {"scalar/calls.*"});
  EXPECT_THAT(verdict.findings, IsEmpty());
  EXPECT_THAT(verdict.notes, ElementsAre(HasSubstr("as --not-recorded allows")));
}

TEST(JudgeJournals, CompareGroupsThatRanksKnowByOtherNames) {
  Bundle bundle = clean();
  for (int step = 0; step < kSteps; ++step) {
    CallJournal& journal = bundle.journals.at({step, 1});
    journal.groups = {{"7", {0, 1}}};
    for (JournaledCall& c : journal.calls) c.group = "7";
  }

  EXPECT_THAT(judged(bundle).findings, IsEmpty());
  calls(bundle, 0, 1).pop_back();
  EXPECT_THAT(judged(bundle).findings, SizeIs(1));
}

TEST(JudgeJournals, NoteASendThatNobodyReceives) {
  Bundle bundle = clean();
  JournaledCall send = call("send", 64, "", "forward");
  send.peer = 1;
  JournaledCall recv = send;
  recv.op = "recv";
  recv.peer = 0;
  calls(bundle, 0, 0).push_back(send);
  calls(bundle, 0, 1).push_back(recv);
  calls(bundle, 1, 0).push_back(send);

  const JournalVerdict verdict = judged(bundle);

  EXPECT_THAT(verdict.findings, IsEmpty());
  EXPECT_THAT(verdict.notes, ElementsAre(HasSubstr("(step 1): 1 send of 64 bytes in fp32 from rank "
                                                   "0 to rank 1 without its recv")));
}

TEST(JudgeJournals, OfThousandsOfCallsNameTheFirstDifference) {
  Bundle bundle = clean();
  for (int rank = 0; rank < 2; ++rank) {
    for (int i = 0; i < 5000; ++i)
      calls(bundle, 0, rank).push_back(call("all_reduce", 4 * i + 4 * rank, "", "between"));
  }

  const JournalVerdict verdict = judged(bundle);

  ASSERT_THAT(verdict.findings, SizeIs(1));
  EXPECT_THAT(verdict.findings.front(),
              FindingIs(FindingId::kCallsOfRanksDiffer, {{"call", 7}, {"calls", 5006}}));
}

TEST(JudgeJournals, AreReadStrictly) {
  const std::string good =
      R"({"groups": {"0": [0, 1]}, "calls": [{"op": "all_reduce", "group": "0",
          "reduction": "sum", "dtype": "fp32", "bytes": 8, "phase": "backward"}]})";
  const auto read = [](const std::string& text, int rank = 0) {
    return journal_of(nlohmann::json::parse(text), rank, 2, "rank.json");
  };
  const auto with = [&](const std::string& old, const std::string& text) {
    std::string changed = good;
    changed.replace(changed.find(old), old.size(), text);
    return changed;
  };

  EXPECT_THAT(read(good).calls, SizeIs(1));
  EXPECT_EQ(read(good).calls.front().reduction, "sum");
  EXPECT_THROW((void)read(with("[0, 1]", "[0, 2]")), FileError);
  EXPECT_THROW((void)read(with("[0, 1]", "[0, 0]")), FileError);
  EXPECT_THROW((void)read(with("[0, 1]", "[0]")), FileError);
  EXPECT_THROW((void)read(with("all_reduce", "reduce_all")), FileError);
  EXPECT_THROW((void)read(with("backward", "sideways")), FileError);
  EXPECT_THROW((void)read(with("8", "-8")), FileError);
  EXPECT_THROW((void)read(with("\"group\": \"0\"", "\"group\": \"1\"")), FileError);
  EXPECT_THROW((void)read(with("8,", "9223372036854775807,")), FileError) << "sums overflow";
  EXPECT_THROW((void)read(with("\"dtype\": \"fp32\", ", "")), FileError);
  EXPECT_THROW((void)read(with("\"reduction\": \"sum\", ", "")), FileError);
  EXPECT_THROW((void)read(with("\"bytes\"", "\"peer\": 2, \"bytes\"")), FileError);
  EXPECT_THROW((void)read("[]"), FileError);
  EXPECT_THROW((void)read(with("[0, 1]", "7")), FileError);
}

/// A verdict on a bundle whose ranks hold summands of the gradient of `name` in step 1.
Verdict summands_of(const std::string& name) {
  Verdict verdict;
  Finding finding;
  finding.key = {1, RecordKind::kGrad, name, 0};
  finding.ranks = {0, 1};
  finding.cause =
      make_cause(CauseId::kRankLocal, {{"axis", "dp"}, {"holders", "dp"}, {"copies", 2}});
  verdict.findings.push_back(std::move(finding));
  return verdict;
}

std::string reduced_at(Bundle& bundle, const std::string& name) {
  for (int rank = 0; rank < 2 && bundle.trace.ranks.size() < 2; ++rank)
    bundle.trace.ranks.push_back({.rank = rank, .records = {}, .arena = nullptr});
  Verdict verdict = summands_of(name);
  tell_reductions(bundle, verdict);
  return word_of(verdict.findings.front().cause.values, "reduced_at");
}

TEST(JudgeJournals, AReductionThatTheJournalShowsIsNotMissing) {
  Bundle bundle = clean();

  EXPECT_EQ(reduced_at(bundle, "b"), "train.py:31");
  EXPECT_EQ(reduced_at(bundle, "d"), "") << "of another parameter";
  calls(bundle, 1, 1)[2].of = "gradient of a";
  EXPECT_EQ(reduced_at(bundle, "b"), "") << "on one of the ranks";
}

TEST(JudgeJournals, BucketsAsLargeAsAllGradientsHoldEachGradient) {
  Bundle bundle = clean();
  for (int rank = 0; rank < 2; ++rank) {
    Record record;
    record.key = {1, RecordKind::kGrad, "d", 0};
    record.local_shape = {20000};  // 80000 bytes
    bundle.trace.ranks.push_back({.rank = rank, .records = {record}, .arena = nullptr});
  }

  EXPECT_EQ(reduced_at(bundle, "d"), "train.py:31");
  for (RankTrace& rank : bundle.trace.ranks) rank.records.front().local_shape = {20001};
  EXPECT_EQ(reduced_at(bundle, "d"), "") << "some parameter is in no bucket";
}

}  // namespace
}  // namespace isoshard
