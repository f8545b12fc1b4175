// SPDX-License-Identifier: Apache-2.0
/// Training configs of torchtitan (TOML) as options of `converge`.
#pragma once
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace isoshard {

struct TorchtitanConfig {
  /// Options and their values, in the order of the keys below; what the file has besides data
  /// parallelism becomes one `test`.
  std::vector<std::pair<std::string, std::string>> options;
  /// Keys that were read and cannot matter here, each with why.
  std::vector<std::string> unused;
};

/// Reads the keys of torchtitan's train configs: training.local_batch_size (or batch_size), steps,
/// seq_len, max_norm, optimizer.lr, lr_scheduler.warmup_steps, the degrees of parallelism,
/// pipeline_parallel_schedule, activation_checkpoint.mode and others (docs/internals/converge.md
/// has the list). Older places of a key are taken, too.
///
/// Errors   FileError that starts with the path: no TOML; an unknown key, with a suggestion; a
/// value
///          of another type or one that this build lacks, with what there is; one thing said twice.
[[nodiscard]] TorchtitanConfig torchtitan_config(const std::filesystem::path& path);
[[nodiscard]] TorchtitanConfig parse_torchtitan_config(std::string_view text,
                                                       const std::filesystem::path& origin);

/// Every key that is known, as "training.steps"; "profiling.*" for all of a section.
[[nodiscard]] std::vector<std::string> torchtitan_keys();

}  // namespace isoshard
