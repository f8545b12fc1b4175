// SPDX-License-Identifier: Apache-2.0
/// `isoshard golden ACTION`: records, reviews, accepts, lists and verifies stored numbers of
/// earlier runs.
#include <fmt/format.h>

#include <algorithm>
#include <boost/program_options/value_semantic.hpp>
#include <filesystem>
#include <functional>
#include <map>
#include <system_error>

#include "app/commands.h"
#include "app/options/attach_options.h"
#include "app/options/job_report.h"
#include "core/base/error.h"
#include "core/base/suggest.h"
#include "harness/cli/output_folder.h"
#include "harness/cli/provenance.h"
#include "harness/cli/report_file.h"
#include "harness/cli/report_printer.h"
#include "harness/report/formats/earlier_reports.h"
#include "harness/report/formats/report_formats.h"
#include "harness/world/forked/forked_world.h"
#include "suite/faults/fault.h"
#include "suite/goldens/golden_report.h"
#include "suite/goldens/golden_specs.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
namespace po = boost::program_options;
using Strings = std::vector<std::string>;

const Strings kActions = {"record", "review", "accept", "status", "verify"};

void declare_golden(OptionTable& table) {
  auto what = table.group("what to do");
  what("action", po::value<std::string>(), "record, review, accept, status or verify");
  what("name", po::value<Strings>(),
       "which goldens, * and ? as in a shell (default: all; review and accept: all that are "
       "pending)");
  what("reason", po::value<std::string>(),
       "accept: what changed the numbers; the manifest keeps it");
  what("remove", po::bool_switch(), "accept: take the named goldens off the list");
  what("fault", po::value<std::string>(),
       "record, verify: inject a fault of `isoshard list faults`, to see it refused or found");
  auto output = table.group("folders");
  output("output-dir", po::value<std::string>(),
         "where pending goldens are (default: golden-pending in the build folder)");
  output("golden-dir", po::value<std::string>(),
         "where accepted goldens are (default: golden in the source tree)");
  output("report-dir", po::value<std::string>(),
         "write report.json, report.txt and junit.xml to this folder");
  declare_report_file(table);
  declare_attach_options(table);
  table.positional.add("action", 1).add("name", -1);
}

struct Request {
  std::string action;
  GoldenPlan plan;
  fs::path report_dir;  ///< empty: no report is written
};

std::string text_option(const ParsedOptions& options, const char* name) {
  return options.given(name) ? options.get<std::string>(name) : std::string();
}

bool is_same_folder(const fs::path& a, const fs::path& b) {
  std::error_code ignored;
  return fs::weakly_canonical(fs::absolute(a), ignored) ==
         fs::weakly_canonical(fs::absolute(b), ignored);
}

Request request_of(const ParsedOptions& options) {
  Request request;
  request.action = text_option(options, "action");
  if (request.action.empty())
    throw UsageError(
        fmt::format("nothing selected: golden must be told what to do: {}", join_names(kActions)));
  if (std::ranges::find(kActions, request.action) == kActions.end())
    throw UsageError(fmt::format("unknown action '{}'{}; known are {}", request.action,
                                 did_you_mean(request.action, kActions), join_names(kActions)));
  GoldenPlan& plan = request.plan;
  plan.reason = text_option(options, "reason");
  plan.fault = text_option(options, "fault");
  plan.removes = options.get<bool>("remove");
  if (options.given("name")) plan.names = options.get<Strings>("name");
  if (options.given("golden-dir")) plan.accepted = text_option(options, "golden-dir");
  if (options.given("output-dir")) plan.pending = text_option(options, "output-dir");
  request.report_dir = text_option(options, "report-dir");
  const auto refuse = [&](const char* flag, bool given,
                          std::initializer_list<const char*> actions) {
    if (given && std::ranges::find(actions, request.action) == actions.end())
      throw UsageError(
          fmt::format("--{} is not an option of golden {}; leave it out", flag, request.action));
  };
  refuse("reason", options.given("reason"), {"accept"});
  refuse("remove", plan.removes, {"accept"});
  refuse("fault", options.given("fault"), {"record", "verify"});
  if (is_same_folder(plan.accepted, plan.pending))
    throw UsageError(
        fmt::format("--output-dir {}: is the folder of accepted goldens, which only accept writes "
                    "to; name another one",
                    plan.pending.string()));
  if (plan.removes && plan.names.empty())
    throw UsageError("nothing selected: name the goldens to --remove");
  if (!plan.fault.empty()) (void)find_fault(plan.fault);
  return request;
}

using Action = Report (*)(const GoldenPlan& plan, const GoldenObserver& observer);

const std::map<std::string, Action, std::less<>> kFunctions = {{"record", record_goldens},
                                                               {"review", review_goldens},
                                                               {"accept", accept_goldens},
                                                               {"status", list_goldens},
                                                               {"verify", verify_goldens}};

int run_golden(const ParsedOptions& options) {
  Request request = request_of(options);
  request.plan.most_ranks = ranks_of_job(options);
  if (request.plan.most_ranks != 0 && request.action != "verify")
    throw UsageError(
        fmt::format("--attach is not an option of golden {}; leave it out", request.action));
  if (!reports_here()) request.report_dir.clear();
  const bool records = request.action == "record", accepts = request.action == "accept";
  if (records || accepts) refuse_in_ci(fmt::format("to {} a golden", request.action));
  const bool runs = records || request.action == "verify";
  const std::size_t total = runs ? select_goldens(request.plan.names).size() : 0;
  const OutputFolder pending(records ? request.plan.pending : fs::path(), "--output-dir"),
      accepted(accepts ? request.plan.accepted : fs::path(), "--golden-dir"),
      reports(request.report_dir, "--report-dir");
  const ReportFile file(options, reports_here());
  set_aside_reports(request.report_dir);
  ReportPrinter printer(static_cast<int>(total));
  const GoldenObserver observer = {
      .on_note = [&](const std::string& line) { printer.note(line); },
      .on_start = [&](const std::string& name) { printer.progress().show(name); },
      .on_golden = [&](const ReportGolden& item) { printer.add(item); }};
  Report report = kFunctions.at(request.action)(request.plan, observer);
  agree_on_report(default_launcher(), report, [&](const ReportCase& item) { printer.add(item); });
  report.provenance = provenance_of(options);
  printer.finish(report);
  write_report(request.report_dir, report);
  file.write(report, {});
  if (request.action == "status" || request.action == "review") require_printed();
  return report.exit_code;
}

}  // namespace

Command golden_command() {
  return {"golden",
          "stored numbers of earlier accepted runs: record, review, accept, list and verify them "
          "(docs/reference/goldens.md)",
          "golden record|review|accept|status|verify [NAME...] [options]",
          "  isoshard golden verify                                    run all and compare: match, "
          "drift or regression\n"
          "  isoshard golden verify 'curve_*_fp32_*'                   some\n"
          "  isoshard golden record curve_ddp_dp2_fp32_sgd             run it anew; the numbers "
          "are pending\n"
          "  isoshard golden review                                    old beside new\n"
          "  isoshard golden accept curve_ddp_dp2_fp32_sgd --reason \"LibTorch 2.12 fuses the "
          "embedding's gradient\"\n"
          "  isoshard golden status\n"
          "  isoshard golden verify --report goldens.html              a page to read",
          declare_golden,
          run_golden,
          /*judges=*/true};
}

}  // namespace isoshard
