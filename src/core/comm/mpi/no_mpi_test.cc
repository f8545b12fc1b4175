// SPDX-License-Identifier: Apache-2.0
/// A build without MPI says so, and what to install.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "core/comm/attached_job.h"
#include "core/comm/backend.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

const auto kSaysWhatToInstall = AllOf(HasSubstr("backend mpi is not part of this build"),
                                      HasSubstr("libopenmpi-dev"), HasSubstr("openmpi-bin"));

TEST(WithoutMpi, AttachingIsNotBuilt) {
  EXPECT_THAT([] { (void)attach_mpi_job(); }, ThrowsMessage<NotBuiltError>(kSaysWhatToInstall));
  EXPECT_THAT([] { (void)attach_mpi_world(); }, ThrowsMessage<NotBuiltError>(kSaysWhatToInstall));
}

TEST(WithoutMpi, TheReasonCanBeAskedFor) {
  EXPECT_THAT(std::string(why_mpi_is_not_built()), kSaysWhatToInstall);
}

}  // namespace
}  // namespace isoshard
