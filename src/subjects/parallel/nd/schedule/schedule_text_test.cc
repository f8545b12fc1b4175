// SPDX-License-Identifier: Apache-2.0
// CSV is read as it is written, and what is none is refused by its place.
#include "subjects/parallel/nd/schedule/schedule_text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "core/base/error.h"
#include "subjects/parallel/nd/schedule/every_schedule.h"
#include "subjects/parallel/nd/schedule/schedule_check.h"
#include "subjects/parallel/nd/schedule/schedule_simulation.h"

namespace isoshard {
namespace {

using enum PipelineKind;
using ::testing::HasSubstr;

constexpr StagePlacement kLoop = StagePlacement::kLoop, kV = StagePlacement::kV;

std::string file_error(std::string_view csv) {
  try {
    (void)spec_of_csv(csv, "mine.csv");
  } catch (const FileError& error) {
    return error.what();
  }
  return "no error";
}

TEST(PipelineCsv, IsReadAsItIsWritten) {
  for (const PipelineSpec& spec : every_spec()) {
    const PipelineSchedule schedule = make_schedule(spec);
    ASSERT_EQ(schedule_from_csv(spec, csv_of(schedule), "").table, schedule.table) << slug(spec);
  }
}

TEST(PipelineCsv, TellsItsSpec) {
  int v_or_loop = 0;
  for (const PipelineSpec& spec : every_spec()) {
    const PipelineSpec read = spec_of_csv(csv_of(make_schedule(spec)), "");
    ASSERT_EQ(read.kind, kCustom);
    ASSERT_EQ(read.pp, spec.pp);
    ASSERT_EQ(read.stages_per_rank, spec.stages_per_rank) << slug(spec);
    ASSERT_EQ(read.micro_batches, spec.micro_batches) << slug(spec);
    if (spec.pp == 1 || spec.stages_per_rank == 1) continue;  // loop and V are the same
    ++v_or_loop;
    ASSERT_EQ(read.placement, spec.placement) << slug(spec);
  }
  EXPECT_GT(v_or_loop, 500);
}

TEST(PipelineCsv, TakesSpacesEmptyCellsAndLineEndsOfOtherSystems) {
  const PipelineSpec spec{k1F1B, 2, 1, kLoop, 1};
  const PipelineSchedule schedule = schedule_from_csv(spec, "0F0, ,,0B0\r\n,1F0 , 1B0,\r\n", "");

  EXPECT_EQ(csv_of(schedule), "0F0,,,0B0\n,1F0,1B0,\n");
  EXPECT_EQ(schedule_from_csv(spec, "0F0,,,0B0\n,1F0,1B0,", "").table, schedule.table);
}

TEST(PipelineCsv, ATableOfAnotherSpecIsFoundByTheChecker) {
  const std::string csv = csv_of(make_schedule({kInterleaved1F1B, 2, 2, kV, 4}));

  EXPECT_TRUE(check(schedule_from_csv(spec_of_csv(csv, ""), csv, "")).empty());
  EXPECT_FALSE(check(schedule_from_csv({kCustom, 2, 2, kLoop, 4}, csv, "")).empty());
  EXPECT_FALSE(check(schedule_from_csv({kCustom, 2, 2, kV, 5}, csv, "")).empty());
  EXPECT_FALSE(check(schedule_from_csv({kCustom, 3, 2, kV, 4}, csv, "")).empty());
}

TEST(PipelineCsvErrors, NameLineCellAndText) {
  EXPECT_EQ(file_error("0F0,0B0\n1F0,1X0\n"),
            "mine.csv: line 2, cell 2: an action must be a stage, one of F, B, I, W, and a "
            "micro-batch (such as 0F0; numbers below 4096), got '1X0'");
  for (const char* const wrong : {"F0", "0F", "0F0x", "-1F0", "0F-1", "0F0F0", "0F99999999999",
                                  "4096F0", "0f0", "0 F0", "\x1b[2J"})
    EXPECT_THAT(file_error(wrong), HasSubstr("mine.csv: line 1, cell 1: an action must be"))
        << wrong;
  EXPECT_THAT(file_error("\x1b[2J"), HasSubstr("got '\\x1b[2J'"));
}

TEST(PipelineCsvErrors, DumpsWithTransfersAreRefusedByName) {
  for (const char* const name : {"0SEND_F0", "1RECV_F0", "1SEND_B0", "0RECV_B0", "0UNSHARD",
                                 "0RESHARD", "0REDUCE_GRAD", "(0F1;1B0)OVERLAP_F_B"})
    EXPECT_THAT(file_error(name), HasSubstr("must not be in a table of computations (give torch's "
                                            "dump with format=\"compute_only\")"))
        << name;
}

TEST(PipelineCsvErrors, ATableThatLacksMostActionsIsNoSchedule) {
  EXPECT_EQ(file_error("4095F4095\n"),
            "mine.csv: a schedule of 4096 stages and 4096 micro-batches must have at least "
            "33554432 actions (a forward and a backward of each), got 1");
  EXPECT_EQ(file_error("0F0,0F1\n1F0,1F1\n"), "no error");
}

TEST(PipelineCsvErrors, ASpecMustFit) {
  EXPECT_EQ(file_error(""), "mine.csv: a schedule must have at least one action, got none");
  EXPECT_EQ(file_error(",,\n"), "mine.csv: a schedule must have at least one action, got none");
  EXPECT_EQ(file_error("0F0,2F0\n1F0\n"),
            "mine.csv: the number of stages must be a multiple of the 2 lines (one a rank), got 3");
  EXPECT_EQ(file_error("1F0\n0F0\n"),
            "mine.csv: 2 stages on 2 ranks must lie in a loop (stage s on rank s mod 2) or on a V, "
            "got neither");
}

TEST(PipelinePicture, HasARowForEachRankAndAColumnForEachTimeStep) {
  EXPECT_EQ(picture(make_schedule({k1F1B, 2, 1, kLoop, 2})),
            "time   0  1  2  3  4  5\n"
            "rank 0 F0 F1 .  B0 .  B1\n"
            "rank 1 .  F0 B0 F1 B1\n");
  EXPECT_EQ(picture(make_schedule({kInterleavedZeroBubble, 2, 2, kLoop, 2})).substr(0, 33),
            "time   0   1   2   3   4   5   6 ");
}

TEST(PipelinePicture, GoesOnBelowWhereItIsTooWide) {
  const PipelineSchedule schedule = make_schedule({k1F1B, 2, 1, kLoop, 2});

  EXPECT_EQ(picture(schedule, 18),
            "time   0  1  2  3\n"
            "rank 0 F0 F1 .  B0\n"
            "rank 1 .  F0 B0 F1\n"
            "\n"
            "time   4  5\n"
            "rank 0 .  B1\n"
            "rank 1 B1\n");
  EXPECT_EQ(picture(schedule, 9).substr(0, 28), "time   0\nrank 0 F0\nrank 1 .\n");
  EXPECT_THROW((void)picture(schedule, 8), UsageError);
}

/// A text as a block of a Markdown page.
std::string indented(const std::string& text) {
  std::string block;
  std::stringstream lines(text);
  for (std::string line; std::getline(lines, line);) block += "    " + line + "\n";
  return block;
}

TEST(PipelinePicture, OfTheDocsAreDrawnByTheCode) {
  std::ifstream file(ISOSHARD_SUBJECTS_PAGE);
  std::stringstream page;
  page << file.rdbuf();
  const std::vector<PipelineSpec> drawn = {{kGPipe, 4, 1, kLoop, 4},
                                           {k1F1B, 4, 1, kLoop, 8},
                                           {kInterleaved1F1B, 2, 2, kLoop, 4},
                                           {kInterleaved1F1B, 2, 2, kV, 4},
                                           {kInterleavedZeroBubble, 4, 1, kLoop, 8},
                                           {kZbvZeroBubble, 2, 2, kV, 3}};
  const std::vector<PipelineSpec> timed = {{kGPipe, 4, 1, kLoop, 8},
                                           {k1F1B, 4, 1, kLoop, 8},
                                           {kInterleaved1F1B, 4, 2, kLoop, 8},
                                           {kInterleaved1F1B, 4, 2, kV, 8},
                                           {kInterleavedZeroBubble, 4, 1, kLoop, 8},
                                           {kInterleavedZeroBubble, 4, 2, kLoop, 8},
                                           {kZbvZeroBubble, 4, 2, kV, 8}};

  for (const PipelineSpec& spec : drawn)
    EXPECT_THAT(page.str(), HasSubstr("\n\n" + indented(picture(make_schedule(spec))) + "\n"))
        << slug(spec);
  for (const PipelineSpec& spec : timed) {
    const PipelineSchedule schedule = make_schedule(spec);
    const PipelineTiming time = timing(schedule);
    EXPECT_THAT(page.str(), HasSubstr(fmt::format(" | {} | {:g} / {:g} | {:.1f} % | {} |\n",
                                                  spec.stages_per_rank, time.makespan, time.ideal,
                                                  100 * time.bubble_share,
                                                  fmt::join(peak_activations(schedule), ", "))))
        << slug(spec);
  }
}

TEST(PipelinePicture, KeepsItsWidth) {
  for (const PipelineSpec& spec : every_spec()) {
    const std::string text = picture(make_schedule(spec), 60);
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t end = text.find('\n', begin);
      ASSERT_LE(end - begin, 60U) << slug(spec);
      begin = end + 1;
    }
  }
}

}  // namespace
}  // namespace isoshard
