// SPDX-License-Identifier: Apache-2.0
/// One child that counts and ends.
#include "harness/world/gpus.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace isoshard {
namespace {

constexpr int kMostGpus = 64;  // an exit code holds it

GpuCount counted() {
  if (c10::impl::hasDeviceGuardImpl(c10::DeviceType::PrivateUse1)) return {1, ""};
  if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA))
    return {0, "it was built without CUDA (./isoshard --gpu builds isoshard-gpu)"};
  const pid_t child = ::fork();
  if (child < 0)
    return {0,
            fmt::format("no process could be started to look for GPUs ({})", std::strerror(errno))};
  if (child == 0) {
    const int count = c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->deviceCount();
    ::_exit(std::min(count, kMostGpus));
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (!WIFEXITED(status))
    return {0,
            fmt::format("the driver ended the process that looked for GPUs (status {})", status)};
  if (WEXITSTATUS(status) == 0)
    return {0, "CUDA finds no GPU, or no driver that is new enough for it"};
  return {WEXITSTATUS(status), ""};
}

}  // namespace

const GpuCount& count_gpus() {
  static const GpuCount count = counted();
  return count;
}

}  // namespace isoshard
