// SPDX-License-Identifier: Apache-2.0
/// Which environments make an MPI world, and which would silently make worlds of one rank.
#include "core/comm/mpi/launcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "core/base/error.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

Environment of(const std::map<std::string, const char*>& variables) {
  return [variables](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second;
  };
}

TEST(Launcher, MpirunAndSrunWithPmixAreTaken) {
  check_launcher(of({{"OMPI_COMM_WORLD_SIZE", "4"}}));
  check_launcher(of({{"PMIX_RANK", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}}));
}

TEST(Launcher, TorchrunIsRefusedByName) {
  EXPECT_THAT(
      [] {
        check_launcher(of({{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}}));
      },
      ThrowsMessage<UsageError>(AllOf(HasSubstr("WORLD_SIZE=4 of torchrun"),
                                      HasSubstr("4 worlds of one rank"),
                                      HasSubstr("mpirun -n 4"))));
}

TEST(Launcher, SrunWithoutPmixIsRefusedByName) {
  EXPECT_THAT(
      [] {
        check_launcher(of({{"SLURM_NTASKS", "3"}, {"SLURM_PROCID", "1"}}));
      },
      ThrowsMessage<UsageError>(AllOf(HasSubstr("SLURM_NTASKS=3"), HasSubstr("srun --mpi=pmix"))));
}

TEST(Launcher, AProcessOfNoLauncherIsRefused) {
  EXPECT_THAT([] { check_launcher(of({})); },
              ThrowsMessage<UsageError>(HasSubstr("use mpirun -n RANKS")));
}

TEST(AttachedWorld, MustHaveTheSizeThatIsExpected) {
  const Environment mpirun = of({{"OMPI_COMM_WORLD_SIZE", "4"}});
  check_attached_world(mpirun, 1, 4, 4);
  check_attached_world(mpirun, 1, 4, 0);
  EXPECT_THAT([&] { check_attached_world(mpirun, 0, 4, 2); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("must have 2 ranks"), HasSubstr("got 4"))));
}

TEST(AttachedWorld, ContradictionsOfLaunchersAreNamed) {
  const std::map<std::string, const char*> both = {
      {"OMPI_COMM_WORLD_SIZE", "1"}, {"RANK", "2"}, {"WORLD_SIZE", "4"}};
  EXPECT_THAT([&] { check_attached_world(of(both), 0, 1, 0); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("WORLD_SIZE=4"), HasSubstr("1 from MPI"))));
  EXPECT_THAT(
      [] {
        check_attached_world(of({{"RANK", "2"}, {"WORLD_SIZE", "4"}}), 0, 4, 0);
      },
      ThrowsMessage<UsageError>(HasSubstr("RANK=2")));
  EXPECT_THAT(
      [] {
        check_attached_world(of({{"PMIX_RANK", "0"}, {"SLURM_NTASKS", "4"}}), 0, 1, 0);
      },
      ThrowsMessage<UsageError>(HasSubstr("SLURM_NTASKS=4")));
}

// An mpirun of another MPI than the program was linked with starts worlds of one rank.
TEST(AttachedWorld, OfAnotherMpiThanMpirunsIsNamed) {
  EXPECT_THAT(
      [] {
        check_attached_world(of({{"OMPI_COMM_WORLD_SIZE", "4"}}), 0, 1, 0);
      },
      ThrowsMessage<UsageError>(
          AllOf(HasSubstr("OMPI_COMM_WORLD_SIZE=4"), HasSubstr("1 from MPI"))));
  EXPECT_THAT(
      [] {
        check_attached_world(of({{"PMI_RANK", "0"}, {"PMI_SIZE", "4"}}), 0, 1, 0);
      },
      ThrowsMessage<UsageError>(AllOf(HasSubstr("PMI_SIZE=4"), HasSubstr("1 from MPI"))));
  EXPECT_THAT(
      [] {
        check_attached_world(of({{"PMI_RANK", "2"}}), 0, 1, 0);
      },
      ThrowsMessage<UsageError>(HasSubstr("PMI_RANK=2")));
}

TEST(AttachedWorld, MpirunInsideAJobOfSlurmChoosesItsOwnNumber) {
  check_attached_world(of({{"OMPI_COMM_WORLD_SIZE", "4"}, {"SLURM_NTASKS", "2"}}), 0, 4, 4);
}

}  // namespace
}  // namespace isoshard
