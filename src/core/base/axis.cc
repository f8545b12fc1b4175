// SPDX-License-Identifier: Apache-2.0
// Names of the mesh axes.
#include "core/base/axis.h"

#include <fmt/format.h>

#include <array>
#include <ostream>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/suggest.h"

namespace isoshard {
namespace {
constexpr std::array<std::string_view, 8> kAxisNames{"world", "dp", "tp",           "pp",
                                                     "cp",    "ep", "dp_replicate", "dp_shard"};
}

std::string_view name_of(Axis axis) noexcept {
  return kAxisNames[static_cast<std::size_t>(axis)];
}

void PrintTo(Axis axis, std::ostream* out) {
  *out << name_of(axis);
}

Axis parse_axis(std::string_view name) {
  for (std::size_t i = 0; i < kAxisNames.size(); ++i) {
    if (name == kAxisNames[i]) return static_cast<Axis>(i);
  }
  const std::vector<std::string> known(kAxisNames.begin(), kAxisNames.end());
  throw UsageError(fmt::format("unknown mesh axis '{}'{}; it must be one of {}", name,
                               did_you_mean(name, known), join_names(known)));
}

}  // namespace isoshard
