// SPDX-License-Identifier: Apache-2.0
// Three ways to record a run.
#include "harness/run/run_subject.h"

namespace isoshard {
namespace {

bool is_of_one(const RunSpec& spec) {
  return spec.mesh.world_size() == 1 && !spec.body_of_all;
}

}  // namespace

Reference record_reference(RunSpec plain, Launcher& launcher) {
  plain.on_each_host = is_of_one(plain);
  return Reference(record(launcher, plain, {.keep = Keep::kEverything}));
}

void add_response(Reference& reference, RunSpec perturbed, Launcher& launcher) {
  perturbed.on_each_host = is_of_one(perturbed);
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
