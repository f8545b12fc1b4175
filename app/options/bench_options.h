// SPDX-License-Identifier: Apache-2.0
/// Options of `bench`: the flags of the tool of docs/internals/seeds.md, section 4, with its
/// defaults.
#pragma once
#include <string>
#include <vector>

#include "harness/cli/options.h"
#include "suite/bench/bench.h"

namespace isoshard {

void declare_bench_options(OptionTable& table);

/// What to time. Flags that are not given are the tool's: autotp, Qwen3-32B, bf16, batch 1 x 2048
/// random ids, AdamW at 1e-5, 100 steps of which 5 are not counted, ZeRO 1 and a split vocabulary
/// for autotp.
/// Errors   UsageError: what is wrong with a flag, degrees that do not fit each other or the model;
///          FileError of a model's folder.
[[nodiscard]] BenchPlan bench_plan_of(const ParsedOptions& options);

/// The flags that were given and decide what is timed, so that they ask for the same again.
[[nodiscard]] std::vector<std::string> repeating_flags(const ParsedOptions& options);

/// The flags of a text such as "--impl autotp --tp 2", split at white space.
/// Errors   UsageError as parse_options.
[[nodiscard]] ParsedOptions parse_bench_flags(const std::vector<std::string>& words);

}  // namespace isoshard
