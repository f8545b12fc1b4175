// SPDX-License-Identifier: Apache-2.0
/// The program: one table of commands.
#include <ATen/Parallel.h>

#include <clocale>
#include <string>
#include <vector>

#include "app/commands.h"
#include "harness/world/interrupt.h"

int main(int argc, char** argv) {
  // Forking needs a controller without worker threads: no op may run before this.
  at::set_num_threads(1);
  std::setlocale(LC_ALL, "C");
  isoshard::install_interrupt_handler();
  const std::vector<isoshard::Command> commands = {isoshard::verify_command(), isoshard::compare_command(), isoshard::oracle_command(),
                                                   isoshard::list_command()};
  return isoshard::run_command_line(commands, {argv + 1, argv + argc});
}
