// SPDX-License-Identifier: Apache-2.0
// The MLP on two and on four ranks, each held bit by bit to its own run in one process.
#include "own_mlp.h"

#include <iostream>

#include "harness/fault/collective_fault.h"
#include "harness/report/formats/report_formats.h"
#include "harness/verify/verify_runs.h"
#include "harness/world/warm_up.h"

using namespace isoshard;

int main() {
  make_controller();
  RunPlan plan{
      .reference = own::mlp_run(1), .runs = {own::mlp_run(2), own::mlp_run(4)}, .dump = "out"};
  const Report right = verify_runs(plan);
  write_report("out", right);  // report.txt and report.json
  plan.fault = {"lost_sum", skip_calls(Purpose::kRowParallelForward, Axis::kTp)};
  plan.dump = "out/lost_sum";
  const Report wrong = verify_runs(plan);
  std::cout << text_of(right) << text_of(wrong);
  return right.exit_code == kExitConforms && wrong.exit_code == kExitDiverges ? 0 : 1;
}
