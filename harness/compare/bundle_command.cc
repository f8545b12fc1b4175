// SPDX-License-Identifier: Apache-2.0
/// `bundle check FOLDER...`: reads bundles as `compare` does, and says what is in them.
#include "harness/compare/bundle_command.h"

#include <fmt/format.h>

#include <boost/program_options/value_semantic.hpp>
#include <map>
#include <set>
#include <vector>

#include "core/base/error.h"
#include "core/mesh/mesh_words.h"
#include "harness/bundle/bundle.h"
#include "harness/cli/output.h"
#include "harness/judge/bundle_rules.h"
#include "harness/judge/saved_run.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;

void declare_bundle(OptionTable& table) {
  auto what = table.group("what to do");
  what("action", po::value<std::string>(), "check (first argument)");
  what("bundles", po::value<std::vector<std::string>>()->multitoken(),
       "folders with a bundle each (further arguments)");
  table.positional.add("action", 1).add("bundles", -1);
}

/// Everything that a run must be to be judged, but for what only a reference can tell.
std::string check(const std::string& folder) {
  SavedRun run(folder);
  require_kept(run.bundle.trace, run.manifest);
  if (run.settings.training.empty()) run.refuse(RuleId::kSettingsMissing);
  std::vector<std::string> excused;
  for (const RecordKey& key : run.bundle.inferred)
    excused.push_back(fmt::format("{}/{}", name_of(key.kind), key.name));
  require_honest_layouts(run.bundle.trace, excused, run.manifest);
  const Trace& trace = run.bundle.trace;
  std::map<RecordKind, std::set<RecordKey>> kinds;
  std::set<int> steps;
  for (const RankTrace& rank : trace.ranks) {
    for (const Record& record : rank.records) {
      kinds[record.key.kind].insert(record.key);
      steps.insert(record.key.step);
    }
  }
  std::string text = fmt::format("{}: {}, {}, {} step{}\n", folder, trace.subject,
                                 words_of(trace.mesh.axes(), "one process"), steps.size(),
                                 steps.size() == 1 ? "" : "s");
  for (const auto& [kind, keys] : kinds)
    text += fmt::format("  {:<16}{} records\n", name_of(kind), keys.size());
  if (!run.bundle.inferred.empty())
    text +=
        fmt::format("  {} records leave their layout to the judge\n", run.bundle.inferred.size());
  for (const NotRecorded& entry : run.bundle.not_recorded)
    text += fmt::format("  not recorded: {} ({})\n", entry.pattern, entry.why);
  if (!run.bundle.responses.empty()) {
    (void)with_responses(reference_of(run), run);
    text += "  responses fit their tensors\n";
  }
  return text;
}

int run_bundle(const ParsedOptions& options) {
  if (!options.given("action") || options.get<std::string>("action") != "check")
    throw UsageError(fmt::format(
        "bundle must be followed by check, got {}",
        options.given("action") ? "'" + options.get<std::string>("action") + "'" : "nothing"));
  if (!options.given("bundles"))
    throw UsageError("bundle check must be followed by a folder with a bundle, got none");
  for (const std::string& folder : options.get<std::vector<std::string>>("bundles"))
    print(check(folder));
  return 0;
}

}  // namespace

Command bundle_command(const std::string& program) {
  return {"bundle",
          "check a bundle that another program wrote",
          "bundle check FOLDER...",
          fmt::format("  {} bundle check runs/mine", program),
          declare_bundle,
          run_bundle};
}

}  // namespace isoshard
