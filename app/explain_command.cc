// SPDX-License-Identifier: Apache-2.0
/// `isoshard explain ID`: what a contract claims, why it holds, which tests prove it, which faults
/// break it and which negative controls show that the tests can fail; what a fault is; which
/// sentence a finding or a cause of a report stands for, what a cause means and needs, and which
/// faults have it; or what a rule is for.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <boost/program_options/value_semantic.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "app/commands.h"
#include "core/base/error.h"
#include "core/base/suggest.h"
#include "harness/cli/output.h"
#include "harness/ids/cause.h"
#include "harness/ids/cause_notes.h"
#include "harness/ids/finding.h"
#include "harness/ids/rule.h"
#include "harness/report/text/hanging.h"
#include "harness/verdict/exit_code.h"
#include "suite/faults/contracts.h"
#include "suite/faults/fault.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;

void print_indented(const std::string& text) {
  std::istringstream lines{text};
  for (std::string line; std::getline(lines, line);) print("  {}\n", line);
}

const Fault* built_in_fault(std::string_view id) {
  for (const auto& list : {fault_catalogue(), benign_variations()}) {
    const auto found =
        std::find_if(list.begin(), list.end(), [&](const Fault& fault) { return fault.id == id; });
    if (found != list.end()) return &*found;
  }
  return nullptr;
}

void print_tests(std::string_view title, const ContractNames& names) {
  if (names.tests.empty() && names.notes.empty()) return;
  print("\n{}\n", title);
  for (const std::string& test : names.tests) print("  ./isoshard test {}\n", test);
  for (const std::string& note : names.notes) print(hanging("  note: ", note));
}

void print_faults(std::string_view title, const std::vector<std::string>& ids) {
  if (ids.empty()) return;
  print("\n{}\n", title);
  for (const std::string& id : ids) {
    print("  ./isoshard verify --fault {}\n", id);
    print(hanging("    ", built_in_fault(id)->summary));
  }
}

void print_contract(const Contract& contract) {
  print("contract {}\n\nclaim\n{}\nderivation\n", contract.id, hanging("  ", contract.claim));
  print_indented(derivation_of(contract.id));
  const ContractNames breakers = names_in(contract.faults);
  print_tests("tests", names_in(contract.tests));
  print_faults("faults: each breaks the claim and must be found", breakers.faults);
  print_tests("negative controls: each shows that the tests can fail", breakers);
  print_faults("benign variations: each must conform", breakers.benign);
}

void print_expected(const Fault& fault) {
  print("what the suite must say\n");
  if (!fault.expected) {
    print("  nothing: the run conforms\n\n");
    return;
  }
  print("  first: {}{}; likely cause: {}\n\n", name_of(fault.expected->stage),
        fault.expected->name.empty() ? "" : " at " + fault.expected->name,
        in_words(fault.expected->cause));
}

void print_fault(const Fault& fault) {
  if (fault.expected) {
    print("fault {} (class {}: {})\n\nthe bug\n{}\nreported in\n{}\n", fault.id, fault.fault_class,
          title_of_class(fault.fault_class), hanging("  ", fault.summary),
          hanging("  ", fault.source));
  } else {
    print("benign variation {}\n\na legal difference\n{}\n", fault.id,
          hanging("  ", fault.summary));
  }
  print("how it is injected\n{}\n", hanging("  ", how_injected(fault)));
  isoshard::print("subjects\n  {}\n\nsmallest case\n  {}\n\n", fmt::join(fault.subjects, " "),
                  fault.smallest_case().slug());
  print_expected(fault);
  print("contracts that name it\n");
  bool any = false;
  for (const Contract& contract : contracts()) {
    const ContractNames names = names_in(contract.faults);
    const std::vector<std::string>& ids = fault.expected ? names.faults : names.benign;
    if (std::ranges::find(ids, fault.id) == ids.end()) continue;
    print(hanging("  ", fmt::format("{}: {}", contract.id, contract.claim)));
    any = true;
  }
  print("{}\nsee it: ./isoshard verify --fault {}\n", any ? "" : "  none\n", fault.id);
}

template <TabledId Id>
void print_sentence(Id id) {
  print(
      "{} {}\n\nsentence, with the names of its values in braces; in brackets: not always "
      "there\n{}\n",
      kind_of(id), name_of(id), hanging("  ", with_names(row_of(id).text)));
}

void print_cause(CauseId id) {
  print_sentence(id);
  const auto& [of, meaning, needs, looks_like] = note_of(id);
  const ClaimNote& claim = claim_notes()[static_cast<std::size_t>(claim_of(id))];
  print("meaning\n{}\n", hanging("  ", meaning));
  print("claim\n{}\n", hanging("  ", fmt::format("{}: {}", claim.name, claim.meaning)));
  print("needs\n{}", hanging("  ", needs));
  if (!looks_like.empty()) print("\nwhat looks like it and is not\n{}", hanging("  ", looks_like));
  std::vector<std::string> faults;
  for (const Fault& fault : fault_catalogue())
    if (fault.expected->cause.id == id) faults.push_back(fault.id);
  print_faults("faults that have it", faults);
}

void print_finding(FindingId id) {
  print_sentence(id);
  if (!row_of(id).more.empty()) print("evidence\n{}\n", hanging("  ", with_names(row_of(id).more)));
}

void print_rule(RuleId id) {
  print_sentence(id);
  print("why\n{}\n", hanging("  ", row_of(id).more));
}

template <class Id>
bool print_if(std::optional<Id> id, void (*print_one)(Id)) {
  if (id.has_value()) print_one(*id);
  return id.has_value();
}

void explain(const std::string& id) {
  if (const Fault* fault = built_in_fault(id)) return print_fault(*fault);
  std::vector<std::string> known;
  for (const Contract& contract : contracts()) {
    if (contract.id == id) return print_contract(contract);
    known.push_back(contract.id);
  }
  for (const Fault& fault : fault_catalogue()) known.push_back(fault.id);
  for (const Fault& fault : benign_variations()) known.push_back(fault.id);
  const bool is_said = print_if(find_id<FindingId>(id), print_finding) ||
                       print_if(find_id<CauseId>(id), print_cause) ||
                       print_if(find_id<RuleId>(id), print_rule);
  if (is_said) return;
  for (const FindingId one : all_ids<FindingId>()) known.emplace_back(name_of(one));
  for (const CauseId one : all_ids<CauseId>()) known.emplace_back(name_of(one));
  for (const RuleId one : all_ids<RuleId>()) known.emplace_back(name_of(one));
  throw UsageError(
      fmt::format("'{}' is no contract, fault, finding, cause or rule{}; run 'isoshard list' with "
                  "contracts, faults, findings, causes or rules",
                  id, did_you_mean(id, known)));
}

int run_explain(const ParsedOptions& options) {
  if (!options.given("id"))
    throw UsageError(
        "nothing selected: name a contract, fault, finding, cause or rule; run 'isoshard list' "
        "with contracts, faults, findings, causes or rules");
  bool is_first = true;
  for (const std::string& id : options.get<std::vector<std::string>>("id")) {
    if (!is_first) print("\n");
    is_first = false;
    explain(id);
  }
  return kExitConforms;
}

}  // namespace

Command explain_command() {
  return {"explain",
          "say what a contract claims and why it holds, what a fault does, or what the id of a "
          "finding, cause or rule means",
          "explain {CONTRACT,FAULT,FINDING,CAUSE,RULE}...",
          "  isoshard explain tp.row.bias\n"
          "  isoshard explain dp_sum_missing\n"
          "  isoshard explain rank_local_partial\n"
          "  isoshard explain inconclusive",
          [](OptionTable& table) {
            table.options.add_options()("id", po::value<std::vector<std::string>>()->composing(),
                                        "ids of contracts, faults, findings, causes or rules");
            table.positional.add("id", -1);
          },
          run_explain};
}

}  // namespace isoshard
