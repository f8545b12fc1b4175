// SPDX-License-Identifier: Apache-2.0
/// Finds dumped runs in a folder, and which of them is the trusted one of another.
#pragma once
#include <filesystem>
#include <vector>

namespace isoshard {

struct DumpedPair {
  std::filesystem::path reference, actual;
};

/// The bundles in `folder`, each run with the first plain reference, by name, whose settings are
/// its own; emulated ones are left out.
/// Errors   UsageError if there is no run; FileError for a malformed manifest, and for a run
///          without a reference, with what differs.
[[nodiscard]] std::vector<DumpedPair> dumped_pairs(const std::filesystem::path& folder);

}  // namespace isoshard
