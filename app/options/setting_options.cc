// SPDX-License-Identifier: Apache-2.0
// From rows of the table to options, and from options to cases.
#include "app/options/setting_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/program_options/value_semantic.hpp>
#include <string>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "fixtures/cases/setting.h"
#include "subjects/registry/subject_spec.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;

const po::value_semantic* semantic_of(const SettingFlag& flag) {
  switch (flag.kind) {
    case FlagKind::kInt:
      return po::value<int>();
    case FlagKind::kInt64:
      return po::value<std::int64_t>();
    case FlagKind::kUint64:
      return po::value<std::uint64_t>();
    case FlagKind::kDouble:
      return po::value<double>();
    case FlagKind::kText:
      return po::value<std::string>();
    case FlagKind::kOptionalText:
      return po::value<std::string>()->implicit_value(std::string(flag.implicit_value));
    case FlagKind::kSwitch:
      return po::bool_switch();
    case FlagKind::kNone:
      break;
  }
  throw UsageError(fmt::format("setting flag --{} must have a kind of value", flag.name));
}

FlagValue value_of(const ParsedOptions& options, const SettingFlag& flag) {
  const std::string name(flag.name);
  switch (flag.kind) {
    case FlagKind::kInt:
      return options.get<int>(name);
    case FlagKind::kInt64:
      return options.get<std::int64_t>(name);
    case FlagKind::kUint64:
      return options.get<std::uint64_t>(name);
    case FlagKind::kDouble:
      return options.get<double>(name);
    case FlagKind::kSwitch:
      return options.get<bool>(name);
    default:
      return options.get<std::string>(name);
  }
}

std::string help_of(const Setting& setting) {
  const std::vector<std::string> takers = subjects_that_take(setting.name);
  return takers.empty() ? std::string(setting.flag.help)
                        : fmt::format("{} ({})", setting.flag.help, fmt::join(takers, ", "));
}

bool is_named(std::span<const std::string_view> names, const Setting& setting) {
  return std::ranges::find(names, setting.flag.name) != names.end();
}

template <class Apply>
void for_each_given(const ParsedOptions& options, bool of_some_subjects,
                    std::span<const std::string_view> without, const Apply& apply) {
  for (const Setting& setting : settings()) {
    if (is_named(without, setting)) continue;
    if (setting.flag.kind == FlagKind::kNone || is_of_some_subjects(setting) != of_some_subjects)
      continue;
    if (!options.given(std::string(setting.flag.name))) continue;
    const FlagValue value = value_of(options, setting.flag);
    // A switch that a file or the environment sets to false is as if it were not there.
    if (setting.flag.kind == FlagKind::kSwitch && !std::get<bool>(value)) continue;
    apply(setting, value);
  }
}

}  // namespace

void declare_setting_options(OptionTable& table, std::span<const std::string_view> without) {
  for (const Setting& setting : settings()) {
    if (setting.flag.kind == FlagKind::kNone || is_named(without, setting)) continue;
    const std::string name(setting.flag.name);
    table.group(std::string(setting.flag.group))(name.c_str(), semantic_of(setting.flag),
                                                 help_of(setting).c_str());
    for (const std::string_view alias : setting.flag.aliases)
      table.aliases[std::string(alias)] = name;
  }
}

void apply_setting_options(const ParsedOptions& options, std::vector<Case>& cases,
                           std::span<const std::string_view> without) {
  for_each_given(options, false, without, [&](const Setting& setting, const FlagValue& value) {
    for (Case& item : cases) setting.set(item, value);
  });
}

void apply_subject_options(const ParsedOptions& options, std::vector<Case>& cases) {
  for_each_given(options, true, {}, [&](const Setting& setting, const FlagValue& value) {
    bool is_taken = false;
    for (Case& item : cases) {
      if (!takes(item, setting)) continue;
      setting.set(item, value);
      is_taken = true;
    }
    if (is_taken) return;
    throw UsageError(fmt::format("--{}: none of the selected subjects takes it; take --subjects {}",
                                 setting.flag.name, subjects_that_take(setting.name).front()));
  });
  for (Case& item : cases) {
    // a pipeline needs a micro-batch for each stage
    const int stages = item.degrees.pp * item.settings.nd.stages_per_rank;
    if (!options.given("micro-batches")) item.micro_batches = std::max(item.micro_batches, stages);
    // 16-bit parameters of some subjects always have fp32 masters
    if (needs_fp32_masters(item) && !options.given("master-dtype"))
      item.settings.master_dtype = Dtype::kFloat32;
  }
}

}  // namespace isoshard
