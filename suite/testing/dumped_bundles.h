// SPDX-License-Identifier: Apache-2.0
/// Test helper: bundles of a reference and of right runs, and what their author may edit.
#pragma once
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/hex_float.h"
#include "core/io/safetensors.h"
#include "fixtures/cases/case_settings.h"
#include "harness/bundle/bundle.h"
#include "harness/judge/compare_bundles.h"
#include "harness/testing/bundle_edit.h"
#include "suite/record/expected_calls.h"
#include "suite/record/run_case.h"
#include "suite/reference/policy.h"
#include "suite/reference/reference.h"
#include "suite/testing/step_cases.h"

namespace isoshard::dumped {

namespace fs = std::filesystem;
using bundle_edit::edit_json;
using bundle_edit::edit_ranks;
using bundle_edit::edit_records;
using bundle_edit::edit_values;
using nlohmann::json;

inline constexpr const char* kNorm = "model.norm.weight";

inline Case adamw(const char* subject) {
  Case item = step_case(subject, {.dp = 2, .tp = 2});
  item.settings.optimizer.kind = OptimizerSettings::Kind::kAdamW;
  item.settings.optimizer.learning_rate = 1e-2;
  item.steps = 2;
  return item;
}

/// reference, run (autotp, dp 2 x tp 2), ddp (dp 2) and emulated, written once.
inline const TestFolder& bundles() {
  static const TestFolder folder;
  static const bool is_written = [] {
    const Case item = adamw("autotp");
    Case data = adamw("ddp");
    data.degrees.tp = 1;
    const Reference reference = reference_of(item);
    const auto settings = [](const Case& c) { return bundle_settings(c, policy_of(c)); };
    const Case judged[] = {item, data};
    write_bundle(folder / "reference", reference, with_calls_of(settings(item), judged));
    write_bundle(folder / "run", run_case(item, reference, {.keep = Keep::kEverything}),
                 settings(item));
    write_bundle(folder / "ddp", run_case(data, reference, {.keep = Keep::kEverything}),
                 settings(data));
    return true;
  }();
  (void)is_written;
  return folder;
}

/// What a comparison ends with: the exit code of the command, and what is printed.
struct End {
  int code = 0;
  std::string text;
};

inline End compared(const fs::path& reference, const fs::path& actual,
                    const BundleRules& rules = {}) {
  try {
    const Verdict verdict = compare_bundles(reference, actual, {}, rules);
    std::string text = verdict.reason;
    for (const std::string& note : verdict.notes) text += "\n" + note;
    return {verdict.status == Status::kConforms ? 0 : 1, text};
  } catch (const UsageError& error) {
    return {2, error.what()};
  } catch (const FileError& error) {
    return {3, error.what()};
  } catch (const InfrastructureError& error) {
    return {4, error.what()};
  }
}

/// A copy of a right bundle, spoilt and sealed again.
inline void spoil(const fs::path& bad, const std::string& run,
                  const std::function<void(const fs::path&)>& edit) {
  fs::copy(bundles() / run, bad, fs::copy_options::recursive);
  edit(bad);
  bundle_edit::seal(bad);
}

inline bool is_of(const std::string& name, const char* kind) {
  return name.starts_with(std::string(kind) + "/");
}

inline void scale_values(const fs::path& bundle, double factor, const std::string& begin) {
  const int changed = edit_values(bundle, [&](int, const std::string& name, auto& values) {
    if (!name.starts_with(begin)) return;
    for (double& value : values) value *= factor;
  });
  ASSERT_TRUE(changed > 0 || factor == 1) << begin;
}

/// All values that begin so are multiplied, and what the bundle says divides them again.
inline std::function<void(const fs::path&)> scaled(double factor, std::string begin,
                                                   json declared) {
  return [=](const fs::path& bundle) {
    scale_values(bundle, factor, begin);
    edit_records(bundle, [&](int, const std::string& name, json& record) {
      if (name.starts_with(begin)) record["grad_scale"] = declared;
    });
  };
}

inline void edit_manifest(const fs::path& bundle, const std::function<void(json&)>& edit) {
  edit_json(bundle / "manifest.json", edit);
}

/// Rank 1 and those of its tp line drift in one replicated tensor.
inline void drift(const fs::path& bundle, const std::string& begin, int only_rank = 1) {
  const int changed = edit_values(bundle, [&](int rank, const std::string& name, auto& values) {
    if (rank == only_rank && name.starts_with(begin))
      for (double& value : values) value = -value;
  });
  ASSERT_GT(changed, 0) << begin;
}

/// A row: an edit, the exit codes that are right, and a word of what is printed.
struct Wrong {
  std::string name;
  std::function<void(const fs::path& bundle)> edit;
  std::vector<int> codes;
  std::string word;  ///< in what is printed
  std::string run = "run";
};

inline void PrintTo(const Wrong& wrong, std::ostream* out) {
  *out << wrong.name;
}

inline constexpr auto name_of_row = [](const auto& row) { return row.param.name; };

/// In records and in the tensors' names.
inline void rename(const fs::path& bundle, const std::string& from, const std::string& to_name,
                   const char* to_kind = nullptr) {
  edit_records(bundle, [&](int, const std::string& name, json& record) {
    if (name != from) return;
    record["name"] = to_name;
    if (to_kind != nullptr) record["kind"] = to_kind;
  });
  const std::string kind = to_kind != nullptr ? to_kind : from.substr(0, from.find('/'));
  const std::string call = from.substr(from.rfind('/'));
  for (const auto& entry : fs::recursive_directory_iterator(bundle)) {
    if (entry.path().extension() != ".safetensors") continue;
    const SafetensorsFile file = SafetensorsFile::open(entry.path());
    std::vector<SafetensorsEntry> tensors;
    for (const std::string& name : file.names()) {
      const SafetensorsInfo& info = file.info(name);
      tensors.push_back({name == from ? kind + "/" + to_name + call : name, info.dtype, info.shape,
                         [&file, name] { return file.tensor(name); }});
    }
    write_safetensors(entry.path(), tensors);
  }
}

}  // namespace isoshard::dumped
