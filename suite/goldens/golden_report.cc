// SPDX-License-Identifier: Apache-2.0
/// One golden after the other, and what each leaves in the report.
#include "suite/goldens/golden_report.h"

#include <fmt/format.h>

#include <map>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "core/base/error.h"
#include "harness/golden/golden_review.h"
#include "harness/world/interrupt.h"
#include "harness/world/machine.h"
#include "harness/world/warm_up.h"
#include "suite/faults/fault.h"
#include "suite/goldens/golden_run.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;

/// A report that grows, and who listens to it.
class GoldenReport {
 public:
  explicit GoldenReport(const GoldenObserver& observer) : observer_(observer) {
    report_.environment = settings_in_environment();
  }

  void note(std::string line) {
    if (observer_.on_note) observer_.on_note(line);
    report_.notes.push_back(std::move(line));
  }
  void start(const std::string& name) const {
    if (observer_.on_start) observer_.on_start(name);
  }
  void add(std::string name, std::string status, std::string text, int code = kExitConforms) {
    const ReportGolden& added =
        report_.add(ReportGolden{std::move(name), std::move(status), std::move(text)}, code);
    if (observer_.on_golden) observer_.on_golden(added);
  }
  void refuse(std::string name, const std::string& why) {
    add(std::move(name), "refused", fmt::format("REFUSED     {}\n", why), kExitGolden);
  }

  /// Calls `one` for each; an error ends that one, not the rest.
  template <class Items, class Name, class One>
  void each(const Items& items, Name name_of_item, One one) {
    for (const auto& item : items) {
      if (interrupt_signal() != 0) return;
      const std::string name = name_of_item(item);
      try {
        one(item);
      } catch (const GoldenError& error) {
        refuse(name, error.what());
      } catch (const InfrastructureError& error) {
        add(name, "incomplete", fmt::format("INCOMPLETE  {}\n", error.what()), kExitInfrastructure);
      }
    }
  }

  [[nodiscard]] Report finish(std::string summary = "") {
    if (interrupt_signal() != 0) report_.exit_code = 128 + interrupt_signal();
    report_.summary = std::move(summary);
    return std::move(report_);
  }

 private:
  const GoldenObserver& observer_;
  Report report_;
};

std::string name_of_spec(const GoldenSpec& spec) {
  return spec.name;
}
std::string name_of_golden(const Golden& golden) {
  return golden.name;
}

/// The run options of one golden, with the fault that was asked for, which must fire.
class Faulty {
 public:
  Faulty(const std::string& fault, const GoldenSpec& spec) : fault_(fault), spec_(spec) {}
  [[nodiscard]] RunOptions options() const {
    return fault_.empty() ? RunOptions{} : with_fault({}, find_fault(fault_), spec_.item, probe_);
  }
  void require_it_fired() const {
    if (!fault_.empty()) require_fired(probe_, fault_, spec_.name);
  }

 private:
  const std::string& fault_;
  const GoldenSpec& spec_;
  FaultProbe probe_;
};

/// The pending goldens that the names select.
std::vector<Golden> selected_pending(const GoldenPlan& plan) {
  const std::map<std::string, Golden> pending = read_pending(plan.pending);
  std::set<std::string> wanted;
  if (!plan.names.empty()) {
    for (const GoldenSpec& spec : select_goldens(plan.names)) wanted.insert(spec.name);
  }
  std::vector<Golden> selected;
  for (const auto& [name, golden] : pending) {
    if (plan.names.empty() || wanted.contains(name)) selected.push_back(golden);
  }
  if (selected.empty())
    throw UsageError(fmt::format(
        "nothing selected: no such golden is pending in {}; isoshard golden record makes them",
        plan.pending.string()));
  return selected;
}

/// What is in the folder and should not be.
void report_strangers(const GoldenStore& store, GoldenReport& report) {
  std::set<std::string> known;
  for (const GoldenSpec& spec : golden_specs()) known.insert(spec.name);
  for (const auto& [name, entry] : store.entries()) {
    if (known.contains(name)) continue;
    report.refuse(name, fmt::format("{}: the manifest lists it, and this program has no such "
                                    "golden any more: isoshard golden accept --remove {} --reason "
                                    "TEXT",
                                    name, name));
  }
  for (const std::string& file : store.unlisted_files())
    report.refuse(file, fmt::format("{}: the manifest does not list this golden; remove the file",
                                    (store.folder() / file).string()));
}

void list_one(const GoldenSpec& spec, const GoldenStore& store, bool is_pending,
              GoldenReport& report) {
  if (is_pending && !store.entries().contains(spec.name)) {
    report.add(spec.name, "pending", fmt::format("PENDING     {}\n", spec.name), kExitGolden);
    return;
  }
  const Golden golden = store.read(spec.name), identity = golden_identity(spec);
  const GoldenEntry& entry = store.entries().at(spec.name);
  if (const std::string stale = staleness(golden, identity); !stale.empty())
    throw GoldenError(fmt::format(
        "{}: is stale, the golden is of another run:\n  {}\nif that is meant, record it anew: {}",
        spec.name, stale, command_to_create(spec.name)));
  const char* const here =
      golden.arithmetic == identity.arithmetic ? "exact here" : "within its drift here";
  report.add(spec.name, "accepted",
             fmt::format("ACCEPTED    {}: {} lines, {}, accepted {}: {}{}\n", spec.name,
                         golden.lines.size(), here, entry.accepted, entry.reason,
                         is_pending ? ", a new one is pending" : ""));
}

}  // namespace

Report record_goldens(const GoldenPlan& plan, const GoldenObserver& observer) {
  refuse_in_ci("to record a golden");
  GoldenReport report(observer);
  GoldenRecorder recorder;
  warm_up_kernels();
  report.each(select_goldens(plan.names), name_of_spec, [&](const GoldenSpec& spec) {
    report.start(spec.name);
    const Faulty faulty(plan.fault, spec);
    const Golden golden =
        plan.fault.empty() ? recorder.record(spec) : GoldenRecorder(faulty.options()).record(spec);
    faulty.require_it_fired();
    write_pending(plan.pending, golden);
    const bool holds = golden.parity.holds;
    report.add(spec.name, holds ? "pending" : "diverges",
               fmt::format("{:<10}  {}: {} lines; {}\n", holds ? "PENDING" : "DIVERGES", spec.name,
                           golden.lines.size(), golden.parity.text),
               holds ? kExitConforms : kExitDiverges);
  });
  return report.finish(
      fmt::format("in {}; look at them: isoshard golden review", plan.pending.string()));
}

Report review_goldens(const GoldenPlan& plan, const GoldenObserver& observer) {
  GoldenReport report(observer);
  const GoldenStore store(plan.accepted);
  for (const Golden& golden : selected_pending(plan)) {
    std::optional<AcceptedGolden> old;
    if (const auto entry = store.entries().find(golden.name); entry != store.entries().end())
      old = AcceptedGolden{store.read(golden.name), entry->second};
    report.add(golden.name, "reviewed", review_text(old, golden));
  }
  return report.finish();
}

Report accept_goldens(const GoldenPlan& plan, const GoldenObserver& observer) {
  refuse_in_ci("to accept a golden");
  GoldenReport report(observer);
  GoldenStore store(plan.accepted);
  if (plan.removes) {
    const auto itself = [](const std::string& name) { return name; };
    report.each(plan.names, itself, [&](const std::string& name) {
      store.remove(name, plan.reason);
      report.add(name, "removed", fmt::format("REMOVED     {}\n", name));
    });
    return report.finish();
  }
  report.each(selected_pending(plan), name_of_golden, [&](const Golden& golden) {
    store.accept(golden, plan.reason, time_now());
    std::error_code ignored;
    fs::remove(plan.pending / golden_file_name(golden.name), ignored);
    report.add(golden.name, "accepted", fmt::format("ACCEPTED    {}\n", golden.name));
  });
  return report.finish();
}

Report list_goldens(const GoldenPlan& plan, const GoldenObserver& observer) {
  GoldenReport report(observer);
  const GoldenStore store(plan.accepted);
  const std::map<std::string, Golden> pending = read_pending(plan.pending);
  report.note(
      fmt::format("accepted in {}, pending in {}", plan.accepted.string(), plan.pending.string()));
  report.each(select_goldens(plan.names), name_of_spec, [&](const GoldenSpec& spec) {
    list_one(spec, store, pending.contains(spec.name), report);
  });
  if (plan.names.empty()) report_strangers(store, report);
  return report.finish();
}

namespace {

void skip_wider_than(int most_ranks, std::vector<GoldenSpec>& specs, GoldenReport& report) {
  std::erase_if(specs, [&](const GoldenSpec& spec) {
    if (most_ranks == 0 || spec.item.world_size() <= most_ranks) return false;
    report.note(fmt::format("skipped {}: it needs {} ranks, and the attached world has {}",
                            spec.name, spec.item.world_size(), most_ranks));
    return true;
  });
  if (specs.empty())
    throw UsageError(
        fmt::format("nothing selected: every golden needs more than {} ranks", most_ranks));
}

}  // namespace

Report verify_goldens(const GoldenPlan& plan, const GoldenObserver& observer) {
  GoldenReport report(observer);
  const GoldenStore store(plan.accepted);
  std::vector<GoldenSpec> specs = select_goldens(plan.names);
  skip_wider_than(plan.most_ranks, specs, report);
  warm_up_kernels();
  int matches = 0, drifts = 0;
  report.each(specs, name_of_spec, [&](const GoldenSpec& spec) {
    report.start(spec.name);
    const Faulty faulty(plan.fault, spec);
    const GoldenCheck check = check_golden(store, spec, faulty.options());
    faulty.require_it_fired();
    const GoldenAnswer answer = check.comparison.answer;
    matches += answer == GoldenAnswer::kMatch ? 1 : 0;
    drifts += answer == GoldenAnswer::kDrift ? 1 : 0;
    report.add(spec.name, std::string(name_of(answer)), check.text,
               answer == GoldenAnswer::kRegression ? kExitDiverges : kExitConforms);
  });
  if (plan.names.empty()) report_strangers(store, report);
  return report.finish(
      fmt::format("{} of {} goldens match, {} more drift as this machine's arithmetic explains",
                  matches, specs.size(), drifts));
}

}  // namespace isoshard
