// SPDX-License-Identifier: Apache-2.0
/// A file of verdicts, one line a case, from which a calibration goes on.
#pragma once
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <string_view>

#include "fixtures/cases/case.h"
#include "harness/verdict/verdict.h"

namespace isoshard {

/// Columns: index, status (conforms, diverges, incomplete, vacuous, failed), strength, tensors
/// compared, slug, reason. The first line says what is calibrated.
class VerdictLog {
 public:
  /// An empty path: only counts what is added.
  /// Errors   FileError if the file is of another calibration, or a line of it is not a case.
  VerdictLog(std::filesystem::path path, std::string_view what);

  [[nodiscard]] bool has(std::int64_t index) const { return statuses_.contains(index); }
  /// Errors   InfrastructureError if the line cannot be written.
  void add(std::int64_t index, const Case& c, const Verdict& verdict);
  /// Of a case that could not be judged.
  void add_failure(std::int64_t index, const Case& c, std::string_view why);

  [[nodiscard]] std::int64_t diverging() const { return count("diverges"); }
  [[nodiscard]] std::int64_t failures() const { return count("failed") + count("incomplete"); }
  [[nodiscard]] std::int64_t vacuous() const { return count("vacuous"); }
  /// "1200 cases in all: 1200 conform, 0 diverge, 0 vacuous, 0 could not be judged", with a
  /// newline.
  [[nodiscard]] std::string summary() const;

 private:
  void add_line(std::int64_t index, std::string_view status, std::string_view strength,
                std::int64_t compared, const Case& c, std::string reason);
  [[nodiscard]] std::int64_t count(std::string_view status) const;

  std::filesystem::path path_;
  std::ofstream stream_;
  std::map<std::int64_t, std::string> statuses_;
};

}  // namespace isoshard
