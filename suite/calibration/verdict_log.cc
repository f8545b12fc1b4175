// SPDX-License-Identifier: Apache-2.0
// Lines of a file of verdicts.
#include "suite/calibration/verdict_log.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <system_error>
#include <utility>

#include "core/base/error.h"

namespace isoshard {
namespace {

constexpr std::string_view kFailed = "failed";

bool is_status(std::string_view word) {
  constexpr std::array kStatuses = {Status::kConforms, Status::kDiverges, Status::kIncomplete,
                                    Status::kVacuous};
  return word == kFailed ||
         std::ranges::any_of(kStatuses, [&](Status status) { return word == name_of(status); });
}

}  // namespace

VerdictLog::VerdictLog(std::filesystem::path path, std::string_view what) : path_(std::move(path)) {
  if (path_.empty()) return;
  const std::string head = fmt::format("# {}", what);
  std::ifstream old(path_);
  std::string line, whole;
  for (int number = 1; old.is_open() && std::getline(old, line); ++number) {
    if (old.eof()) break;  // a killed run has left it without its end
    if (number == 1 && line != head)
      throw FileError(fmt::format("{}: must begin with '{}', got '{}': take another file",
                                  path_.string(), head, line));
    whole += line + "\n";
    if (number == 1) continue;
    std::int64_t index = 0;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), index);
    const std::string_view rest(end, static_cast<std::size_t>(line.data() + line.size() - end));
    const std::string status(rest.substr(rest.empty() ? 0 : 1, rest.find(',', 1) - 1));
    if (error != std::errc() || !is_status(status))
      throw FileError(
          fmt::format("{}: line {} must be a case, got '{}'", path_.string(), number, line));
    statuses_[index] = status;
  }
  old.close();
  // Nothing whole is ever written again: a run that is killed here loses no verdict.
  std::error_code failed;
  if (std::filesystem::exists(path_)) std::filesystem::resize_file(path_, whole.size(), failed);
  stream_.open(path_, std::ios::app);
  if (whole.empty()) stream_ << head << '\n' << std::flush;
  if (!stream_ || failed) throw FileError(fmt::format("{}: cannot be written", path_.string()));
}

void VerdictLog::add_line(std::int64_t index, std::string_view status, std::string_view strength,
                          std::int64_t compared, const Case& c, std::string reason) {
  statuses_[index] = status;
  if (path_.empty()) return;
  std::ranges::replace(reason, '\n', ' ');
  stream_ << fmt::format("{},{},{},{},{},{}\n", index, status, strength, compared, c.slug(), reason)
          << std::flush;
  if (!stream_) throw InfrastructureError(fmt::format("{}: cannot be written", path_.string()));
}

void VerdictLog::add(std::int64_t index, const Case& c, const Verdict& verdict) {
  add_line(index, name_of(verdict.status), name_of(verdict.strength), verdict.compared, c,
           verdict.status == Status::kConforms ? "" : verdict.reason);
}

void VerdictLog::add_failure(std::int64_t index, const Case& c, std::string_view why) {
  add_line(index, kFailed, "none", 0, c, std::string(why));
}

std::int64_t VerdictLog::count(std::string_view status) const {
  return std::ranges::count_if(statuses_,
                               [&](const auto& entry) { return entry.second == status; });
}

std::string VerdictLog::summary() const {
  return fmt::format(
      "{} cases in all: {} conform, {} diverge, {} vacuous, {} could not be judged\n",
      statuses_.size(), count("conforms"), diverging(), vacuous(), failures());
}

}  // namespace isoshard
