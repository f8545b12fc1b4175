// SPDX-License-Identifier: Apache-2.0
// Keys of a test set, by the table of settings.
#include "suite/converge/test_set.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <optional>
#include <set>
#include <span>
#include <sstream>
#include <utility>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "subjects/registry/subject_spec.h"

namespace isoshard {
namespace {

struct Degree {
  std::string_view key, title;
  Axis axis;
};
/// In the guideline's order.
constexpr std::array kDegrees = {Degree{"tp", "TP", Axis::kTp}, Degree{"cp", "CP", Axis::kCp},
                                 Degree{"pp", "PP", Axis::kPp}};
constexpr std::string_view kMicroBatches = "micro-batches";

/// What people call a flag.
constexpr std::array<std::pair<std::string_view, std::string_view>, 5> kOtherNames{
    {{"loss-parallel", "vocab-parallel"},
     {"activation-checkpoint", "recompute"},
     {"activation-checkpointing", "recompute"},
     {"selective-ac", "recompute-every"},
     {"schedule", "pipeline-schedule"}}};

/// Techniques of torchtitan that this build lacks, and why there is nothing to switch.
constexpr std::array<std::pair<std::string_view, std::string_view>, 9> kLacking{
    {{"async-tp", "collectives of tp are waited for where they are made"},
     {"async-tensor-parallel", "collectives of tp are waited for where they are made"},
     {"compile", "nothing is compiled"},
     {"fused", "each optimizer has one implementation"},
     {"fused-step", "each optimizer has one implementation"},
     {"float8", "dtypes are fp64, fp32, bf16 and fp16"},
     {"mxfp8", "dtypes are fp64, fp32, bf16 and fp16"},
     {"ep", "no model has experts"},
     {"ddp", "the control is FSDP; isoshard train compares ddp"}}};

std::string plain(std::string_view text) {
  std::string word;
  for (const char c : text) {
    if (std::isspace(static_cast<unsigned char>(c)) != 0) continue;
    word += c == '_' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return word;
}

const Setting* find_setting(std::string_view flag) {
  for (const Setting& setting : settings()) {
    if (setting.flag.kind == FlagKind::kNone) continue;
    if (setting.flag.name == flag || std::ranges::count(setting.flag.aliases, flag) > 0)
      return &setting;
  }
  return nullptr;
}

template <class Number>
Number number_of(std::string_view key, const std::string& text) {
  Number value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size())
    throw UsageError(fmt::format("--test: {} must be a number, got '{}'", key, text));
  return value;
}

FlagValue flag_value(const SettingFlag& flag, const std::optional<std::string>& value) {
  if (flag.kind == FlagKind::kSwitch) {
    if (!value.has_value()) return true;
    throw UsageError(
        fmt::format("--test: {} is a switch and must have no value, got '{}'", flag.name, *value));
  }
  if (!value.has_value() && flag.kind == FlagKind::kOptionalText)
    return std::string(flag.implicit_value);
  if (!value.has_value() || value->empty())
    throw UsageError(fmt::format("--test: {0} must have a value: {0}=...", flag.name));
  switch (flag.kind) {
    case FlagKind::kInt:
      return number_of<int>(flag.name, *value);
    case FlagKind::kInt64:
      return number_of<std::int64_t>(flag.name, *value);
    case FlagKind::kUint64:
      return number_of<std::uint64_t>(flag.name, *value);
    case FlagKind::kDouble:
      return number_of<double>(flag.name, *value);
    default:
      return *value;
  }
}

std::string all_keys() {
  std::vector<std::string> keys;
  for (const Degree& degree : kDegrees) keys.emplace_back(degree.key);
  keys.emplace_back(kMicroBatches);
  for (std::string& name : technique_names()) keys.push_back(std::move(name));
  return join_names(keys);
}

[[noreturn]] void refuse_key(const std::string& key) {
  if (key == "dp" || key == "fsdp")
    throw UsageError(
        "rule dp-degree: dp must be the control's in every test set, so that the tokens of a step "
        "are the same; set --dp for both");
  for (const auto& [name, why] : kLacking) {
    if (key == name)
      throw UsageError(
          fmt::format("--test: {} is not built ({}); known are {}", key, why, all_keys()));
  }
  if (const Setting* setting = find_setting(key); setting != nullptr) {
    const std::vector<std::string> takers = subjects_that_take(setting->name);
    if (!takers.empty() && std::ranges::count(takers, kTestSubject) == 0)
      throw UsageError(fmt::format("--test: only {1} takes {0}; known are {2}", key,
                                   join_names(takers), all_keys()));
    throw UsageError(fmt::format(
        "rule settings: {0} must be the same in control and test sets; set --{0}", key));
  }
  std::vector<std::string> known = technique_names();
  for (const Degree& degree : kDegrees) known.emplace_back(degree.key);
  known.emplace_back(kMicroBatches);
  throw UsageError(fmt::format("--test: unknown key '{}'{}; known are {}", key,
                               did_you_mean(key, known), all_keys()));
}

void set_micro_batches(const Case& control, std::optional<int> asked, TestSet& set) {
  const bool has_pipeline = set.item.degrees.pp > 1;
  const std::int64_t stages =
      std::int64_t{set.item.degrees.pp} * set.item.settings.nd.stages_per_rank;
  const std::int64_t micro_batches = asked.has_value() ? *asked : has_pipeline ? stages : 1;
  const std::int64_t local = control.batch_size;
  if (micro_batches < 1 || local < micro_batches || local % micro_batches != 0)
    throw UsageError(fmt::format(
        "rule pipeline-batch: the local batch must be a multiple of the micro-batches of {}, of "
        "which a pipeline has at least as many as stages ({}), got a local batch of {} for {} "
        "micro-batches; set --batch-size or micro-batches=N",
        set.text, stages, local, micro_batches));
  set.item.micro_batches = static_cast<int>(micro_batches);
  set.item.batch_size = local / micro_batches;
}

void set_names(TestSet& set) {
  set.title = control_title(set.item);
  for (const Degree& degree : kDegrees) {
    if (set.item.degrees[degree.axis] == 1) continue;
    ++set.dimensions;
    set.title += fmt::format(", {} {}", degree.title, set.item.degrees[degree.axis]);
  }
  for (const std::string& technique : set.techniques) set.title += ", " + technique;
  for (const char c : set.title) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) {
      set.name += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    } else if (c != ' ' && !set.name.ends_with('_')) {
      set.name += '_';
    }
  }
}

struct Key {
  std::string name;
  std::optional<std::string> value;
};

std::vector<Key> keys_of(std::string_view text) {
  std::vector<Key> keys;
  std::set<std::string> seen;
  std::istringstream stream{std::string(text)};
  for (std::string part; std::getline(stream, part, ',');) {
    const std::size_t equals = part.find('=');
    // "layers-per-stage=3,2,2": a number continues the value before it
    const bool is_number = !part.empty() && part.find_first_not_of("0123456789") == part.npos;
    if (is_number && !keys.empty() && keys.back().value.has_value()) {
      *keys.back().value += "," + part;
      continue;
    }
    Key key{plain(part.substr(0, equals)), std::nullopt};
    for (const auto& [other, name] : kOtherNames) {
      if (key.name == other) key.name = name;
    }
    if (equals != std::string::npos) {
      std::string value = part.substr(equals + 1);
      std::erase_if(value, [](unsigned char c) { return std::isspace(c) != 0; });
      key.value = std::move(value);
    }
    if (key.name.empty() && !key.value.has_value()) continue;
    if (!seen.insert(key.name).second)
      throw UsageError(fmt::format("--test {}: {} must be given once", text, key.name));
    keys.push_back(std::move(key));
  }
  if (keys.empty())
    throw UsageError(fmt::format(
        "--test must name what the run has and 1D FSDP lacks, such as tp=2,pp=2, got '{}'; known "
        "are {}",
        text, all_keys()));
  return keys;
}

}  // namespace

bool is_technique(const Setting& setting) {
  if (setting.flag.kind == FlagKind::kNone || !setting.reset_for_reference) return false;
  return !is_of_some_subjects(setting) ||
         std::ranges::count(subjects_that_take(setting.name), kTestSubject) > 0;
}

std::vector<std::string> technique_names() {
  std::vector<std::string> names;
  for (const Setting& setting : settings()) {
    if (is_technique(setting)) names.emplace_back(setting.flag.name);
  }
  return names;
}

std::string control_title(const Case& control) {
  return fmt::format("FSDP {}", control.degrees.dp);
}

TestSet test_set(std::string_view text, const Case& control) {
  TestSet set;
  set.text = text;
  set.item = control;
  set.item.subject = kTestSubject;
  std::optional<int> micro_batches;
  for (const Key& key : keys_of(text)) {
    const auto degree = std::ranges::find(kDegrees, key.name, &Degree::key);
    if (degree != kDegrees.end()) {
      set.item.degrees[degree->axis] = number_of<int>(key.name, key.value.value_or(""));
    } else if (key.name == kMicroBatches) {
      micro_batches = number_of<int>(key.name, key.value.value_or(""));
    } else if (const Setting* setting = find_setting(key.name);
               setting != nullptr && is_technique(*setting)) {
      setting->set(set.item, flag_value(setting->flag, key.value));
      set.settings.push_back(setting->name);
      set.techniques.push_back(std::string(setting->flag.name) +
                               (key.value.has_value() ? "=" + *key.value : ""));
    } else {
      refuse_key(key.name);
    }
  }
  for (const Degree& degree : kDegrees) {
    if (set.item.degrees[degree.axis] < 1)
      throw UsageError(fmt::format("--test: {} must be at least 1, got {}", degree.key,
                                   set.item.degrees[degree.axis]));
  }
  set_micro_batches(control, micro_batches, set);
  if (micro_batches.has_value() && set.item.degrees.pp == 1)
    set.techniques.push_back(fmt::format("{}={}", kMicroBatches, *micro_batches));
  set_names(set);
  return set;
}

std::vector<std::string> implied_sets(const TestSet& set) {
  std::vector<Degree> axes;
  for (const Degree& degree : kDegrees) {
    if (set.item.degrees[degree.axis] > 1) axes.push_back(degree);
  }
  std::vector<std::string> titles;
  const unsigned all = (1U << axes.size()) - 1;
  for (unsigned chosen = 1; chosen < all; ++chosen) {
    std::string title = control_title(set.item);
    for (std::size_t i = 0; i < axes.size(); ++i) {
      if ((chosen >> i & 1U) != 0)
        title += fmt::format(", {} {}", axes[i].title, set.item.degrees[axes[i].axis]);
    }
    titles.push_back(std::move(title));
  }
  std::ranges::stable_sort(titles, {},
                           [](const std::string& t) { return std::ranges::count(t, ','); });
  return titles;
}

}  // namespace isoshard
