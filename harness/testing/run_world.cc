// SPDX-License-Identifier: Apache-2.0
/// Forwarding of expectations from ranks, and their recording in the controller.
#include "harness/testing/run_world.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "harness/world/forked/hooks.h"
#include "harness/world/warm_up.h"

namespace isoshard {
namespace {

using ::testing::ScopedFakeTestPartResultReporter;
using ::testing::TestPartResult;

// In a rank: what GoogleTest would record goes to the controller instead. Nothing is printed or
// kept here.
class ForwardingReporter final : public ScopedFakeTestPartResultReporter {
 public:
  explicit ForwardingReporter(InterceptMode mode)
      : ScopedFakeTestPartResultReporter(mode, nullptr) {}

  void ReportTestPartResult(const TestPartResult& result) override {
    if (result.passed()) return;
    std::string text = result.message();
    if (result.skipped())
      text = "GTEST_SKIP() in a rank: skip before the world is started. " + text;
    const char* file = result.file_name() != nullptr ? result.file_name() : "unknown file";
    forward_failure({.file = file,
                     .line = result.line_number(),
                     .text = text,
                     .fatal = result.fatally_failed()});
  }
};

// Those of the running test, of its suite and of the program.
int num_properties() {
  const ::testing::UnitTest& program = *::testing::UnitTest::GetInstance();
  int count = program.ad_hoc_test_result().test_property_count();
  if (program.current_test_suite() != nullptr)
    count += program.current_test_suite()->ad_hoc_test_result().test_property_count();
  if (program.current_test_info() != nullptr)
    count += program.current_test_info()->result()->test_property_count();
  return count;
}

int num_properties_at_begin = 0;

void forward_expectations() {
  // They live as long as the process: a thread may outlive the body.
  new ForwardingReporter(ForwardingReporter::INTERCEPT_ALL_THREADS);
  // Before one that the controller's thread may have had at the fork.
  new ForwardingReporter(ForwardingReporter::INTERCEPT_ONLY_CURRENT_THREAD);
  // The controller does that when it records the failure.
  GTEST_FLAG_SET(break_on_failure, false);
  GTEST_FLAG_SET(throw_on_failure, false);
  num_properties_at_begin = num_properties();
}

// A property has no way to the controller's test.
void report_lost_properties() {
  if (num_properties() == num_properties_at_begin) return;
  ADD_FAILURE() << "RecordProperty() in a rank: return the value, and record it in the test";
}

std::string name_of_running_test() {
  const ::testing::TestInfo* test = ::testing::UnitTest::GetInstance()->current_test_info();
  return test == nullptr ? "" : fmt::format("{}.{}", test->test_suite_name(), test->name());
}

WorldOptions named(WorldOptions options) {
  if (options.name.empty()) options.name = name_of_running_test();
  return options;
}

std::set<int>& sizes_started() {
  static std::set<int> sizes;
  return sizes;
}

// Makes this process the controller of forked worlds, whose ranks forward their expectations.
// Whichever main the program has.
bool join_gtest_to_worlds() {
  make_controller();
  set_world_hooks({.before_first_world = warm_up_kernels,
                   .before_world = [](int size) { sizes_started().insert(size); },
                   .rank_begins = forward_expectations,
                   .rank_returned = report_lost_properties});
  return true;
}

void join_once() {
  static const bool joined = join_gtest_to_worlds();
  (void)joined;
}

// Before main, so that no tensor operation and no world comes earlier. A world that another
// source's initializer starts may still do so, and joins itself.
[[maybe_unused]] const bool joined_before_main = (join_once(), true);

}  // namespace

std::string world_sizes_problem(std::string_view declared, bool is_share) {
  std::set<int> sizes = sizes_started();
  sizes.erase(1);
  const std::string started = fmt::format("{}", fmt::join(sizes, ","));
  const auto is_declared = [&](int size) {
    return fmt::format(",{},", declared).find(fmt::format(",{},", size)) != std::string::npos;
  };
  if (is_share ? std::ranges::all_of(sizes, is_declared) : started == declared) return "";
  return fmt::format(
      "its worlds had the sizes '{}', and its labels say '{}': mend SUITES of its isoshard_test()",
      started, declared);
}

WorldReport detail::run_and_record(WorldOptions options, const ForkedWorld::Body& body,
                                   const std::source_location& where) {
  join_once();
  WorldReport report = default_launcher().launch(named(std::move(options)), body)->wait();
  bool has_forwarded = false;
  bool is_explained = true;  // by the failures that are forwarded
  for (const RankReport& rank : report.ranks) {
    for (const ForwardedFailure& failure : rank.failures) {
      const std::string text = fmt::format("[rank {}] {}", rank.rank, failure.text);
      GTEST_MESSAGE_AT_(failure.file.c_str(), failure.line, text.c_str(),
                        TestPartResult::kNonFatalFailure);
      has_forwarded = true;
    }
    is_explained =
        is_explained && (rank.end == RankEnd::kReturned || rank.end == RankEnd::kReleased);
  }
  const bool culprit_asserted =
      report.culprit >= 0 &&
      std::ranges::any_of(report.ranks[static_cast<std::size_t>(report.culprit)].failures,
                          &ForwardedFailure::fatal);
  if (!report.ok() && !(has_forwarded && is_explained && !report.interrupted &&
                        (report.cause.empty() || culprit_asserted))) {
    ADD_FAILURE_AT(where.file_name(), static_cast<int>(where.line())) << report.describe();
  }
  return report;
}

WorldReport run_world_report(WorldOptions options, ForkedWorld::Body body) {
  join_once();
  return default_launcher().launch(named(std::move(options)), std::move(body))->wait();
}

}  // namespace isoshard
