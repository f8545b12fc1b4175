// SPDX-License-Identifier: Apache-2.0
// Runs of cases on ranks that live for a whole program and meet through NCCL. Tensors are on the
// device of tests, and a stand-in takes the place of CUDA and NCCL.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/comm/nccl/nccl_world.h"
#include "harness/testing/device/test_device.h"
#include "harness/verdict/equal_runs.h"
#include "harness/world/attached/attached_launcher.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/persistent/persistent_ranks.h"
#include "suite/reference/device/device_collectives.h"
#include "suite/reference/reference.h"
#include "suite/testing/gpu/gpu_stand_in.h"
#include "suite/testing/step_cases.h"

namespace isoshard {
namespace {

const c10::Device kPersistentDevice = test_device();

Case item_on(Device::Kind device) {
  Case item = step_case("fsdp_tp", {.dp = 2});
  item.device = device;
  return item;
}

Trace digests_of(const Case& item) {
  return run_case(item, Reference(), digests_only({}));
}

/// What a rank of the program does: its code is 0 if all is right, else the line that is not.
using Program = std::function<int(AttachedJob& job)>;

class DevicePersistent : public ::testing::Test {
 protected:
  std::vector<PersistentRank> run(const Program& program) {
    set_gpu_api([this](int rank, int /*size*/) {
      auto gpu = std::make_shared<GpuStandIn>(fabric_, rank);
      gpu->set_other_memory(is_on_test_device);
      return gpu;
    });
    auto ranks = run_persistent_ranks(2, [&] {
      const auto job = attach_nccl_job();
      int code = 0;
      {
        AttachedLauncher launcher(*job);
        set_default_launcher(launcher);
        code = program(*job);
      }
      job->finish();
      return code;
    });
    set_gpu_api({});
    return ranks;
  }
  GpuFabric fabric_{GpuFabric::kMaxRanks};
};

void expect_codes(const std::vector<PersistentRank>& ranks, int code) {
  ASSERT_EQ(ranks.size(), 2U);
  for (const PersistentRank& rank : ranks) {
    EXPECT_EQ(rank.signal, 0);
    EXPECT_EQ(rank.code, code);
  }
}

// Three runs on the same two processes.
TEST_F(DevicePersistent, HasTheBitsOfForkedRanksRunAfterRun) {
  ASSERT_EQ(kPersistentDevice.type(), c10::DeviceType::PrivateUse1);
  const Trace forked = digests_of(item_on(Device::Kind::kCpu));

  const auto ranks = run([&](AttachedJob&) {
    const Case item = item_on(Device::Kind::kCuda);
    if (!device_collectives(item).words.starts_with("nccl: ")) return __LINE__ % 100;
    for (int run = 0; run < 3; ++run) {
      const RunEquality equality = equality_of(forked, digests_of(item));
      if (!equality.difference.empty() || equality.tensors < 50) return __LINE__ % 100;
    }
    return 0;
  });

  expect_codes(ranks, 0);
}

TEST_F(DevicePersistent, RunsWorldsOfOneInTheFirstProcess) {
  static int number = 7;
  const auto ranks = run([](AttachedJob& job) {
    const WorldReport report = default_launcher()
                                   .launch({.size = 1, .name = "one"},
                                           [](Rank& rank) {
                                             number = 8;  // of this process
                                             rank.post_result(std::as_bytes(std::span(&number, 1)));
                                           })
                                   ->wait();
    if (!report.ok() || report.ranks.at(0).result.size() != sizeof(int)) return __LINE__ % 100;
    return number == (job.rank() == 0 ? 8 : 7) ? 0 : __LINE__ % 100;
  });

  expect_codes(ranks, 0);
  EXPECT_EQ(number, 7);
}

TEST_F(DevicePersistent, AnErrorOfAWorldIsEverywhereAndTheNextOneRuns) {
  const auto ranks = run([](AttachedJob&) {
    for (const int size : {1, 2}) {
      const WorldReport report = default_launcher()
                                     .launch({.size = size, .name = "throws"},
                                             [](Rank& rank) {
                                               if (rank.rank() == rank.size() - 1)
                                                 throw std::runtime_error("planted");
                                               rank.comm().barrier({});
                                             })
                                     ->wait();
      if (report.ok() || report.culprit != size - 1) return __LINE__ % 100;
    }
    const Case item = item_on(Device::Kind::kCuda);
    return equality_of(digests_of(item), digests_of(item)).difference.empty() ? 0 : __LINE__ % 100;
  });

  expect_codes(ranks, 0);
}

// In the midst of its first calls.
TEST_F(DevicePersistent, ARankThatDiesEndsTheOthers) {
  const auto ranks = run([this](AttachedJob& job) {
    if (job.rank() == 1) {
      std::thread([this, before = fabric_.num_ids()] {
        while (fabric_.num_ids() == before) std::this_thread::yield();
        ::raise(SIGKILL);
      }).detach();
    }
    (void)digests_of(item_on(Device::Kind::kCuda));
    return 0;
  });

  ASSERT_EQ(ranks.size(), 2U);
  EXPECT_EQ(ranks[1].signal, SIGKILL);
  EXPECT_NE(ranks[0].code, 0);
}

}  // namespace
}  // namespace isoshard
