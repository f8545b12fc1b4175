// SPDX-License-Identifier: Apache-2.0
/// Whether a run checks goldens or records new ones. Plain functions of environment and arguments.
#pragma once
#include <filesystem>
#include <string>
#include <string_view>

namespace isoshard {

/// Whether the environment variable CI is set to a non-empty value.
[[nodiscard]] bool is_ci() noexcept;
/// Errors   GoldenError: "... is refused because CI is set ...".
void refuse_in_ci(std::string_view what);

/// For test programs: true if `--golden=record` was given or ISOSHARD_GOLDEN is "record". Removes
/// the flag from the arguments.
/// Errors   UsageError for another value of either ("check" is the default); GoldenError if it is
///          asked for where CI is set.
[[nodiscard]] bool take_golden_mode(int& argc, char** argv);

/// The result of take_golden_mode, for tests; false before its call.
[[nodiscard]] bool is_recording_goldens() noexcept;

/// Where accepted goldens are: golden/ of the source tree, or share/isoshard/golden beside the
/// installed program.
[[nodiscard]] std::filesystem::path default_golden_folder();
/// Where pending ones go: golden-pending/ in the build folder, or, without one, in isoshard/ of
/// $XDG_STATE_HOME or ~/.local/state.
[[nodiscard]] std::filesystem::path default_pending_folder();

}  // namespace isoshard
