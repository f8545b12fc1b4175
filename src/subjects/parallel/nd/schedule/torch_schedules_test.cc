// SPDX-License-Identifier: Apache-2.0
// Our tables against those of torch.distributed.pipelining (fixtures/oracle/pipeline_schedules).
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "core/base/sha256.h"
#include "subjects/parallel/nd/schedule/every_schedule.h"
#include "subjects/parallel/nd/schedule/schedule_check.h"
#include "subjects/parallel/nd/schedule/schedule_text.h"
#include "subjects/parallel/nd/schedule/schedule_transfers.h"

namespace isoshard {
namespace {
namespace fs = std::filesystem;

const fs::path kFolder = ISOSHARD_TORCH_SCHEDULES;

std::string text_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::stringstream in(text);
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

/// "1F1B_pp2_v1_m4" as a spec.
PipelineSpec spec_of_name(const std::string& name) {
  const std::vector<std::string> parts = split(name, '_');
  const PipelineKind kind = pipeline_kind_of(parts.at(0));
  return {kind, std::stoi(parts.at(1).substr(2)), std::stoi(parts.at(2).substr(1)),
          default_placement(kind), std::stoi(parts.at(3).substr(1))};
}

/// The same without idle steps.
PipelineSchedule busy(PipelineSchedule schedule) {
  for (auto& row : schedule.table)
    std::erase_if(row, [](const auto& action) { return !action.has_value(); });
  return schedule;
}

/// Names of the stored tables; `with_transfers` those of their dumps with transfers.
std::vector<std::string> stored(bool with_transfers) {
  std::vector<std::string> names;
  const std::string ending = ".comms";
  for (const auto& entry : fs::directory_iterator(kFolder)) {
    const fs::path& file = entry.path();
    if (file.extension() != ".csv" || file.stem() == "digests") continue;
    if ((file.stem().extension() == ending) == with_transfers)
      names.push_back(with_transfers ? file.stem().stem().string() : file.stem().string());
  }
  std::ranges::sort(names);
  return names;
}

TEST(TorchSchedules, StoredTablesHaveOurActionsInOurOrder) {
  const std::vector<std::string> names = stored(false);

  EXPECT_EQ(names.size(), 32U);
  for (const std::string& name : names) {
    const PipelineSpec spec = spec_of_name(name);
    const PipelineSchedule torch =
        schedule_from_csv(spec, text_of(kFolder / (name + ".csv")), name);
    EXPECT_EQ(csv_of(busy(make_schedule(spec))), csv_of(busy(torch))) << name;
    EXPECT_TRUE(check(torch).empty()) << name;
  }
}

TEST(TorchSchedules, EveryShapeHasTorchsTableOrIsRefusedByBoth) {
  int equal = 0, refused = 0;
  for (const std::string& line : split(text_of(kFolder / "digests.csv"), '\n')) {
    const std::vector<std::string> cells = split(line, ',');
    const PipelineSpec spec =
        spec_of_name(fmt::format("{}_pp{}_v{}_m{}", cells[0], cells[1], cells[2], cells[3]));
    if (cells[4] == "refused") {
      EXPECT_FALSE(is_schedulable(spec)) << line;
      ++refused;
      continue;
    }
    ASSERT_TRUE(is_schedulable(spec)) << line;
    const std::string csv = csv_of(busy(make_schedule(spec)));
    EXPECT_EQ(sha256_hex(std::as_bytes(std::span(csv))).substr(0, 16), cells[4]) << line;
    ++equal;
  }
  EXPECT_EQ(equal, 992);
  EXPECT_EQ(refused, 416);
}

TEST(TorchSchedules, TransfersAreTorchsOnEveryRank) {
  const std::vector<std::string> names = stored(true);

  EXPECT_EQ(names.size(), 18U);
  for (const std::string& name : names) {
    const PipelineSpec spec = spec_of_name(name);
    const auto turns = pipeline_turns(make_schedule(spec));
    const std::vector<std::string> rows = split(text_of(kFolder / (name + ".comms.csv")), '\n');
    ASSERT_EQ(rows.size(), turns.size());
    for (std::size_t rank = 0; rank < rows.size(); ++rank) {
      std::multiset<std::string> torch, ours;
      for (const std::string& cell : split(rows[rank], ','))
        if (cell.find("SEND_") != std::string::npos || cell.find("RECV_") != std::string::npos)
          torch.insert(cell);
      for (const PipelineTurn& turn : turns[rank])
        for (const StageTransfer& transfer : turn.transfers) ours.insert(to_string(transfer));
      EXPECT_EQ(ours, torch) << name << " rank " << rank;
    }
  }
}

TEST(TorchSchedules, ATableWithTwoActionsSwappedIsNotTorchs) {
  const PipelineSpec spec = spec_of_name("1F1B_pp2_v1_m4");
  PipelineSchedule ours = busy(make_schedule(spec));
  const PipelineSchedule torch =
      schedule_from_csv(spec, text_of(kFolder / "1F1B_pp2_v1_m4.csv"), "");

  std::swap(ours.table[0][2], ours.table[0][3]);

  EXPECT_NE(csv_of(ours), csv_of(busy(torch)));
}

}  // namespace
}  // namespace isoshard
