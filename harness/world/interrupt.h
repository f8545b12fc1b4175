// SPDX-License-Identifier: Apache-2.0
/// SIGINT, SIGTERM and SIGHUP: the first ends the running worlds in order, the second ends the
/// program at once.
#pragma once

namespace isoshard {

/// From then on a SIGINT, SIGTERM or SIGHUP ends the program at once, with 130, 143 or 129 and a
/// line on stderr;
/// while a world runs or a KeepResults lives, it makes every running world stop its ranks and
/// return a report with `interrupted` set, and only a second one ends the program at once. Earlier
/// signals and KeepResults are forgotten. A SIGHUP that was ignored stays ignored (nohup). A
/// program calls it once, before the first world. Errors   InfrastructureError if no pipe can be
/// had.
void install_interrupt_handler();

/// While one lives, a program that has results to write after a signal stays alive and checks for
/// the signal between worlds (interrupt_signal()).
class KeepResults {
 public:
  KeepResults() noexcept;
  ~KeepResults();
  KeepResults(const KeepResults&) = delete;
  KeepResults& operator=(const KeepResults&) = delete;
};

/// The signal that came; 0 while none has.
[[nodiscard]] int interrupt_signal() noexcept;

/// Readable once a signal came; -1 if no handler is installed.
[[nodiscard]] int interrupt_fd() noexcept;

/// Back to a process that was never interrupted: SIGINT and SIGHUP ignored (a terminal sends them
/// to ranks too; the controller decides), SIGTERM with its default action. For ranks.
void leave_interrupts_to_controller() noexcept;

}  // namespace isoshard
