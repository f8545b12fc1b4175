// SPDX-License-Identifier: Apache-2.0
/// `respond REFERENCE PERTURBED...`: responses from perturbed runs on disk.
#include "harness/compare/respond_command.h"

#include <fmt/format.h>

#include <boost/program_options/value_semantic.hpp>
#include <filesystem>
#include <vector>

#include "core/base/error.h"
#include "harness/cli/output.h"
#include "harness/judge/respond_bundles.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;

void declare_respond(OptionTable& table) {
  auto runs = table.group("runs");
  runs("reference", po::value<std::string>(), "the trusted bundle (first argument)");
  runs("perturbed", po::value<std::vector<std::string>>()->multitoken(),
       "bundles of the same step, recorded with every weight moved by one ulp; three are usual "
       "(further arguments)");
  table.positional.add("reference", 1).add("perturbed", -1);
}

int run_respond(const ParsedOptions& options) {
  if (!options.given("reference") || !options.given("perturbed"))
    throw UsageError("respond must be followed by a reference and at least one perturbed run");
  const auto reference = options.get<std::string>("reference");
  const auto names = options.get<std::vector<std::string>>("perturbed");
  const std::size_t records = respond_bundles(reference, {names.begin(), names.end()});
  print(fmt::format("{}/responses.json: how far {} records move in {} perturbed run{}\n", reference,
                    records, names.size(), names.size() == 1 ? "" : "s"));
  return 0;
}

}  // namespace

Command respond_command(const std::string& program) {
  return {"respond",
          "measure by perturbed runs how far a reference moves",
          "respond REFERENCE PERTURBED...",
          fmt::format("  {0} respond runs/reference runs/perturbed0 runs/perturbed1 "
                      "runs/perturbed2\n"
                      "  {0} compare runs/reference runs/ddp",
                      program),
          declare_respond,
          run_respond};
}

}  // namespace isoshard
