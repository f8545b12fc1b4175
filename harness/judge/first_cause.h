// SPDX-License-Identifier: Apache-2.0
/// What is said around the cause of the first finding.
#pragma once
#include <map>
#include <string>

#include "harness/verdict/verdict.h"

namespace isoshard::detail {

/// The cause of each finding that was diagnosed.
using Causes = std::map<RecordKey, std::string>;

/// What stands around the first finding belongs to its cause: whether everything earlier is right,
/// and how many tensors of the same kind share it. Without a diagnosis it is given that of another
/// finding of its step and stage, and said to be of that tensor; nothing, if none has one.
void summarise_first(Verdict& verdict, const Causes& causes);

}  // namespace isoshard::detail
