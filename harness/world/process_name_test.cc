// SPDX-License-Identifier: Apache-2.0
/// Claims about names of processes: they fit, and the number of the run is never cut off.
#include "harness/world/process_name.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <span>
#include <string>
#include <thread>

#include "harness/world/forked/forked_world.h"
#include "subjects/registry/subject_spec.h"

namespace isoshard {
namespace {

using ::testing::EndsWith;

TEST(ProcessName, SaysSubjectAndNumberInFifteenBytes) {
  EXPECT_EQ(process_name("autotp", 1), "iso:autotp/1");
  EXPECT_EQ(process_name("reference", 1), "iso:reference/1");
  EXPECT_EQ(process_name("a_subject_of_ones_own", 12), "iso:a_subjec/12");
  for (const SubjectSpec& spec : subject_specs()) {
    for (const int run : {1, 9}) {
      const std::string name = process_name(spec.name, run);
      EXPECT_LE(name.size(), 15U);
      EXPECT_EQ(name, "iso:" + std::string(spec.name) + "/" + std::to_string(run))
          << "no registered subject's name is cut";
    }
    EXPECT_THAT(process_name(spec.name, 100), EndsWith("/100"));
  }
}

// What a rank's own /proc says, of its first thread and of one that it starts.
TEST(ProcessName, IsThatOfEveryRankAndItsThreads) {
  WorldOptions options;
  options.size = 3;
  options.name = "names";
  options.process_name = process_name("autotp", 2);

  const WorldReport report = run_forked(options, [](Rank& rank) {
    std::string names[2];
    const auto read = [](std::string& name) {
      std::ifstream file("/proc/thread-self/comm");
      std::getline(file, name);
    };
    read(names[0]);
    std::thread(read, std::ref(names[1])).join();
    const std::string both = names[0] + " " + names[1];
    rank.post_result(std::as_bytes(std::span(both.data(), both.size())));
  });

  ASSERT_TRUE(report.ok()) << report.describe();
  ASSERT_EQ(report.ranks.size(), 3U);
  for (const RankReport& rank : report.ranks) {
    const std::string said(reinterpret_cast<const char*>(rank.result.data()), rank.result.size());
    EXPECT_EQ(said, "iso:autotp/2 iso:autotp/2");
  }
}

}  // namespace
}  // namespace isoshard
