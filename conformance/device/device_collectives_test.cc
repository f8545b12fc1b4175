// SPDX-License-Identifier: Apache-2.0
// How ranks meet whose tensors are on a device: through NCCL or host memory, and with the same
// bits. The device is that of tests, and a stand-in takes the place of CUDA and NCCL.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/comm/nccl/nccl_world.h"
#include "harness/fault/random_delays.h"
#include "harness/testing/device/test_device.h"
#include "harness/testing/run_world.h"
#include "harness/verdict/equal_runs.h"
#include "suite/record/observed_comm.h"
#include "suite/reference/device/device_collectives.h"
#include "suite/reference/device/device_rank.h"
#include "suite/testing/every_subject.h"
#include "suite/testing/gpu/gpu_stand_in.h"
#include "suite/testing/nd_cases.h"

namespace isoshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using namespace std::chrono_literals;

// Before the first world, in the controller: ranks are forked with it.
const c10::Device kStandInDevice = test_device();

// ---- the choice

CollectivesFacts facts(int ranks, int gpus, std::string why_not_shared = "") {
  return {.ranks = ranks, .gpus = gpus, .has_nccl = true, .why_not_shared = [why_not_shared] {
            return why_not_shared;
          }};
}

CollectivesFacts unasked(CollectivesFacts given) {
  given.why_not_shared = []() -> std::string {
    ADD_FAILURE() << "nobody shares a GPU";
    return "";
  };
  return given;
}

TEST(DeviceCollectivesChoice, RanksWithAGpuEachMeetThroughNcclAndNobodyProbes) {
  for (const int gpus : {4, 8}) {
    const DeviceCollectives chosen = choose_collectives(unasked(facts(4, gpus)));

    EXPECT_EQ(chosen.words, "nccl, a GPU for each rank");
    EXPECT_EQ(chosen.transport.backend, Backend::kNccl);
    EXPECT_TRUE(chosen.transport.make);
  }
}

TEST(DeviceCollectivesChoice, OfRanksThatShareAGpuTheProbeDecides) {
  const DeviceCollectives shared = choose_collectives(facts(4, 3));
  const DeviceCollectives staged = choose_collectives(facts(4, 3, "Duplicate GPU detected"));

  EXPECT_EQ(shared.words, "nccl, 4 ranks on 3 GPUs, which a probe found to work");
  EXPECT_TRUE(shared.transport.make);
  EXPECT_EQ(staged.words,
            "shm, staged through host memory: ranks that share a GPU cannot use NCCL here "
            "(Duplicate GPU detected)");
  EXPECT_FALSE(staged.transport.make);
}

TEST(DeviceCollectivesChoice, WithoutNcclOrOnProcessesOfMpirunTheyAreStaged) {
  CollectivesFacts without = unasked(facts(2, 2));
  without.has_nccl = false;
  CollectivesFacts attached = without;
  attached.forks_ranks = false;
  CollectivesFacts persistent = unasked(facts(2, 1));
  persistent.forks_ranks = false;

  EXPECT_EQ(choose_collectives(without).words,
            "shm, staged through host memory: this program has no NCCL");
  EXPECT_THAT(choose_collectives(attached).words, StartsWith("mpi, staged through host memory: "));
  EXPECT_THAT(choose_collectives(persistent).words, StartsWith("nccl: "));
  for (const CollectivesFacts& given : {without, attached, persistent, unasked(facts(1, 1))})
    EXPECT_FALSE(choose_collectives(given).transport.make);
}

// ---- the probe, and runs

using Plant = std::function<void(GpuStandIn& gpu, int rank)>;

/// This program has one GPU with NCCL, for which something stands in.
class WithOneGpu : public ::testing::Test {
 protected:
  void SetUp() override { plant({}); }
  void TearDown() override {
    set_gpu_api({});
    forget_shared_gpus();
  }
  /// Each rank's GPU gets this fault.
  void plant(const Plant& fault) {
    set_gpu_api([this, fault](int rank, int /*size*/) {
      auto gpu = std::make_shared<GpuStandIn>(fabric_, rank);
      gpu->set_other_memory(is_on_test_device);
      if (fault) fault(*gpu, rank);
      return gpu;
    });
    forget_shared_gpus();
  }
  GpuFabric fabric_{GpuFabric::kMaxRanks};
};

class SharedGpuProbe : public WithOneGpu {};

TEST_F(SharedGpuProbe, OfEachWorldOfARunIsTold) {
  EXPECT_EQ(words_of_worlds(Device::Kind::kCuda, {2, 1, 2}),
            "1 rank: none: a world of one rank; 2 ranks: nccl, 2 ranks on 1 GPU, which a probe "
            "found to work");
  set_gpu_api({});
  forget_shared_gpus();
  EXPECT_EQ(words_of_worlds(Device::Kind::kCuda, {4, 2}),
            "shm, staged through host memory: this program has no NCCL");
  EXPECT_EQ(words_of_worlds(Device::Kind::kCuda, {7, 1, 2}),
            "1 rank: none: a world of one rank; 2 and 7 ranks: shm, staged through host memory: "
            "this program has no NCCL");
}

TEST_F(SharedGpuProbe, FindsNothingWhereNcclWorks) {
  EXPECT_EQ(why_no_shared_gpus(2, 20s), "");
  EXPECT_GT(fabric_.num_ids(), 0U);
}

TEST_F(SharedGpuProbe, SaysWhatNcclSaysWhereItRefuses) {
  plant([](GpuStandIn& gpu, int) { gpu.faults().start_fails = true; });

  EXPECT_THAT(why_no_shared_gpus(2, 20s),
              HasSubstr("unhandled system error: the network has no interface"));
}

TEST_F(SharedGpuProbe, EndsProcessesThatHang) {
  for (const bool at_start : {true, false}) {
    plant([at_start](GpuStandIn& gpu, int rank) {
      (at_start ? gpu.faults().start_hangs : gpu.faults().kernels_hang) = rank == 1;
    });

    EXPECT_THAT(why_no_shared_gpus(2, 500ms),
                AllOf(HasSubstr("all_reduce"), ::testing::Not(HasSubstr("\n"))));
  }
}

TEST_F(SharedGpuProbe, NamesARankThatIsKilled) {
  plant([](GpuStandIn&, int rank) {
    if (rank == 1) ::raise(SIGKILL);
  });

  EXPECT_THAT(why_no_shared_gpus(2, 20s), AllOf(HasSubstr("rank 1"), HasSubstr("SIGKILL")));
}

TEST_F(SharedGpuProbe, LooksAtTheSums) {
  plant([](GpuStandIn& gpu, int) { gpu.faults().sums_one = true; });

  EXPECT_THAT(why_no_shared_gpus(2, 20s), HasSubstr("of a sum of 1000 must be 3, got 1"));
}

Case on_stand_in(Case item) {
  item.device = Device::Kind::kCuda;
  return item;
}

Case usual_step(const Combination& c) {
  Case item = step_case(c.subject, c.degrees, c.dtype, "gpt2");
  item.micro_batches = 2;
  item.data.unequal_labels = true;
  return item;
}

/// Of each subject one case on the first of its meshes with two axes, or of its meshes; and stages
/// of a pipeline with a ring of context, which send and receive.
std::vector<Case> cases_of_subjects() {
  std::map<std::string, Case> of_subject;
  for (const Case& c : every_subject(Coverage::kPairs, usual_step).cases) {
    const auto [found, is_first] = of_subject.emplace(c.subject, c);
    if (c.degrees.tp > 1 && c.degrees.dp > 1 && found->second.degrees.tp == 1) found->second = c;
  }
  std::vector<Case> result;
  for (const auto& [subject, c] : of_subject) result.push_back(c);
  result.push_back(in_pipeline(nd_case({.pp = 2, .cp = 2})));
  return result;
}

/// The step in host memory, and on the device.
RunEquality both_ways(const Case& item, const RunOptions& on_device = {}) {
  return equality_of(run_case(item, Reference(), digests_only({})),
                     run_case(on_stand_in(item), Reference(), digests_only(on_device)));
}

void expect_equal_bits(const Case& item, const RunOptions& on_device = {}) {
  const RunEquality equality = both_ways(item, on_device);
  EXPECT_EQ(equality.difference, "");
  EXPECT_GT(equality.tensors, 50);
}

class DeviceNccl : public WithOneGpu, public ::testing::WithParamInterface<Case> {};

TEST_P(DeviceNccl, HasTheBitsOfTheSameStepInHostMemory) {
  ASSERT_EQ(kStandInDevice.type(), c10::DeviceType::PrivateUse1);
  ASSERT_THAT(device_collectives(on_stand_in(GetParam())).words, StartsWith("nccl, "));
  const std::uint64_t of_probe = fabric_.num_ids();

  expect_equal_bits(GetParam());

  EXPECT_GT(fabric_.num_ids(), of_probe);
}
INSTANTIATE_TEST_SUITE_P(EverySubject, DeviceNccl, ::testing::ValuesIn(cases_of_subjects()),
                         case_name);

class DeviceNcclRun : public WithOneGpu {
 protected:
  static Case item() { return step_case("ddp", {.dp = 2}); }
};

TEST_F(DeviceNcclRun, TakesTensorsOfTheDeviceAsTheyAreButUnderAFault) {
  const WorldOptions plain{.size = 2, .transport = nccl_transport()};
  WorldOptions faulty = plain;
  faulty.decorate = with_random_delays({}, 1, 1);

  run_world(plain, [](Rank& rank) {
    const auto logged = observed(rank.comm(), [](const CollectiveCall&, int) {});
    for (Communicator* const world : {&rank.comm(), logged.get()}) {
      DeviceRank device(on_stand_in(item()), *world);
      EXPECT_EQ(&device.comm(), world);
    }
  });
  run_world(faulty, [](Rank& rank) {
    DeviceRank device(on_stand_in(item()), rank.comm());
    EXPECT_NE(&device.comm(), &rank.comm());
  });
}

// What a fault changes is in host memory, though NCCL moves it.
TEST_F(DeviceNcclRun, UnderAFaultOnTheCommunicatorIsStagedAboveNccl) {
  const std::uint64_t before = (void(device_collectives(on_stand_in(item()))), fabric_.num_ids());
  RunOptions delayed;
  delayed.decorate = with_random_delays({}, 1, 1);

  expect_equal_bits(item(), delayed);

  EXPECT_GT(fabric_.num_ids(), before);
}

TEST_F(DeviceNcclRun, IsStagedWhereTheProbeFails) {
  plant([](GpuStandIn& gpu, int) { gpu.faults().start_fails = true; });
  EXPECT_THAT(device_collectives(on_stand_in(item())).words,
              AllOf(StartsWith("shm, staged"), HasSubstr("has no interface")));
  const std::uint64_t of_probe = fabric_.num_ids();

  expect_equal_bits(item());

  EXPECT_EQ(fabric_.num_ids(), of_probe);
}

// The sums of another arithmetic would show: the test above can fail.
TEST_F(DeviceNcclRun, OfWrongSumsDiffers) {
  ASSERT_THAT(device_collectives(on_stand_in(item())).words, StartsWith("nccl, "));
  set_gpu_api([this](int rank, int /*size*/) {
    auto gpu = std::make_shared<GpuStandIn>(fabric_, rank);
    gpu->set_other_memory(is_on_test_device);
    gpu->faults().sums_one = true;
    return gpu;
  });

  EXPECT_NE(both_ways(item()).difference, "");
}

TEST_F(DeviceNcclRun, IsInTheReportOnce) {
  const Case wide = step_case("autotp", {.dp = 2, .tp = 2});

  EXPECT_TRUE(collectives_environment({item()}).empty());
  EXPECT_EQ(
      collectives_environment({item(), on_stand_in(item()), on_stand_in(item()), on_stand_in(wide)})
          .at("device.collectives"),
      "nccl, 2 ranks on 1 GPU, which a probe found to work; nccl, 4 ranks on 1 GPU, which a "
      "probe found to work");
}

}  // namespace
}  // namespace isoshard
