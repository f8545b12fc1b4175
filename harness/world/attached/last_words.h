// SPDX-License-Identifier: Apache-2.0
/// What a process of a job says when a signal ends it: rank, host, signal, phase and collective.
#pragma once
#include <string>
#include <string_view>

#include "core/comm/journal.h"

namespace isoshard {

/// The name of this host.
[[nodiscard]] std::string host_name();

/// Makes fatal signals and std::terminate write one line and a backtrace to standard error and end
/// the process with exit code 4, which its launcher hands on while it ends the others. SIGTERM,
/// SIGINT and SIGHUP, by which a launcher ends those, write their line and leave with 128 + signal.
/// Ranks   local; called once.
void install_last_words(int rank, int size);

/// What the line says from now on. The journal must live until it is taken away with null.
void set_phase_of_last_words(std::string_view phase) noexcept;
void set_journal_of_last_words(const Journal* journal) noexcept;

}  // namespace isoshard
