// SPDX-License-Identifier: Apache-2.0
/// A world's end in words.
#include <fmt/format.h>

#include <algorithm>

#include "harness/world/forked/captured_output.h"
#include "harness/world/forked/forked_world.h"

namespace isoshard {
namespace {

constexpr std::size_t kShownBytes = 4096;

std::string indented(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size() - 1);
    result += fmt::format("    | {}", text.substr(0, end + 1));
    text.remove_prefix(end + 1);
  }
  if (!result.empty() && result.back() != '\n') result += '\n';
  return result;
}

std::string output_of(const RankReport& report) {
  std::string result;
  for (const auto& [name, text] : {std::pair{"stdout", &report.standard_output},
                                   std::pair{"stderr", &report.standard_error}}) {
    if (!text->empty())
      result += fmt::format("  rank {} {}:\n{}", report.rank, name,
                            indented(printable_tail(*text, kShownBytes)));
  }
  return result;
}

std::string_view in_words(RankEnd end) {
  switch (end) {
    case RankEnd::kReturned:
      return "returned";
    case RankEnd::kThrew:
      return "threw";
    case RankEnd::kReleased:
      return "was released";
    case RankEnd::kExited:
      return "exited";
    case RankEnd::kSignaled:
      return "was killed by a signal";
    case RankEnd::kHung:
      return "hung and was killed";
    case RankEnd::kProtocol:
      return "broke its result channel";
  }
  return "ended";
}

std::string line_of(const RankReport& report) {
  const std::string phase = report.phase.empty() ? "" : ", phase " + report.phase;
  const std::string first_line = report.message.substr(0, report.message.find('\n'));
  return fmt::format("  rank {} {} {}{}{}{}\n", report.rank, in_words(report.end), report.where,
                     phase, first_line.empty() ? "" : ": ",
                     printable_tail(first_line, kShownBytes));
}

}  // namespace

bool WorldReport::ok() const noexcept {
  return !interrupted && cause.empty() && std::ranges::all_of(ranks, [](const RankReport& report) {
    return report.end == RankEnd::kReturned && report.failures.empty();
  });
}

std::string WorldReport::describe() const {
  if (ok()) return {};
  std::string result =
      fmt::format("world{}{} of {} ranks: {}\n", name.empty() ? "" : " ", name, ranks.size(),
                  cause.empty() ? "failed expectations" : printable_tail(cause, kShownBytes));
  for (const RankReport& report : ranks) {
    if (report.rank == culprit) result += output_of(report);
  }
  for (const RankReport& report : ranks) {
    if (report.rank != culprit || report.end == RankEnd::kHung) result += line_of(report);
    for (const ForwardedFailure& failure : report.failures) {
      result += fmt::format("  [rank {}] {}:{}: {}\n", report.rank, failure.file, failure.line,
                            failure.text);
    }
  }
  return result;
}

}  // namespace isoshard
