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
  golden.lines[2].projections =
      stored({1, -2.5, 3, 1e6, -1e6, 0, -0.0, 0x1.123456789abcdp+3}, 0x1.8p-12);
  golden.lines[2].copies = "ab-a";
  golden.lines.push_back(golden.lines[2]);
  golden.lines[3].name = "step 2 again";
  golden.lines[3].same_as = "step 2";
  return golden;
}

}  // namespace isoshard
