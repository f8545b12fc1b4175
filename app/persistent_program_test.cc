// SPDX-License-Identifier: Apache-2.0
// Commands on ranks that are forked once, live for the whole run and meet through NCCL. Tensors are
// on the device of tests, and a stand-in takes the place of CUDA and NCCL.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "app/testing/exit_codes.h"
#include "app/testing/malformed_rows.h"
#include "core/comm/nccl/nccl_world.h"
#include "core/io/json.h"
#include "harness/testing/device/test_device.h"
#include "suite/testing/gpu/gpu_stand_in.h"

namespace isoshard {
namespace {

using malformed::Arguments;
using malformed::run_isoshard;
using ::testing::HasSubstr;

const c10::Device kOfProgram = test_device();

/// Whatever the program starts has GPUs that tests stand in for.
class PersistentProgram : public ::testing::Test {
 protected:
  ChildResult run(const Arguments& arguments, const std::function<void(int rank)>& on_start = {}) {
    return run_isoshard(folder_.path(), arguments, [this, on_start] {
      set_gpu_api([this, on_start](int rank, int /*size*/) {
        if (on_start) on_start(rank);
        auto gpu = std::make_shared<GpuStandIn>(fabric_, rank);
        gpu->set_other_memory(is_on_test_device);
        return gpu;
      });
    });
  }
  nlohmann::json report_in(const std::string& folder) {
    return read_json_file(folder_.path() / folder / "report.json");
  }
  static Arguments verify(const std::string& folder, const Arguments& more) {
    Arguments all = {"verify",  "--subjects", "fsdp_tp", "--dp",         "2",
                     "--dtype", "fp32",       "--quiet", "--output-dir", folder};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  TestFolder folder_;
  GpuFabric fabric_{GpuFabric::kMaxRanks};
};

/// What is said of the one case, and of each of its tensors.
std::vector<nlohmann::json> verdict_of(const nlohmann::json& report) {
  const nlohmann::json& item = report.at("cases").at(0);
  return {item.at("status"), item.at("reason"), item.at("compared"), item.at("tensors")};
}

TEST_F(PersistentProgram, VerifiesOnADeviceWithTheVerdictOfForkedRanks) {
  ASSERT_EQ(kOfProgram.type(), c10::DeviceType::PrivateUse1);
  const Arguments tiny = {"--device", "cuda",         "--model", "tiny-llama", "--batch-size",
                          "2",        "--seq-length", "16",      "--tp",       "1"};
  Arguments on_persistent = tiny;
  on_persistent.insert(on_persistent.end(), {"--persistent-ranks", "2"});
  const ChildResult forked = run(verify("forked", tiny));
  const std::uint64_t ids = fabric_.num_ids();
  const ChildResult persistent = run(verify("persistent", on_persistent));

  ASSERT_EQ(forked.exit_code, codes::kConforms) << forked.error;
  ASSERT_EQ(persistent.exit_code, codes::kConforms) << persistent.error;
  EXPECT_GT(fabric_.num_ids(), ids);
  EXPECT_EQ(verdict_of(report_in("persistent")), verdict_of(report_in("forked")));
  const nlohmann::json environment = report_in("persistent").at("environment");
  EXPECT_EQ(environment.at("device.collectives"),
            "nccl: ranks are processes that live for the whole run");
}

TEST_F(PersistentProgram, AFaultDiverges) {
  const ChildResult wrong = run(verify(
      "wrong", {"--device", "cuda", "--persistent-ranks", "2", "--fault", "dp_sum_missing"}));

  EXPECT_EQ(wrong.exit_code, codes::kDiverges) << wrong.error;
}

TEST_F(PersistentProgram, TimesTheStepsOfForkedRanks) {
  const auto timed = [&](const std::string& folder, const Arguments& more) {
    Arguments all = {"bench",
                     "--impl",
                     "fsdp_dtensor",
                     "--model",
                     "tiny-llama",
                     "--dp_size",
                     "2",
                     "--seq_length",
                     "16",
                     "--dtype",
                     "float32",
                     "--num_training_steps",
                     "4",
                     "--warmup_steps",
                     "1",
                     "--device",
                     "cuda",
                     "--ungated",
                     "--output-dir",
                     folder};
    all.insert(all.end(), more.begin(), more.end());
    const ChildResult done = run(all);
    EXPECT_EQ(done.exit_code, codes::kConforms) << done.output << done.error;
    return read_json_file(folder_.path() / folder / "results_fsdp_dtensor_tp1_dp2.json");
  };

  const nlohmann::json forked = timed("forked", {}),
                       persistent = timed("persistent", {"--persistent-ranks", "2"});

  EXPECT_EQ(persistent.at("config").at("world_size"), 2);
  EXPECT_EQ(persistent.at("ranks").size(), 2U);
  EXPECT_EQ(persistent.at("machine").at("device_collectives"),
            "nccl: ranks are processes that live for the whole run");
  ASSERT_EQ(persistent.at("steps").size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(persistent.at("steps")[i].at("loss"), forked.at("steps")[i].at("loss"));
    EXPECT_GT(persistent.at("steps")[i].at("step_time_s"), 0);
  }
  EXPECT_EQ(persistent.at("config").at("arguments"), forked.at("config").at("arguments"))
      << "who starts the ranks is no part of what is asked for";
}

TEST_F(PersistentProgram, ARankThatDiesIsNamedAndTheRunEnds) {
  const ChildResult killed = run(verify("killed", {"--persistent-ranks", "2"}), [this](int rank) {
    if (rank != 1) return;
    std::thread([this] {  // in the midst of its first calls
      while (fabric_.num_ids() == 0) std::this_thread::yield();
      ::raise(SIGKILL);
    })
        .detach();
  });

  EXPECT_EQ(killed.exit_code, codes::kInfrastructure);
  EXPECT_THAT(killed.error, HasSubstr("rank 1 was ended by signal 9"));
}

TEST(PersistentFlags, AreRefusedWithoutNcclAndWithoutANumber) {
  const TestFolder folder;
  const auto without = run_isoshard(folder.path(), {"verify", "--persistent-ranks", "2"});
  GpuFabric fabric(2);
  const auto api = [&fabric] {
    set_gpu_api([&](int rank, int) { return std::make_shared<GpuStandIn>(fabric, rank); });
  };
  const auto no_number = run_isoshard(folder.path(), {"verify", "--persistent-ranks", "two"}, api);
  const auto joined = run_isoshard(folder.path(), {"verify", "--persistent-ranks=2"}, api);

  EXPECT_THAT(without.error, HasSubstr("backend nccl is not part of this program"));
  EXPECT_NE(without.exit_code, 0);
  EXPECT_EQ(no_number.exit_code, codes::kUsage);
  EXPECT_THAT(no_number.error, HasSubstr("--persistent-ranks must be a number, got 'two'"));
  EXPECT_EQ(joined.exit_code, codes::kUsage);
  EXPECT_THAT(joined.error, HasSubstr("with a space before its number"));
}

}  // namespace
}  // namespace isoshard
