// SPDX-License-Identifier: Apache-2.0
/// Variables of launchers: who a rank is, where ranks meet, and what is refused by name.
#include "core/comm/nccl/rank_variables.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "core/base/error.h"
#include "core/comm/backend.h"
#include "core/comm/nccl/gpu_api.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;
using Variables = std::map<std::string, std::string>;

RankVariables read(const Variables& set) {
  return read_rank_variables([&](const char* name) -> const char* {
    const auto found = set.find(name);
    return found == set.end() ? nullptr : found->second.c_str();
  });
}

const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"MASTER_ADDR", "node0"},
                             {"MASTER_PORT", "1234"}};
const Variables kMpirun = {{"OMPI_COMM_WORLD_RANK", "1"},
                           {"OMPI_COMM_WORLD_SIZE", "2"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};

Variables with(Variables set, const std::string& name, const std::string& value) {
  set[name] = value;
  return set;
}

TEST(RankVariables, OfTorchrunSayEverything) {
  const RankVariables found = read(kTorchrun);
  EXPECT_EQ(found.rank, 5);
  EXPECT_EQ(found.size, 8);
  EXPECT_EQ(found.local_rank, 1);
  EXPECT_EQ(found.address, "node0");
  EXPECT_EQ(found.port, 1234);
}

// Its agent listens at MASTER_PORT.
TEST(RankVariables, OfTorchrunWithAStoreOfItsAgentMeetOnePortAbove) {
  const Variables agent = with(kTorchrun, "TORCHELASTIC_USE_AGENT_STORE", "True");
  EXPECT_EQ(read(agent).port, 1235);
  EXPECT_EQ(read(with(agent, "ISOSHARD_MASTER_PORT", "77")).port, 77);
  EXPECT_EQ(read(with(kTorchrun, "TORCHELASTIC_USE_AGENT_STORE", "False")).port, 1234);
}

TEST(RankVariables, OfMpirunOnOneHostNeedNoAddress) {
  const RankVariables found = read(kMpirun);
  EXPECT_EQ(found.rank, 1);
  EXPECT_EQ(found.address, "127.0.0.1");
  EXPECT_EQ(found.port, 29500);
}

TEST(RankVariables, OfMpirunOnSeveralHostsNeedOne) {
  const Variables on_two = with(kMpirun, "OMPI_COMM_WORLD_LOCAL_SIZE", "1");
  EXPECT_THAT([&] { (void)read(on_two); },
              ThrowsMessage<UsageError>(
                  AllOf(HasSubstr("MASTER_ADDR"), HasSubstr("mpirun -x MASTER_ADDR=HOST"))));
  EXPECT_EQ(read(with(on_two, "MASTER_ADDR", "node0")).address, "node0");
}

TEST(RankVariables, OfSrunAreRead) {
  const RankVariables found = read({{"SLURM_PROCID", "3"},
                                    {"SLURM_NTASKS", "4"},
                                    {"SLURM_LOCALID", "1"},
                                    {"MASTER_ADDR", "node0"}});
  EXPECT_EQ(found.rank, 3);
  EXPECT_EQ(found.local_rank, 1);
}

TEST(RankVariables, OfTwoJobsDiffer) {
  EXPECT_NE(read(with(kTorchrun, "TORCHELASTIC_RUN_ID", "a")).job,
            read(with(kTorchrun, "TORCHELASTIC_RUN_ID", "b")).job);
  EXPECT_NE(read(with(kTorchrun, "TORCHELASTIC_RESTART_COUNT", "0")).job,
            read(with(kTorchrun, "TORCHELASTIC_RESTART_COUNT", "1")).job);
}

TEST(RankVariables, ThatContradictEachOtherAreRefused) {
  Variables both = kTorchrun;
  both.insert(kMpirun.begin(), kMpirun.end());
  EXPECT_THAT([&] { (void)read(both); },
              ThrowsMessage<UsageError>(HasSubstr("torchrun and mpirun must agree")));
}

TEST(RankVariables, OutOfRangeOrMissingAreRefusedByName) {
  EXPECT_THAT([] { (void)read(with(kTorchrun, "RANK", "8")); },
              ThrowsMessage<UsageError>(HasSubstr("RANK must be a number from 0 to 7, got '8'")));
  EXPECT_THAT([] { (void)read(with(kTorchrun, "MASTER_PORT", "12x")); },
              ThrowsMessage<UsageError>(HasSubstr("MASTER_PORT")));
  Variables no_local = kTorchrun;
  no_local.erase("LOCAL_RANK");
  EXPECT_THAT([&] { (void)read(no_local); },
              ThrowsMessage<UsageError>(HasSubstr("LOCAL_RANK must be set")));
  EXPECT_THAT([] { (void)read({}); },
              ThrowsMessage<UsageError>(HasSubstr("torchrun --nproc-per-node")));
}

TEST(WithoutNccl, AttachingIsNotBuiltAndTheReasonCanBeAskedFor) {
  ASSERT_FALSE(gpu_api());
  EXPECT_THAT([] { (void)attach_nccl_world(); },
              ThrowsMessage<NotBuiltError>(HasSubstr("backend nccl is not part of this program")));
  EXPECT_THAT(std::string(why_nccl_is_not_built()), HasSubstr("./isoshard --gpu"));
}

}  // namespace
}  // namespace isoshard
