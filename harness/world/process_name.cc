// SPDX-License-Identifier: Apache-2.0
/// Names of processes.
#include "harness/world/process_name.h"

#include <fmt/format.h>
#include <sys/prctl.h>

#include <algorithm>

namespace isoshard {

std::string process_name(std::string_view subject, int run) {
  constexpr std::size_t kMostBytes = 15;  // PR_SET_NAME cuts there
  constexpr std::string_view kPrefix = "iso:";
  const std::string number = fmt::format("/{}", run);
  const std::size_t room = kMostBytes - kPrefix.size() - std::min(number.size(), kMostBytes / 2);
  return fmt::format("{}{}{}", kPrefix, subject.substr(0, room), number);
}

void name_process(const std::string& name) noexcept {
  if (!name.empty()) ::prctl(PR_SET_NAME, name.c_str());
}

}  // namespace isoshard
