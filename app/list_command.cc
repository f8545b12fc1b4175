// SPDX-License-Identifier: Apache-2.0
/// `isoshard list`: what there is to select.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <boost/program_options/value_semantic.hpp>
#include <span>
#include <string>
#include <utility>

#include "app/commands.h"
#include "core/base/error.h"
#include "core/base/suggest.h"
#include "fixtures/cases/presets.h"
#include "harness/cli/output.h"
#include "harness/verdict/exit_code.h"
#include "subjects/model/config/builtin.h"
#include "subjects/registry/subject_spec.h"
#include "suite/faults/contracts.h"
#include "suite/faults/fault.h"
#include "suite/record/make_subject.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;

void list_subjects() {
  for (const SubjectSpec& spec : subject_specs()) {
    if (spec.is_reference()) continue;
    const std::string copy = spec.copy_of.empty() ? "" : fmt::format("copy of {}; ", spec.copy_of);
    print("{:<10} {}{}\n", spec.name, copy, spec.summary);
  }
}

void list_models() {
  for (const auto& name : builtin_names()) {
    const ModelConfig config = builtin_config(name);
    print("{:<22} {}, {} layers, hidden {}, {} heads, {} kv heads, ffn {}, vocabulary {}\n", name,
          config.model_type, config.num_layers, config.hidden_size, config.num_heads,
          config.num_kv_heads, config.intermediate_size, config.vocab_size);
  }
}

void list_cases() {
  for (const auto& preset : preset_names()) {
    for (const auto& item : preset_cases(preset)) print("{:<8} {}\n", preset, item.slug());
  }
}

void list_contracts() {
  for (const auto& contract : contracts()) print("{:<34} {}\n", contract.id, contract.claim);
}

/// Widths of the columns of ids and subjects.
std::pair<std::size_t, std::size_t> widths_of(std::span<const Fault> faults) {
  std::size_t id = 0, subjects = 0;
  for (const Fault& fault : faults) {
    id = std::max(id, fault.id.size());
    subjects = std::max(subjects, fmt::format("{}", fmt::join(fault.subjects, " ")).size());
  }
  return {id, subjects};
}

void list_faults() {
  const auto print_fault = [](const Fault& fault, std::pair<std::size_t, std::size_t> widths) {
    const std::string subjects = fmt::format("{}", fmt::join(fault.subjects, " "));
    const std::string source = fault.source.empty() ? "" : fmt::format(" [{}]", fault.source);
    print("{}  {:<{}}  {:<{}}  {}{}\n", fault.fault_class, fault.id, widths.first, subjects,
          widths.second, fault.summary, source);
  };
  for (const Fault& fault : fault_catalogue()) print_fault(fault, widths_of(fault_catalogue()));
  print("\nnear misses: legal differences, which must not alarm\n");
  for (const Fault& miss : benign_variations()) print_fault(miss, widths_of(benign_variations()));
}

int run_list(const ParsedOptions& options) {
  const std::vector<std::pair<std::string, void (*)()>> lists = {{"subjects", list_subjects},
                                                                 {"models", list_models},
                                                                 {"cases", list_cases},
                                                                 {"contracts", list_contracts},
                                                                 {"faults", list_faults}};
  std::vector<std::string> known;
  for (const auto& [name, function] : lists) known.push_back(name);
  if (!options.given("what"))
    throw UsageError(
        fmt::format("nothing selected: list must be told what: {}", fmt::join(known, ", ")));
  const auto& what = options.get<std::string>("what");
  for (const auto& [name, function] : lists) {
    if (name != what) continue;
    function();
    return kExitConforms;
  }
  throw UsageError(fmt::format("unknown list '{}'{}; known are {}", what, did_you_mean(what, known),
                               fmt::join(known, ", ")));
}

}  // namespace

Command list_command() {
  return {"list",
          "list subjects, models, cases, contracts or faults",
          "list {subjects,models,cases,contracts,faults}",
          "  isoshard list faults",
          [](OptionTable& table) {
            table.options.add_options()("what", po::value<std::string>(),
                                        "subjects, models, cases, contracts or faults");
            table.positional.add("what", 1);
          },
          run_list};
}

}  // namespace isoshard
