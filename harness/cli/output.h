// SPDX-License-Identifier: Apache-2.0
/// What commands print and write.
#pragma once
#include <fmt/format.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "harness/report/report.h"
#include "harness/report/text/text_report.h"

namespace isoshard {

/// Makes standard input, output and error usable whatever the program was started with. Closed ones
/// are opened on /dev/null. A reader that goes away and a limit on file sizes become errors of the
/// write that meets them, not signals. A program calls it before anything else.
void prepare_output();

/// Prints to standard output at once, so that the reader sees a report grow.
///
/// An output that cannot be written (a full disk, a reader that went away) ends nothing: the first
/// error is remembered, and what is printed after it is dropped.
void print(const std::string& text);
template <class... Args>
void print(fmt::format_string<Args...> format, Args&&... args) {
  print(fmt::format(format, std::forward<Args>(args)...));
}

/// Prints a line to standard error. An error on which nothing can be written is ignored.
void print_error(const std::string& line);

/// For a process that does not report, because another one does: nothing is printed from now on.
void print_nothing() noexcept;
/// All lines that were given to print_error, printed or not.
[[nodiscard]] std::string printed_errors();

/// --quiet and --verbose: how much this program tells. With --quiet there is no progress either.
void set_output_detail(Detail detail) noexcept;
[[nodiscard]] Detail output_detail() noexcept;
[[nodiscard]] inline bool is_quiet() noexcept {
  return output_detail() == Detail::kSummary;
}

/// The word that started this program, as a shell would find it from this folder.
void set_started_as(std::string word);
/// `otherwise` where it is not known.
[[nodiscard]] std::string started_as(const std::string& otherwise);
/// The words of the launcher that started this process as one of several: "mpirun", "-n", "4".
void set_launcher_words(std::vector<std::string> words);
/// Empty without a launcher.
[[nodiscard]] const std::vector<std::string>& launcher_words();

/// What became of standard output: 0, or the system's number of the first error.
[[nodiscard]] int output_error() noexcept;

/// For commands whose output is their product.
/// Errors   InfrastructureError if the output could not be written. A reader that went away
///          (`| head -1`) has what it wanted: no error.
void require_printed();

/// Columns of the terminal: COLUMNS if it is set, else what the terminal of standard output says,
/// else `otherwise`.
[[nodiscard]] std::size_t terminal_columns(std::size_t otherwise = 100);

/// Text for this terminal, as wide as it is: with colors if standard output is one that has them,
/// NO_COLOR is not set (https://no-color.org), and this process was not started by mpirun, which
/// gives its ranks a terminal wherever their output goes.
[[nodiscard]] TextOptions terminal_options();

}  // namespace isoshard
