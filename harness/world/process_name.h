// SPDX-License-Identifier: Apache-2.0
/// What the processes of a world are called, in ps and /proc.
#pragma once
#include <string>
#include <string_view>

namespace isoshard {

/// "iso:autotp/1": whose run it is, and the how-manieth of it in its case, from 1. A process name
/// has at most 15 bytes: of a longer subject the end is left out, and the number stays.
[[nodiscard]] std::string process_name(std::string_view subject, int run);

/// Gives the calling process, and the threads that it starts from here on, this name; an empty one
/// leaves it as it is.
void name_process(const std::string& name) noexcept;

}  // namespace isoshard
