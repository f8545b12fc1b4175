// SPDX-License-Identifier: Apache-2.0
/// Records that are the largest of the ranks' values.
#pragma once
#include <string>
#include <vector>

#include "core/mesh/layout.h"
#include "harness/trace/trace.h"

namespace isoshard {

/// Whether the value is the largest of the ranks' values.
[[nodiscard]] bool is_maximum(const Layout& layout) noexcept;

/// Whether one of the patterns "KIND/NAME=max" (JudgePolicy::partial) stands for the record. A
/// maximum hides copies that are too small, so only a pattern that says so allows it.
[[nodiscard]] bool may_be_maximum(const std::vector<std::string>& patterns, const RecordKey& key);

}  // namespace isoshard
