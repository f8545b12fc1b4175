// SPDX-License-Identifier: Apache-2.0
/// Test helper: a small valid golden.
#pragma once
#include <string>

#include "harness/golden/golden.h"

namespace isoshard {

inline Golden test_golden(std::string name = "curve_x") {
  Golden golden;
  golden.name = std::move(name);
  golden.config = {{"dtype", "\"fp32\""}, {"steps", "2"}};
  golden.weights_sha256 = std::string(64, 'a');
  golden.inputs_sha256 = std::string(64, 'b');
  golden.fingerprint = {{"cpu", "A"}, {"libtorch", "2.11.0"}};
  golden.arithmetic = "13ebf250fc0cbd41";
  golden.drift_rule = "made up";
  golden.parity = {true, "equal to the reference"};
  golden.build = {std::string(40, 'c'), "clean", ""};
  golden.recorded = "2026-01-02T03:04:05Z";
  golden.lines = {{"data ids", "0000000000000001", {}},
                  {"step 1", "", {{"loss", 0x1.0000000000001p+1, 0x1p-20}, {"accuracy", -0.0, 0}}},
                  {"step 2", "00000000000000ff", {{"norm", 0x0.0000000000001p-1022, 0x1p-1022}}}};
  return golden;
}

}  // namespace isoshard
