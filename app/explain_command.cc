// SPDX-License-Identifier: Apache-2.0
/// `isoshard explain ID`: what a contract claims, why it holds, which tests prove it and which
/// faults break it; or what a fault is.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <boost/program_options/value_semantic.hpp>
#include <sstream>

#include "app/commands.h"
#include "core/base/error.h"
#include "core/base/suggest.h"
#include "harness/cli/output.h"
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

/// "A.b, C.d" as lines; a test or fault with what is known of it.
void print_names(std::string_view title, const std::string& names) {
  print("{}\n", title);
  std::string rest = names;
  while (!rest.empty()) {
    const auto end = rest.find(", ");
    const std::string name = rest.substr(0, end);
    const Fault* fault = built_in_fault(name);
    print("  {}{}\n", name, fault == nullptr ? "" : fmt::format(": {}", fault->summary));
    rest = end == std::string::npos ? "" : rest.substr(end + 2);
  }
}

void print_contract(const Contract& contract) {
  print("contract {}\n\nclaim\n  {}\n\nderivation\n", contract.id, contract.claim);
  print_indented(derivation_of(contract.id));
  print("\n");
  print_names("tests (./isoshard test -R SUITE)", contract.tests);
  print("\n");
  print_names("faults and negative controls (./isoshard verify --fault NAME)", contract.faults);
}

void print_expected(const Fault& fault) {
  print("what the suite must say\n");
  if (!fault.expected) {
    print("  nothing: the run conforms\n\n");
    return;
  }
  print("  first: {}{}; likely cause: {}\n\n", name_of(fault.expected->stage),
        fault.expected->name.empty() ? "" : " at " + fault.expected->name,
        fault.expected->diagnosis);
}

void print_fault(const Fault& fault) {
  if (fault.expected) {
    print("fault {} (class {})\n\nthe bug\n  {}\n\nreported in\n  {}\n\n", fault.id,
          fault.fault_class, fault.summary, fault.source);
  } else {
    print("benign variation {}\n\na legal difference\n  {}\n\n", fault.id, fault.summary);
  }
  isoshard::print("subjects\n  {}\n\nsmallest case\n  {}\n\n", fmt::join(fault.subjects, " "),
                  fault.smallest_case().slug());
  print_expected(fault);
  print("contracts that name it\n");
  bool any = false;
  for (const Contract& contract : contracts()) {
    const std::string names = ", " + contract.faults + ", ";
    if (names.find(", " + fault.id + ", ") == std::string::npos) continue;
    print("  {}: {}\n", contract.id, contract.claim);
    any = true;
  }
  print("{}\nsee it: isoshard verify --fault {}\n", any ? "" : "  none\n", fault.id);
}

int run_explain(const ParsedOptions& options) {
  if (!options.given("id"))
    throw UsageError(
        "nothing selected: name a contract (isoshard list contracts) or a fault (isoshard list "
        "faults)");
  const auto& id = options.get<std::string>("id");
  if (const Fault* fault = built_in_fault(id)) {
    print_fault(*fault);
    return kExitConforms;
  }
  std::vector<std::string> known;
  for (const Contract& contract : contracts()) {
    if (contract.id == id) {
      print_contract(contract);
      return kExitConforms;
    }
    known.push_back(contract.id);
  }
  for (const Fault& fault : fault_catalogue()) known.push_back(fault.id);
  for (const Fault& fault : benign_variations()) known.push_back(fault.id);
  throw UsageError(
      fmt::format("'{}' is neither a contract nor a fault{}; 'isoshard list contracts' and "
                  "'isoshard list faults' list them",
                  id, did_you_mean(id, known)));
}

}  // namespace

Command explain_command() {
  return {"explain",
          "say what a contract claims, why it holds, and which tests and faults go with it",
          "explain {CONTRACT,FAULT}",
          "  isoshard explain tp.row.bias\n"
          "  isoshard explain dp_sum_missing",
          [](OptionTable& table) {
            table.options.add_options()("id", po::value<std::string>(),
                                        "id of a contract or a fault");
            table.positional.add("id", 1);
          },
          run_explain};
}

}  // namespace isoshard
