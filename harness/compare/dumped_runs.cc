// SPDX-License-Identifier: Apache-2.0
// Manifests of a folder.
#include "harness/compare/dumped_runs.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "core/base/error.h"
#include "core/base/reference_name.h"
#include "core/io/json.h"
#include "harness/bundle/run_settings.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;

struct DumpedRun {
  fs::path path;
  std::string subject;
  RunSettings settings;
};

/// Whether somebody began to write a bundle here, or a step of one is left.
bool has_part_of_a_bundle(const fs::path& path) {
  std::error_code error;
  if (fs::exists(path / ".isoshard-bundle", error)) return true;
  for (fs::directory_iterator at(path, error), end; !error && at != end; at.increment(error)) {
    if (at->path().filename().string().starts_with("step")) return true;
  }
  return false;
}

std::vector<DumpedRun> runs_in(const fs::path& folder) {
  std::error_code error;
  std::vector<fs::path> paths;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
    paths.push_back(at->path());
  if (error) throw UsageError(fmt::format("--input-dir {}: {}", folder.string(), error.message()));
  std::sort(paths.begin(), paths.end());
  std::vector<DumpedRun> runs;
  for (const fs::path& path : paths) {
    const fs::path manifest = path / "manifest.json";
    if (!fs::exists(manifest, error)) {
      if (!has_part_of_a_bundle(path)) continue;
      throw InfrastructureError(fmt::format(
          "{}: must have a manifest.json, got a bundle without: its run did not end; dump it again",
          path.string()));
    }
    const nlohmann::json json = read_json_file(manifest);
    if (!json.is_object() || !json.contains("subject") || !json.at("subject").is_string())
      throw FileError(fmt::format("{}: names no subject", manifest.string()));
    runs.push_back({path, json.at("subject").get<std::string>(),
                    parse_run_settings(
                        json.contains("settings") ? json.at("settings").dump() : "{}", manifest)});
  }
  return runs;
}

constexpr std::string_view kEmulated = "emulated ";

/// A bundle that says it is an emulation is not judged. So the run that it emulates must be there,
/// and is, and no two say that of one run.
void require_its_run(const DumpedRun& emulated, const std::vector<DumpedRun>& runs) {
  const auto has_settings = [&](const DumpedRun& other) {
    return differing_settings(other.settings, emulated.settings).empty();
  };
  const std::string subject = emulated.subject.substr(kEmulated.size());
  const auto alike = std::ranges::count_if(runs, [&](const DumpedRun& other) {
    return other.subject == subject && has_settings(other);
  });
  const auto emulations = std::ranges::count_if(runs, [&](const DumpedRun& other) {
    return other.subject == emulated.subject && has_settings(other);
  });
  if (emulations <= alike) return;
  throw FileError(fmt::format(
      "{}: must have a run of {} with its settings beside it, as it says that it is the emulation "
      "of one, got {} for {} emulations",
      emulated.path.string(), subject, alike, emulations));
}

}  // namespace

std::vector<DumpedPair> dumped_pairs(const fs::path& folder) {
  const std::vector<DumpedRun> runs = runs_in(folder);
  std::vector<DumpedPair> pairs;
  for (const DumpedRun& run : runs) {
    if (run.subject == kReferenceName) continue;
    if (run.subject.starts_with(kEmulated)) {
      require_its_run(run, runs);
      continue;
    }
    std::vector<std::string> problems;
    const auto reference = std::find_if(runs.begin(), runs.end(), [&](const DumpedRun& other) {
      if (other.subject != kReferenceName) return false;
      std::vector<std::string> lines = differing_settings(other.settings, run.settings);
      if (other.settings.training.empty() || run.settings.training.empty())
        lines = {"one of the two states no training settings"};
      if (!lines.empty())
        problems.push_back(fmt::format("{}: {}", other.path.filename().string(), lines.front()));
      return lines.empty();
    });
    if (reference == runs.end()) {
      throw FileError(fmt::format("{}: no plain reference beside it has its settings{}{}",
                                  run.path.string(), problems.empty() ? "" : "\n  ",
                                  fmt::join(problems, "\n  ")));
    }
    pairs.push_back({reference->path, run.path});
  }
  if (pairs.empty())
    throw UsageError(fmt::format("--input-dir {}: holds no dumped run; verify --dump writes them",
                                 folder.string()));
  return pairs;
}

}  // namespace isoshard
