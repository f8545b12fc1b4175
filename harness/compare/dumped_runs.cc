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
#include "harness/ids/rule.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kEmulated = "emulated ";

struct DumpedRun {
  fs::path path;
  std::string subject;
  bool is_of_one_process;
  RunSettings settings;

  [[nodiscard]] bool is_reference() const { return subject == kReferenceName; }
  [[nodiscard]] bool is_emulated() const { return subject.starts_with(kEmulated); }
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

/// Whether the tensors of another rank than the first lie here.
bool has_other_ranks(const fs::path& bundle) {
  std::error_code error;
  for (fs::directory_iterator step(bundle, error), end; !error && step != end;
       step.increment(error)) {
    if (!step->path().filename().string().starts_with("step")) continue;
    std::error_code ignored;
    for (fs::directory_iterator at(step->path(), ignored); !ignored && at != end;
         at.increment(ignored)) {
      const std::string stem = at->path().stem().string();
      if (at->path().extension() == ".safetensors" && stem.starts_with("rank") &&
          stem.find_first_not_of('0', 4) != std::string::npos)
        return true;
    }
  }
  return false;
}

/// By its mesh and by its files: those of a bundle that is not judged are not held to each other.
bool is_of_one_process(const fs::path& bundle, const nlohmann::json& manifest) {
  if (!manifest.contains("mesh") || !manifest.at("mesh").is_array())
    refuse(bundle / "manifest.json", RuleId::kFileForm,
           {{"problem", "\"mesh\" must be a list of axes"}});
  for (const nlohmann::json& axis : manifest.at("mesh")) {
    if (!axis.is_object() || !axis.contains("degree") || axis.at("degree") != 1) return false;
  }
  return !has_other_ranks(bundle);
}

std::vector<DumpedRun> runs_in(const fs::path& folder, std::vector<NotJudged>& not_judged) {
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
      if (has_part_of_a_bundle(path))
        throw InfrastructureError(
            fmt::format("{}: must have a manifest.json, got a bundle without: its run did not end; "
                        "dump it again",
                        path.string()));
      if (fs::is_directory(path, error)) not_judged.push_back({path, "no bundle"});
      continue;
    }
    const nlohmann::json json = read_json_file(manifest);
    if (!json.is_object() || !json.contains("subject") || !json.at("subject").is_string())
      refuse(manifest, RuleId::kFileForm, {{"problem", "\"subject\" must be a string"}});
    runs.push_back({path, json.at("subject").get<std::string>(), is_of_one_process(path, json),
                    parse_run_settings(
                        json.contains("settings") ? json.at("settings").dump() : "{}", manifest)});
  }
  return runs;
}

/// A reference and an emulation are runs of one process, whatever they are the reference of. So no
/// run of several ranks is spared the judge by its name.
void require_one_process(const DumpedRun& run) {
  if ((!run.is_reference() && !run.is_emulated()) || run.is_of_one_process) return;
  refuse(run.path, RuleId::kReferenceOfSeveralRanks, {{"subject", run.subject}});
}

/// Else whichever comes first by name would be trusted.
void require_one_of_each_reference(const std::vector<DumpedRun>& runs) {
  for (auto run = runs.begin(); run != runs.end(); ++run) {
    if (!run->is_reference()) continue;
    const auto other = std::find_if(run + 1, runs.end(), [&](const DumpedRun& later) {
      return later.is_reference() && later.settings.training == run->settings.training;
    });
    if (other == runs.end()) continue;
    refuse(other->path, RuleId::kTwoReferences, {{"other", run->path.filename().string()}});
  }
}

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
  refuse(emulated.path, RuleId::kEmulationWithoutRun,
         {{"subject", subject}, {"runs", alike}, {"emulations", emulations}});
}

/// Adds a run with each reference that has its settings.
void add_pairs(const DumpedRun& run, const std::vector<DumpedRun>& runs, BatchFileOf batch_file,
               std::vector<DumpedPair>& pairs) {
  std::vector<std::string> problems;
  std::vector<DumpedPair> own;
  for (const DumpedRun& other : runs) {
    if (!other.is_reference()) continue;
    std::vector<std::string> lines = differing_settings(other.settings, run.settings, batch_file);
    if (other.settings.training.empty() || run.settings.training.empty())
      lines = {"one of the two states no training settings"};
    if (lines.empty()) {
      own.push_back({other.path, run.path, other.path.filename().string()});
    } else {
      problems.push_back(fmt::format("{}: {}", other.path.filename().string(), lines.front()));
    }
  }
  if (own.empty())
    refuse(run.path, RuleId::kNoReferenceWithSettings,
           {{"settings", problems},
            NamedValue::words("differences", fmt::format("{}{}", problems.empty() ? "" : "\n  ",
                                                         fmt::join(problems, "\n  ")))});
  if (own.size() == 1) own.front().against.clear();
  pairs.insert(pairs.end(), own.begin(), own.end());
}

/// A run that calls itself a reference is not judged. So some run must have its settings.
void require_its_runs(const DumpedRun& reference, const std::vector<DumpedPair>& pairs) {
  if (std::ranges::find(pairs, reference.path, &DumpedPair::reference) != pairs.end()) return;
  refuse(reference.path, RuleId::kReferenceWithoutRun);
}

}  // namespace

DumpedRuns dumped_pairs(const fs::path& folder, BatchFileOf batch_file) {
  DumpedRuns found;
  const std::vector<DumpedRun> runs = runs_in(folder, found.not_judged);
  std::ranges::for_each(runs, require_one_process);
  require_one_of_each_reference(runs);
  for (const DumpedRun& run : runs) {
    if (run.is_emulated()) {
      require_its_run(run, runs);
      found.not_judged.push_back(
          {run.path, "the emulation of " + run.subject.substr(kEmulated.size())});
    } else if (!run.is_reference()) {
      add_pairs(run, runs, batch_file, found.pairs);
    }
  }
  if (found.pairs.empty())
    throw UsageError(fmt::format("--input-dir {}: holds no dumped run; verify --dump writes them",
                                 folder.string()));
  for (const DumpedRun& run : runs) {
    if (!run.is_reference()) continue;
    require_its_runs(run, found.pairs);
    found.not_judged.push_back({run.path, "a reference"});
  }
  std::ranges::sort(found.not_judged, {}, &NotJudged::path);
  return found;
}

std::string words_of(const std::vector<NotJudged>& not_judged) {
  if (not_judged.empty()) return "";
  std::vector<std::string> words;
  for (const NotJudged& item : not_judged)
    words.push_back(fmt::format("{} ({})", item.path.filename().string(), item.why));
  return fmt::format(
      "{} not judged: {}",
      words.size() == 1 ? "1 folder was" : fmt::format("{} folders were", words.size()),
      fmt::join(words, ", "));
}

}  // namespace isoshard
