// SPDX-License-Identifier: Apache-2.0
/// Last words of a rank: backtraces on fatal signals, on std::terminate and when the controller
/// asks.
#pragma once
#include <csignal>
#include <string>
#include <string_view>

#include "harness/world/forked/rank_slot.h"

namespace isoshard {

/// The signal that the controller sends to a rank that hangs. The rank answers with a backtrace on
/// stderr and continues.
inline constexpr int kDumpSignal = SIGQUIT;

/// Loads the libraries that backtrace() needs, so that a crashing rank does not load them. The
/// controller calls it before the fork.
void prepare_backtraces();

/// Makes SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT write a backtrace to stderr before they end the
/// process as usual, and std::terminate leave the exception's type and text in `slot`. Ranks
/// called once, in the rank's process.
void install_crash_handlers(int rank, RankSlot& slot);

/// "SIGSEGV"; "signal 99" for one without a name.
[[nodiscard]] std::string signal_name(int signal);

/// The last backtrace in a captured stderr; empty if there is none.
[[nodiscard]] std::string backtrace_in(std::string_view standard_error);

/// Type and what() of the exception being handled; only the type if it is not a std::exception.
[[nodiscard]] std::string current_exception_in_words();

}  // namespace isoshard
