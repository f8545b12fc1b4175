// SPDX-License-Identifier: Apache-2.0
// The options and the machine, as a report keeps them.
#include "harness/cli/provenance.h"

#include <fmt/format.h>

#include "harness/cli/output.h"
#include "harness/world/machine.h"

namespace isoshard {

Provenance provenance_of(const ParsedOptions& options) {
  Provenance provenance{.command = launcher_words(),
                        .settings = options.settings,
                        .versions = options.versions};
  provenance.command.push_back(started_as(options.program));
  provenance.command.push_back(options.command);
  provenance.command.insert(provenance.command.end(), options.repeat.begin(), options.repeat.end());
  const Machine machine = this_machine();
  provenance.versions["system"] = machine.system;
  provenance.versions["CPU"] =
      fmt::format("{} ({} cores; {})", machine.cpu, machine.cores, machine.cpu_features);
  return provenance;
}

}  // namespace isoshard
