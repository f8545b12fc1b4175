// SPDX-License-Identifier: Apache-2.0
/// `isoshard list`: what there is to select.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <boost/program_options/value_semantic.hpp>
#include <string>
#include <utility>

#include "app/commands.h"
#include "core/base/error.h"
#include "core/base/suggest.h"
#include "fixtures/cases/presets.h"
#include "harness/cli/output.h"
#include "harness/ids/cause.h"
#include "harness/ids/finding.h"
#include "harness/ids/rule.h"
#include "harness/report/text/hanging.h"
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
    print(hanging(fmt::format("{:<10} ", spec.name), fmt::format("{}{}", copy, spec.summary)));
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
  for (const auto& contract : contracts())
    print(hanging(fmt::format("{:<34} ", contract.id), contract.claim));
}

void print_row(const Fault& fault) {
  const std::string source = fault.source.empty() ? "" : fmt::format(" [{}]", fault.source);
  isoshard::print("  {:<36} {}\n", fault.id, fmt::join(fault.subjects, " "));
  print(hanging("    ", fault.summary + source));
}

void list_faults() {
  char last = '\0';
  for (const Fault& fault : fault_catalogue()) {
    if (fault.fault_class != last) {
      print("{}{}  {}\n", last == '\0' ? "" : "\n", fault.fault_class,
            title_of_class(fault.fault_class));
    }
    last = fault.fault_class;
    print_row(fault);
  }
  print("\nbenign variations: legal differences, which must not alarm\n");
  for (const Fault& variation : benign_variations()) print_row(variation);
}

template <TabledId Id>
void list_ids() {
  for (const Id id : all_ids<Id>()) {
    print("  {}\n", name_of(id));
    print(hanging("    ", row_of(id).text));
  }
}

int run_list(const ParsedOptions& options) {
  const std::vector<std::pair<std::string, void (*)()>> lists = {
      {"subjects", list_subjects},   {"models", list_models},    {"cases", list_cases},
      {"contracts", list_contracts}, {"faults", list_faults},    {"findings", list_ids<FindingId>},
      {"causes", list_ids<CauseId>}, {"rules", list_ids<RuleId>}};
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
          "list subjects, models, cases, contracts, faults, findings, causes or rules",
          "list {subjects,models,cases,contracts,faults,findings,causes,rules}",
          "  isoshard list faults",
          [](OptionTable& table) {
            table.options.add_options()(
                "what", po::value<std::string>(),
                "subjects, models, cases, contracts, faults, findings, causes "
                "or rules");
            table.positional.add("what", 1);
          },
          run_list};
}

}  // namespace isoshard
