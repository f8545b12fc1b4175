// SPDX-License-Identifier: Apache-2.0
/// What commands print and write.
#pragma once
#include <string>

#include "harness/report/report.h"
#include "harness/report/text/text_report.h"

namespace isoshard {

/// Prints to standard output at once, so that the reader sees a report grow.
/// Errors   InfrastructureError if it cannot be written, for example to a full disk.
void print(const std::string& text);

/// Text for this terminal: with colors if standard output is one.
[[nodiscard]] TextOptions terminal_options(bool all_tensors = false);

}  // namespace isoshard
