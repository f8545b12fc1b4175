// SPDX-License-Identifier: Apache-2.0
/// The card of what is not as it should be: what broke, the likely cause, where, and what to look
/// at. The page (harness/report/html) and the terminal (harness/report/text) show the same one.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace isoshard {

/// A few words of a row, which a page may mark.
struct CardWords {
  enum class Kind : std::uint8_t {
    kPlain,
    kStrong,
    kTensor,  ///< the name of a tensor
    kPart,    ///< the name of the part of the report that the card is about
  };
  Kind kind = Kind::kPlain;
  std::string text;
};

struct CardRow {
  std::string title;
  std::vector<CardWords> words;
};
using Card = std::vector<CardRow>;

/// Title of the row with the command that repeats the run.
inline constexpr std::string_view kRepeatTitle = "Repeat it";

/// Whether a part of report.json is as it should be. References and what was accepted are.
[[nodiscard]] bool is_as_it_should_be(const nlohmann::json& item);

/// The rows for a part of report.json that is not as it should be.
/// `list`   the list of report.json that has it: cases, curves, goldens, benchmarks.
[[nodiscard]] Card card_of(const nlohmann::json& item, std::string_view list);

/// The text of a row, without marks.
[[nodiscard]] std::string words_of(const CardRow& row);

/// A word as a POSIX shell must get it, in quotes where it needs them.
[[nodiscard]] std::string shell_word(std::string_view word);

}  // namespace isoshard
