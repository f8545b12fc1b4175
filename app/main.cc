// SPDX-License-Identifier: Apache-2.0
/// The program: one table of commands.
#include <clocale>
#include <string>
#include <vector>

#include "app/commands.h"
#include "harness/world/interrupt.h"
#include "harness/world/warm_up.h"

int main(int argc, char** argv) {
  isoshard::make_controller();
  std::setlocale(LC_ALL, "C");
  isoshard::install_interrupt_handler();
  const std::vector<isoshard::Command> commands = {isoshard::verify_command(),     isoshard::compare_command(), isoshard::oracle_command(),
                                                   isoshard::experiment_command(), isoshard::list_command(),    isoshard::doctor_command()};
  return isoshard::run_command_line(commands, {argv + 1, argv + argc});
}
