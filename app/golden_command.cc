// SPDX-License-Identifier: Apache-2.0
/// `isoshard golden ACTION`: records, reviews, accepts, lists and verifies stored numbers of
/// earlier runs.
#include <fmt/format.h>

#include <algorithm>
#include <boost/program_options/value_semantic.hpp>
#include <filesystem>
#include <optional>
#include <set>
#include <system_error>

#include "app/commands.h"
#include "core/base/error.h"
#include "core/base/suggest.h"
#include "harness/cli/exit_code.h"
#include "harness/cli/output_folder.h"
#include "harness/cli/progress.h"
#include "harness/fault/probe.h"
#include "harness/golden/golden_mode.h"
#include "harness/golden/golden_review.h"
#include "harness/world/interrupt.h"
#include "harness/world/warm_up.h"
#include "suite/faults/fault.h"
#include "suite/goldens/golden_run.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
namespace po = boost::program_options;
using Strings = std::vector<std::string>;

const Strings kActions = {"record", "review", "accept", "status", "verify"};

void declare(OptionTable& table) {
  auto add = table.options.add_options();
  add("action", po::value<std::string>(), "record, review, accept, status or verify");
  add("name", po::value<Strings>(),
      "which goldens, * and ? as in a shell (default: all; review and accept: all that are "
      "pending)");
  add("reason", po::value<std::string>(),
      "accept: what changed the numbers; it is kept in the manifest");
  add("output-dir", po::value<std::string>(),
      "where pending goldens are (default: golden-pending in the build folder)");
  add("golden-dir", po::value<std::string>(),
      "where accepted goldens are (default: golden in the source tree)");
  add("remove", po::bool_switch(), "accept: take the named goldens off the list");
  add("fault", po::value<std::string>(),
      "record, verify: inject a fault of `isoshard list faults`, to see it refused or found");
  table.positional.add("action", 1).add("name", -1);
}

struct Request {
  std::string action, reason, fault;
  Strings names;
  fs::path golden_dir, pending_dir;
  bool remove = false;
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
    throw UsageError(fmt::format("nothing selected: golden {}", join_names(kActions)));
  if (std::ranges::find(kActions, request.action) == kActions.end())
    throw UsageError(fmt::format("unknown action '{}'{}; known are {}", request.action,
                                 did_you_mean(request.action, kActions), join_names(kActions)));
  request.reason = text_option(options, "reason");
  request.fault = text_option(options, "fault");
  request.remove = options.get<bool>("remove");
  if (options.given("name")) request.names = options.get<Strings>("name");
  request.golden_dir = options.given("golden-dir") ? fs::path(text_option(options, "golden-dir"))
                                                   : default_golden_folder();
  request.pending_dir = options.given("output-dir") ? fs::path(text_option(options, "output-dir"))
                                                    : default_pending_folder();
  const auto refuse = [&](const char* flag, bool given,
                          std::initializer_list<const char*> actions) {
    if (given && std::ranges::find(actions, request.action) == actions.end())
      throw UsageError(fmt::format("--{} is not for golden {}", flag, request.action));
  };
  refuse("reason", options.given("reason"), {"accept"});
  refuse("remove", request.remove, {"accept"});
  refuse("fault", options.given("fault"), {"record", "verify"});
  if (is_same_folder(request.golden_dir, request.pending_dir))
    throw UsageError(
        fmt::format("--output-dir {}: is the folder of accepted goldens, which only accept writes "
                    "to; name another one",
                    request.pending_dir.string()));
  if (request.remove && request.names.empty())
    throw UsageError("nothing selected: name the goldens to --remove");
  if (!request.fault.empty()) (void)find_fault(request.fault);
  return request;
}

void print(const std::string& text) {
  fmt::print("{}", text);
  if (std::fflush(stdout) != 0)
    throw InfrastructureError("cannot write the report to standard output; is its disk full?");
}

/// The run options of one golden, with the fault that was asked for, which must fire.
class Faulty {
 public:
  Faulty(const Request& request, const GoldenSpec& spec) : fault_(request.fault), spec_(spec) {}
  [[nodiscard]] RunOptions options() const {
    return fault_.empty() ? RunOptions{} : with_fault({}, find_fault(fault_), spec_.item, probe_);
  }
  [[nodiscard]] bool is_there() const noexcept { return !fault_.empty(); }
  void require_fired() const {
    if (is_there() && probe_.count() == 0)
      throw InfrastructureError(fmt::format(
          "fault {} never fired in {}: the run does not use what it breaks", fault_, spec_.name));
  }

 private:
  std::string fault_;
  const GoldenSpec& spec_;
  FaultProbe probe_;
};

/// Calls `one` for each; an error ends that one, not the rest.
template <class Items, class One>
int each(const Items& items, One one) {
  int code = kExitConforms;
  for (const auto& item : items) {
    if (interrupt_signal() != 0) return 128 + interrupt_signal();
    try {
      code = combine_exit_codes(code, one(item));
    } catch (const GoldenError& error) {
      print(fmt::format("REFUSED     {}\n", error.what()));
      code = combine_exit_codes(code, kExitGolden);
    } catch (const InfrastructureError& error) {
      print(fmt::format("INCOMPLETE  {}\n", error.what()));
      code = combine_exit_codes(code, kExitInfrastructure);
    }
  }
  return interrupt_signal() != 0 ? 128 + interrupt_signal() : code;
}

int record(const Request& request) {
  refuse_in_ci("to record a golden");
  const std::vector<GoldenSpec> specs = select_goldens(request.names);
  const OutputFolder lock(request.pending_dir, "--output-dir");
  warm_up_kernels();
  GoldenRecorder recorder;
  Progress progress(static_cast<int>(specs.size()));
  const int code = each(specs, [&](const GoldenSpec& spec) {
    progress.show(spec.name);
    const Faulty faulty(request, spec);
    const Golden golden =
        faulty.is_there() ? GoldenRecorder(faulty.options()).record(spec) : recorder.record(spec);
    faulty.require_fired();
    write_pending(request.pending_dir, golden);
    progress.clear();
    print(fmt::format("{:<10}  {}: {} lines; {}\n", golden.parity.holds ? "PENDING" : "DIVERGES",
                      spec.name, golden.lines.size(), golden.parity.text));
    return golden.parity.holds ? kExitConforms : kExitDiverges;
  });
  print(fmt::format("in {}; look at them: isoshard golden review\n", request.pending_dir.string()));
  return code;
}

/// The pending goldens that the names select.
std::vector<Golden> selected_pending(const Request& request) {
  const std::map<std::string, Golden> pending = read_pending(request.pending_dir);
  std::set<std::string> wanted;
  if (!request.names.empty()) {
    for (const GoldenSpec& spec : select_goldens(request.names)) wanted.insert(spec.name);
  }
  std::vector<Golden> selected;
  for (const auto& [name, golden] : pending) {
    if (request.names.empty() || wanted.contains(name)) selected.push_back(golden);
  }
  if (selected.empty())
    throw UsageError(fmt::format(
        "nothing selected: no such golden is pending in {}; isoshard golden record makes them",
        request.pending_dir.string()));
  return selected;
}

int review(const Request& request) {
  const GoldenStore store(request.golden_dir);
  for (const Golden& golden : selected_pending(request)) {
    std::optional<AcceptedGolden> old;
    if (const auto entry = store.entries().find(golden.name); entry != store.entries().end())
      old = AcceptedGolden{store.read(golden.name), entry->second};
    print(review_text(old, golden));
  }
  return kExitConforms;
}

int accept(const Request& request) {
  refuse_in_ci("to accept a golden");
  GoldenStore store(request.golden_dir);
  const OutputFolder lock(request.golden_dir, "--golden-dir");
  if (request.remove) {
    return each(request.names, [&](const std::string& name) {
      store.remove(name, request.reason);
      print(fmt::format("REMOVED     {}\n", name));
      return kExitConforms;
    });
  }
  return each(selected_pending(request), [&](const Golden& golden) {
    store.accept(golden, request.reason, time_now());
    std::error_code ignored;
    fs::remove(request.pending_dir / golden_file_name(golden.name), ignored);
    print(fmt::format("ACCEPTED    {}\n", golden.name));
    return kExitConforms;
  });
}

/// What is in the folder and should not be; prints it.
int report_strangers(const GoldenStore& store) {
  int code = kExitConforms;
  std::set<std::string> known;
  for (const GoldenSpec& spec : golden_specs()) known.insert(spec.name);
  for (const auto& [name, entry] : store.entries()) {
    if (known.contains(name)) continue;
    print(
        fmt::format("REFUSED     {}: the manifest lists it, and this program has no such golden "
                    "any more: isoshard golden accept --remove "
                    "{} --reason TEXT\n",
                    name, name));
    code = kExitGolden;
  }
  for (const std::string& file : store.unlisted_files()) {
    print(fmt::format("REFUSED     {}: no golden that the manifest lists; remove the file\n",
                      (store.folder() / file).string()));
    code = kExitGolden;
  }
  return code;
}

int status(const Request& request) {
  const GoldenStore store(request.golden_dir);
  const std::map<std::string, Golden> pending = read_pending(request.pending_dir);
  print(fmt::format("accepted in {}, pending in {}\n", request.golden_dir.string(),
                    request.pending_dir.string()));
  const int code = each(select_goldens(request.names), [&](const GoldenSpec& spec) {
    const std::string also = pending.contains(spec.name) ? ", a new one is pending" : "";
    if (!also.empty() && !store.entries().contains(spec.name)) {
      print(fmt::format("PENDING     {}\n", spec.name));
      return kExitGolden;
    }
    const Golden golden = store.read(spec.name), identity = golden_identity(spec);
    const GoldenEntry& entry = store.entries().at(spec.name);
    if (const std::string stale = staleness(golden, identity); !stale.empty())
      throw GoldenError(fmt::format(
          "{}: is stale, the golden is of another run:\n  {}\nif that is meant, record it anew: {}",
          spec.name, stale, command_to_create(spec.name)));
    const char* const here =
        golden.arithmetic == identity.arithmetic ? "exact here" : "within its drift here";
    print(fmt::format("ACCEPTED    {}: {} lines, {}, accepted {}: {}{}\n", spec.name,
                      golden.lines.size(), here, entry.accepted, entry.reason, also));
    return kExitConforms;
  });
  return request.names.empty() ? combine_exit_codes(code, report_strangers(store)) : code;
}

int verify(const Request& request) {
  const GoldenStore store(request.golden_dir);
  const std::vector<GoldenSpec> specs = select_goldens(request.names);
  warm_up_kernels();
  Progress progress(static_cast<int>(specs.size()));
  int matches = 0, drifts = 0;
  int code = each(specs, [&](const GoldenSpec& spec) {
    progress.show(spec.name);
    const Faulty faulty(request, spec);
    const GoldenCheck check = check_golden(store, spec, faulty.options());
    faulty.require_fired();
    progress.clear();
    print(check.text);
    matches += check.comparison.answer == GoldenAnswer::kMatch ? 1 : 0;
    drifts += check.comparison.answer == GoldenAnswer::kDrift ? 1 : 0;
    return check.comparison.answer == GoldenAnswer::kRegression ? kExitDiverges : kExitConforms;
  });
  progress.clear();
  if (request.names.empty()) code = combine_exit_codes(code, report_strangers(store));
  print(fmt::format("{} of {} goldens match, {} more drift as this machine's arithmetic explains\n",
                    matches, specs.size(), drifts));
  return code;
}

int run(const ParsedOptions& options) {
  const Request request = request_of(options);
  if (request.action == "record") return record(request);
  if (request.action == "review") return review(request);
  if (request.action == "accept") return accept(request);
  return request.action == "status" ? status(request) : verify(request);
}

}  // namespace

Command golden_command() {
  return {"golden",
          "stored numbers of earlier accepted runs: record, review, accept, list and verify them "
          "(docs/goldens.md)",
          "golden record|review|accept|status|verify [NAME...] [options]",
          "  isoshard golden verify                                    run all and compare: match, "
          "drift or regression\n"
          "  isoshard golden verify 'curve_*_fp32_*'                   some\n"
          "  isoshard golden record curve_ddp_dp2_fp32_sgd             run it anew; the numbers "
          "are pending\n"
          "  isoshard golden review                                    old beside new\n"
          "  isoshard golden accept curve_ddp_dp2_fp32_sgd --reason \"LibTorch 2.12 fuses the "
          "embedding's gradient\"\n"
          "  isoshard golden status",
          declare,
          run};
}

}  // namespace isoshard
