// SPDX-License-Identifier: Apache-2.0
// From flags to what cases have in common.
#include "app/options/case_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/program_options/value_semantic.hpp>
#include <cctype>
#include <filesystem>
#include <sstream>

#include "app/options/setting_options.h"
#include "core/base/error.h"
#include "fixtures/cases/presets.h"
#include "fixtures/inputs/inputs.h"
#include "harness/world/machine.h"
#include "subjects/checkpoint/model_folder.h"
#include "subjects/model/config/builtin.h"
#include "subjects/model/zoo/registry.h"
#include "subjects/registry/subject_spec.h"
#include "suite/reference/lattice_guard.h"
#include "suite/reference/memory_needed.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;

/// `--dtype fp32,bf16` and `--dtype fp32 bf16` are the same.
Strings split_commas(const Strings& items) {
  Strings result;
  for (const auto& item : items) {
    std::istringstream stream(item);
    for (std::string part; std::getline(stream, part, ',');) {
      if (!part.empty()) result.push_back(part);
    }
  }
  return result;
}

/// Fit for a slug: nothing but letters, digits and _.
std::string slug_name(std::string name) {
  name = name.substr(name.find_last_of('/') + 1);
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  return name.empty() ? "model" : name;
}

}  // namespace

void use_model(const std::string& name, bool has_data, std::vector<Case>& cases) {
  std::error_code ignored;
  const bool is_path = std::filesystem::exists(name, ignored) || name.starts_with('.') ||
                       name.starts_with('/') || name.ends_with(".json");
  ModelFolder folder;
  if (is_path) {
    folder = load_model_folder(name);
  } else {
    folder = {builtin_config(name), "", name};
  }
  for (Case& item : cases) {
    item.config = folder.config;
    item.model_name = slug_name(folder.name);
    item.weights_path = folder.weights_path;
    if (is_lattice(item)) use_lattice_settings(item);
    // The built-in text has bytes up to 'z': a smaller vocabulary is trained on random ids, unless
    // asked otherwise.
    const bool fits_text = item.config.vocab_size > 'z';
    if (!has_data && item.data.kind == DataSource::Kind::kText && !fits_text)
      item.data.kind = DataSource::Kind::kRandomIds;
  }
}

Strings list_option(const ParsedOptions& options, const std::string& name) {
  if (!options.given(name)) return {};
  Strings items = split_commas(options.get<Strings>(name));
  if (items.empty())
    throw UsageError(
        fmt::format("--{}: nothing selected; name at least one, or leave it out", name));
  return items;
}

Strings subjects_option(const ParsedOptions& options) {
  Strings subjects = list_option(options, "subjects");
  for (std::string& subject : subjects) subject = subject_name(subject);
  return subjects;
}

Degrees with_pp_and_cp(const ParsedOptions& options, const std::string& subject, Degrees degrees) {
  for (const Axis axis : {Axis::kPp, Axis::kCp}) {
    const std::string flag(name_of(axis));
    if (options.given(flag) && subject_spec(subject).has(axis))
      degrees[axis] = options.get<int>(flag);
  }
  return degrees;
}

void declare_case_options(OptionTable& table) {
  auto add = table.group("model and mesh");
  add("model", po::value<std::string>(),
      "built-in name, config.json, or Hugging Face folder (its weights are used)");
  add("tp", po::value<int>(), "tensor-parallel degree");
  add("dp", po::value<int>(), "data-parallel degree");
  add("num-workers", po::value<int>(),
      "number of ranks: must be pp x dp x cp x tp; of ddp alone it is the dp degree");
  add("deadline", po::value<double>(),
      "seconds without progress of any rank (entering or finishing a collective, beginning a "
      "phase, "
      "ending) after which the run counts as hung (default: by the size of the case, at least "
      "120)");
  declare_setting_options(table);
  declare_input_options(table);
  for (const auto& [alias, name] : {std::pair{"tp-size", "tp"},
                                    {"dp-size", "dp"},
                                    {"model-name", "model"},
                                    {"init-weights-path", "init-weights"},
                                    {"num-training-steps", "steps"},
                                    {"nproc-per-node", "num-workers"},
                                    {"debug-steps", "steps"},
                                    {"impl", "subjects"}})
    table.aliases[alias] = name;
}

void apply_case_options(const ParsedOptions& options, const InputFiles& inputs,
                        std::vector<Case>& cases) {
  if (options.given("model"))
    use_model(options.get<std::string>("model"), options.given("data"), cases);
  if (options.given("steps")) {
    for (Case& item : cases) item.steps = options.get<int>("steps");
  }
  if (options.given("deadline")) {
    constexpr double kShortest = 0.1, kLongest = 30 * 24 * 3600.0;
    const auto seconds = options.get<double>("deadline");
    if (!(seconds >= kShortest && seconds <= kLongest))
      throw UsageError(fmt::format("--deadline must be from {} to {} seconds, got {}", kShortest,
                                   kLongest, seconds));
    for (Case& item : cases)
      item.deadline =
          std::chrono::milliseconds(static_cast<std::chrono::milliseconds::rep>(1000 * seconds));
  }
  apply_setting_options(options, cases);
  for (Case& item : cases) read_inputs_from(inputs, options.given("seq-length"), item);
}

void require_usable(const std::vector<Case>& cases, Recorded recorded) {
  for (const Case& item : cases) {
    item.validate();
    require_memory(item, recorded, memory_of_machine());
    require_counted_tokens(item, CaseData(item));
    require_exact(item);
  }
  // A file that does not fit the config is refused here, before any rank starts. All cases have the
  // same one.
  require_usable_weights(cases.front());
}

}  // namespace isoshard
