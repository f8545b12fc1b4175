// SPDX-License-Identifier: Apache-2.0
/// The implementations that can be judged, by name.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fixtures/cases/case.h"
#include "harness/world/rank.h"
#include "harness/world/subject.h"
#include "observe/sink.h"

namespace isoshard {

struct SubjectInfo {
  std::string name;     ///< "autotp"
  std::string summary;  ///< what it copies, in one line
};

[[nodiscard]] std::vector<SubjectInfo> subjects();
/// Errors   UsageError with a suggestion for a name that is not registered.
void require_subject(std::string_view name);
/// Ranks    collective over rank.comm() (it makes the mesh).
[[nodiscard]] std::unique_ptr<Subject> make_subject(const Case& item, Rank& rank, Sink* sink);

}  // namespace isoshard
