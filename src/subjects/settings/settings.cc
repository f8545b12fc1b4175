// SPDX-License-Identifier: Apache-2.0
// Names of the training settings.
#include "subjects/settings/settings.h"

#include <fmt/format.h>

#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/suggest.h"

namespace isoshard {

std::string_view name_of(LossMean mean) noexcept {
  switch (mean) {
    case LossMean::kGlobal:
      return "global";
    case LossMean::kLocal:
      return "local";
    case LossMean::kSum:
      return "sum";
  }
  return "unknown";
}

LossMean parse_loss_mean(std::string_view name) {
  for (const LossMean mean : {LossMean::kGlobal, LossMean::kLocal, LossMean::kSum}) {
    if (name_of(mean) == name) return mean;
  }
  const std::vector<std::string> known = {"global", "local", "sum"};
  throw UsageError(fmt::format("unknown loss mean '{}'{}; known are {}", name,
                               did_you_mean(name, known), join_names(known)));
}

}  // namespace isoshard
