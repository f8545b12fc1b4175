// SPDX-License-Identifier: Apache-2.0
/// The parts of a report as test cases.
#include "harness/report/junit/junit_report.h"

#include <fmt/format.h>

#include <string_view>
#include <utility>
#include <vector>

#include "core/base/printable.h"
#include "harness/verdict/exit_code.h"

namespace isoshard {
namespace {

/// What XML 1.0 has no character for becomes a question mark.
std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (const std::string_view entity = entity_of(c); !entity.empty()) {
      result += entity;
    } else if (c == '\n') {
      result += "&#10;";
    } else {
      result += static_cast<unsigned char>(c) < 0x20 && c != '\t' ? '?' : c;
    }
  }
  return result;
}

struct TestCase {
  enum class Outcome { kPassed, kFailed, kError } outcome = Outcome::kPassed;
  std::string_view part;  ///< "case", "curve", "golden", "experiment", "benchmark"
  std::string name;
  std::string message;  ///< why it is not passed
  std::vector<std::pair<std::string_view, std::string>> properties;
};

TestCase::Outcome outcome_of(int exit_code) {
  if (exit_code == kExitConforms) return TestCase::Outcome::kPassed;
  return exit_code == kExitInfrastructure ? TestCase::Outcome::kError : TestCase::Outcome::kFailed;
}

/// What `isoshard explain` explains.
template <TabledId Id>
void add_id(std::string_view property, Id id, TestCase& test) {
  if (id != Id::kNone) test.properties.emplace_back(property, name_of(id));
}

TestCase test_of(const ReportCase& item) {
  TestCase test{outcome_of(item.exit_code()), "case", item.name, item.failure, {}};
  if (!item.verdict.has_value()) {
    test.properties = {{"verdict", "INCOMPLETE"}};
    add_id("rule", item.rule.id, test);
    return test;
  }
  const Verdict& verdict = *item.verdict;
  test.message =
      item.unmet.empty() ? verdict.reason : fmt::format("{}; {}", item.unmet, verdict.reason);
  test.properties = {{"verdict", words_of_verdict(verdict)}, {"subject", verdict.subject}};
  if (item.detection.has_value()) {
    test.name += " with " + item.fault;
    test.message = item.detection->problem;
  }
  if (verdict.strength != Strength::kNone)
    test.properties.emplace_back("strength", name_of(verdict.strength));
  if (!verdict.copy_of.empty()) test.properties.emplace_back("copy_of", verdict.copy_of);
  test.properties.emplace_back("runs", fmt::format("{}", verdict.runs));
  add_id("rule", verdict.rule.id, test);
  if (!verdict.findings.empty()) {
    add_id("finding", verdict.findings.front().id, test);
    add_id("cause", verdict.findings.front().cause.id, test);
  }
  return test;
}

TestCase test_of(const ReportCurve& item) {
  TestCase test{outcome_of(item.exit_code()), "curve", item.name, item.failure, {}};
  if (item.verdict.has_value()) {
    test.message = item.verdict->reason;
    test.properties = {{"verdict", std::string(name_of(item.verdict->status))},
                       {"subject", item.curve.subject}};
    if (item.verdict->strength != Strength::kNone)
      test.properties.emplace_back("strength", name_of(item.verdict->strength));
    if (!item.copy_of.empty()) test.properties.emplace_back("copy_of", item.copy_of);
  }
  return test;
}

TestCase test_of(const ReportGolden& item) {
  const bool is_right = item.status != "regression" && item.status != "diverges" &&
                        item.status != "refused" && item.status != "incomplete";
  const auto wrong =
      item.status == "incomplete" ? TestCase::Outcome::kError : TestCase::Outcome::kFailed;
  return {is_right ? TestCase::Outcome::kPassed : wrong,
          "golden",
          item.name,
          item.text,
          {{"verdict", item.status}}};
}

TestCase test_of(const ReportBenchmark& item) {
  const auto outcome = item.status == "measured"  ? TestCase::Outcome::kPassed
                       : item.status == "unclear" ? TestCase::Outcome::kError
                                                  : TestCase::Outcome::kFailed;
  return {outcome, "benchmark", item.name, item.text, {{"verdict", item.status}}};
}

TestCase test_of(const ReportExperiment& item) {
  return {item.holds ? TestCase::Outcome::kPassed : TestCase::Outcome::kFailed,
          "experiment",
          item.name,
          item.holds ? "" : "a claim of the experiment does not hold",
          {}};
}

std::string xml_of(const TestCase& test) {
  std::string xml = fmt::format("    <testcase classname=\"isoshard.{}\" name=\"{}\">\n", test.part,
                                escaped(test.name));
  if (!test.properties.empty()) {
    xml += "      <properties>\n";
    for (const auto& [name, value] : test.properties)
      xml += fmt::format("        <property name=\"{}\" value=\"{}\"/>\n", name, escaped(value));
    xml += "      </properties>\n";
  }
  if (test.outcome != TestCase::Outcome::kPassed)
    xml += fmt::format("      <{} message=\"{}\"/>\n",
                       test.outcome == TestCase::Outcome::kError ? "error" : "failure",
                       escaped(test.message));
  return xml + "    </testcase>\n";
}

}  // namespace

std::string junit_of(const Report& report) {
  std::vector<TestCase> tests;
  for (const ReportCase& item : report.cases) tests.push_back(test_of(item));
  for (const ReportCurve& item : report.curves) tests.push_back(test_of(item));
  for (const ReportGolden& item : report.goldens) tests.push_back(test_of(item));
  for (const ReportExperiment& item : report.experiments) tests.push_back(test_of(item));
  for (const ReportBenchmark& item : report.benchmarks) tests.push_back(test_of(item));
  std::size_t failures = 0, errors = 0;
  std::string body;
  for (const TestCase& test : tests) {
    failures += test.outcome == TestCase::Outcome::kFailed ? 1 : 0;
    errors += test.outcome == TestCase::Outcome::kError ? 1 : 0;
    body += xml_of(test);
  }
  const std::string counts =
      fmt::format("tests=\"{}\" failures=\"{}\" errors=\"{}\"", tests.size(), failures, errors);
  return fmt::format(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites name=\"isoshard\" {0}>\n"
      "  <testsuite name=\"isoshard\" {0}>\n{1}  </testsuite>\n</testsuites>\n",
      counts, body);
}

}  // namespace isoshard
