// SPDX-License-Identifier: Apache-2.0
/// One table of commands.
#include "app/program.h"

#include <fmt/format.h>
#include <torch/headeronly/version.h>

#include <clocale>
#include <csignal>
#include <exception>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "app/commands.h"
#include "app/options/attach_options.h"
#include "harness/cli/output.h"
#include "harness/compare/bundle_command.h"
#include "harness/compare/respond_command.h"
#include "harness/golden/build_info.h"
#include "harness/verdict/exit_code.h"
#include "harness/world/interrupt.h"
#include "harness/world/warm_up.h"

namespace isoshard {
namespace {

/// Each with the heading that --help lists it under.
std::vector<Command> in_groups(
    const std::vector<std::pair<std::string, std::vector<Command>>>& groups) {
  std::vector<Command> all;
  for (const auto& [heading, commands] : groups) {
    for (Command command : commands) {
      command.group = heading;
      all.push_back(std::move(command));
    }
  }
  return all;
}

std::map<std::string, std::string> versions() {
  const BuildInfo build = build_info();
  return {
      {"LibTorch", TORCH_VERSION},
      {"sources", build.commit.empty() ? "not under version control"
                                       : fmt::format("commit {} ({})", build.commit, build.state)}};
}

}  // namespace

int run_program(const std::vector<std::string>& arguments) {
  try {
    if (const auto code = run_on_persistent_ranks(arguments, run_program)) return *code;
  } catch (const std::exception& error) {
    print_error(fmt::format("isoshard: {}", error.what()));
    return exit_code_of(error);
  }
  prepare_output();
  // who started this program may have left that children leave no status
  std::signal(SIGCHLD, SIG_DFL);
  make_controller();
  std::setlocale(LC_ALL, "C");
  install_interrupt_handler();
  const std::vector<Command> commands = in_groups(
      {{"judge runs", {verify_command(), train_command(), converge_command(), compare_command()}},
       {"test this program",
        {faults_command(), oracle_command(), golden_command(), experiment_command()}},
       {"measure", {bench_command()}},
       {"show results", {report_command(), plot_command()}},
       {"look things up", {list_command(), explain_command(), doctor_command()}},
       {"work on bundles", {respond_command("isoshard"), bundle_command("isoshard")}}});
  try {
    join_job(arguments);
  } catch (const std::exception& error) {
    print_error(fmt::format("isoshard: {}", error.what()));
    return leave_job(exit_code_of(error));
  }
  const int code = leave_job(run_command_line(commands, arguments, versions()));
  return interrupt_signal() == 0 ? code : combine_exit_codes(code, 128 + interrupt_signal());
}

}  // namespace isoshard
