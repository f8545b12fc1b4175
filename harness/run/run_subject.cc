// SPDX-License-Identifier: Apache-2.0
// Three ways to record a run.
#include "harness/run/run_subject.h"

namespace isoshard {

Reference record_reference(const RunSpec& plain, Launcher& launcher) {
  return Reference(record(launcher, plain, {.keep = Keep::kEverything}));
}

void add_response(Reference& reference, const RunSpec& perturbed, Launcher& launcher) {
  // no run sees the responses of others: it would mask by them, and so depend on their order
  const Reference bare(reference.trace());
  reference.add_response(
      record(launcher, perturbed,
             {.reference = &bare, .keep = Keep::kNothing, .purpose = RunPurpose::kResponse}));
}

Trace run_subject(const RunSpec& run, const Reference& reference, Launcher& launcher) {
  return record(launcher, run, {.reference = &reference, .keep = Keep::kWhatDiffers});
}

}  // namespace isoshard
