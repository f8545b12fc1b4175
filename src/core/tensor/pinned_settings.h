// SPDX-License-Identifier: Apache-2.0
/// Settings of LibTorch and of the libraries below it that change bits on a GPU: one table.
#pragma once
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>

namespace isoshard {

/// One setting. Of a variable of the environment the library reads it at its first use in a
/// process, so it must be pinned before that.
struct PinnedSetting {
  std::string_view name;    ///< "tf32_matmul"; in reports and bundles
  std::string_view pinned;  ///< the value that runs on a GPU have unless they say otherwise
  /// How it is pinned and read back, in words: a function of at::Context, or a variable.
  std::string_view how;
  std::string_view why;   ///< what it changes
  std::string (*read)();  ///< the value that the process has
  /// Errors   UsageError for a value that it does not have.
  void (*write)(const std::string& value);
};

/// All of them.
[[nodiscard]] std::span<const PinnedSetting> pinned_settings();

using SettingValues = std::map<std::string, std::string, std::less<>>;

/// Name and value of each, as pinned; with `changes` for those that a case sets itself.
/// Errors   UsageError for a name that is not in the table.
[[nodiscard]] SettingValues pinned_values(const SettingValues& changes = {});
/// As the process has them now.
[[nodiscard]] SettingValues read_settings();

/// Holds every setting at its value while it lives, and puts back what was there before.
///
/// Guarantees   after construction read_settings() gives `values`.
/// Errors       InfrastructureError that names the setting that reads back otherwise.
/// Ranks        of this process, all threads: one at a time.
///
///     const SettingsPin pin(pinned_values());
class SettingsPin {
 public:
  explicit SettingsPin(SettingValues values);
  ~SettingsPin();
  SettingsPin(const SettingsPin&) = delete;
  SettingsPin& operator=(const SettingsPin&) = delete;
  [[nodiscard]] const SettingValues& values() const noexcept { return values_; }
  /// Reads all of them back.   Errors   InfrastructureError as above: something in the process has
  /// changed one.
  void check() const;

 private:
  SettingValues values_;
  SettingValues before_;
};

}  // namespace isoshard
