// SPDX-License-Identifier: Apache-2.0
/// `isoshard oracle DIR...`: holds our models to the numbers of Hugging Face transformers.
#include <fmt/format.h>

#include <boost/program_options/value_semantic.hpp>

#include "app/commands.h"
#include "core/base/error.h"
#include "fixtures/oracle/oracle.h"
#include "harness/cli/output.h"
#include "harness/verdict/exit_code.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;
using Strings = std::vector<std::string>;

void declare_oracle(OptionTable& table) {
  table.options.add_options()("folder", po::value<Strings>(),
                              "oracle folders (config.json, model, batch, expected, train files)");
  table.positional.add("folder", -1);
}

int run_oracle(const ParsedOptions& options) {
  if (!options.given("folder"))
    throw UsageError("nothing selected: oracle needs at least one folder");
  int code = kExitConforms;
  for (const auto& folder : options.get<Strings>("folder")) {
    const OracleReport report = check_oracle(folder);
    if (!is_quiet() || !report.ok()) print("{}\n", render(report));
    code = combine_exit_codes(code, report.ok() ? kExitConforms : kExitDiverges);
  }
  return code;
}

}  // namespace

Command oracle_command() {
  return {"oracle",
          "compare the built-in models with numbers of Hugging Face transformers",
          "oracle DIR...",
          "  isoshard oracle fixtures/oracle/qwen2_tied_gqa fixtures/oracle/qwen2_untied_mha",
          declare_oracle,
          run_oracle,
          /*judges=*/true};
}

}  // namespace isoshard
