// SPDX-License-Identifier: Apache-2.0
/// `isoshard verify`: runs every selected case against its reference and prints what was found.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "app/commands.h"
#include "app/options/verify_options.h"
#include "app/output_folder.h"
#include "core/base/error.h"
#include "fixtures/cases/case_settings.h"
#include "fixtures/inputs/inputs.h"
#include "fixtures/weights/shared_weights.h"
#include "harness/bundle/bundle.h"
#include "harness/cli/progress.h"
#include "harness/report/json/verdict_json.h"
#include "harness/report/tables.h"
#include "harness/report/text/verdict_text.h"
#include "harness/verdict/exit_code.h"
#include "harness/world/interrupt.h"
#include "suite/faults/fault.h"
#include "suite/record/run_case.h"
#include "suite/reference/warm_up_training.h"
#include "suite/verify/side_by_side.h"
#include "suite/verify/verify_case.h"

namespace isoshard {
namespace {

/// What is printed, and what goes to --output-dir.
struct Output {
  std::string text;
  nlohmann::json cases = nlohmann::json::array(), tables = nlohmann::json::array();
  int exit_code = kExitConforms;
  int judged = 0, conforming = 0;  ///< cases

  void print(const std::string& part) {
    fmt::print("{}", part);
    if (std::fflush(stdout) != 0)
      throw InfrastructureError("cannot write the report to standard output; is its disk full?");
    text += part;
  }
};

/// What a bundle says of the single process that a case is judged against.
std::string reference_settings(Case item) {
  item.subject = "reference";
  item.degrees.tp = 1;
  return bundle_settings(item, policy_of(item));
}

Trace run_one(const VerifyRequest& request, const Case& item, const Reference& reference,
              RunDetail asked, SideBySide* tables) {
  RunOptions options;
  if (asked == RunDetail::kDigests) options = digests_only(std::move(options));
  if (!request.dump.empty()) options.keep = Keep::kEverything;
  const FaultProbe probe;
  if (!request.fault.empty()) options = with_fault(options, find_fault(request.fault), item, probe);
  if (tables != nullptr) options = tables->observed(item, reference, std::move(options));
  Trace trace = run_case(item, reference, options);
  if (!request.fault.empty() && probe.count() == 0)
    throw InfrastructureError(
        fmt::format("fault {} never fired in {}: the case does not use what it breaks",
                    request.fault, item.slug()));
  if (!request.dump.empty())
    write_bundle(request.dump / item.slug(), trace, bundle_settings(item, policy_of(item)));
  return trace;
}

/// Prints one verdict. True if it conforms.
bool report_one(const VerifyRequest& request, const Case& item, const CaseJudgement& judgement,
                Output& output) {
  const Verdict& verdict = judgement.verdict;
  RenderOptions options;
  options.color = isatty(STDOUT_FILENO) != 0;
  options.all_tensors = request.verbose;
  if (judgement.against == ReferenceKind::kEmulated)
    output.print(
        "Against the emulated reference (the declared arithmetic in one process); the tolerance is "
        "zero:\n");
  output.print(render(verdict, options));
  output.print("\n");
  nlohmann::json json = verdict_json(verdict);
  json["case"] = item.slug();
  json["reference"] = name_of(judgement.against);
  json["fault"] = request.fault.empty() ? nlohmann::json(nullptr) : nlohmann::json(request.fault);
  output.cases.push_back(std::move(json));
  output.exit_code = combine_exit_codes(output.exit_code, exit_code_of(verdict.status));
  return verdict.status == Status::kConforms;
}

/// A case whose world broke down: reported, and the other cases still run.
void report_failure(const Case& item, const InfrastructureError& error, Output& output) {
  output.print(fmt::format("INCOMPLETE  {}: {}\n\n", item.slug(), error.what()));
  output.cases.push_back(
      {{"case", item.slug()}, {"status", "incomplete"}, {"reason", error.what()}});
  output.exit_code = combine_exit_codes(output.exit_code, kExitInfrastructure);
}

CaseJudge case_judge(const VerifyRequest& request, SideBySide* tables) {
  CaseJudge::Hooks hooks;
  hooks.run = [&request, tables](const Case& item, const Reference& reference, RunDetail asked) {
    return run_one(request, item, reference, asked, tables);
  };
  hooks.on_plain = [&request, tables](const Case& item, const Reference& reference) {
    if (tables != nullptr) tables->add_plain(item, reference);
    if (!request.dump.empty())
      write_bundle(request.dump / ("reference_" + item.reference_slug()), reference,
                   reference_settings(item));
  };
  if (!request.dump.empty()) {
    hooks.on_emulated = [&request](const Case& item, const Reference& reference) {
      write_bundle(request.dump / ("emulated_" + item.slug()), reference, reference_settings(item));
    };
  }
  // A benign variation is legal, but not what its subject declares.
  const bool is_benign_variation =
      !request.fault.empty() && !find_fault(request.fault).expected.has_value();
  const bool is_plain = request.reference == ReferenceKind::kAuto && is_benign_variation;
  return {is_plain ? ReferenceKind::kPlain : request.reference, std::move(hooks),
          request.dump.empty() ? CaseJudge::Retention::kLean : CaseJudge::Retention::kWhole};
}

void run_cases(const VerifyRequest& request, Output& output) {
  Progress progress(static_cast<int>(request.cases.size()));
  SideBySide side_by_side;
  SideBySide* const tables = request.tables ? &side_by_side : nullptr;
  CaseJudge judge = case_judge(request, tables);
  // A run with a fault differs: its references are asked for again.
  if (request.fault.empty()) judge.announce(request.cases);
  for (const Case& item : request.cases) {
    if (interrupt_signal() != 0) break;
    progress.show(item.slug());
    try {
      const CaseJudgement judgement = judge.judge_case(item);
      progress.clear();
      if (tables != nullptr) tables->add(item, judgement);
      if (report_one(request, item, judgement, output)) ++output.conforming;
    } catch (const InfrastructureError& error) {
      progress.clear();
      report_failure(item, error, output);
      if (interrupt_signal() != 0) break;
    }
    ++output.judged;
  }
  if (interrupt_signal() != 0) output.exit_code = 128 + interrupt_signal();
  for (const ComparisonTables& table : side_by_side.tables()) {
    output.print(render_tables(table, request.verbose) + "\n");
    output.tables.push_back(tables_json(table));
  }
}

std::string summary_line(const VerifyRequest& request, const Output& output) {
  const auto total = request.cases.size();
  if (output.exit_code >= kExitInterrupted)
    return fmt::format("interrupted after {} of {} cases\n", output.judged, total);
  return fmt::format("{} of {} case{} conform{}\n", output.conforming, total, total == 1 ? "" : "s",
                     total == 1 ? "s" : "");
}

/// All cases start from the same weights; the one that takes most samples has those of the others.
void save_inputs(const VerifyRequest& request) {
  if (!request.inputs.save_weights.empty())
    save_initial_weights(request.cases.front(), request.inputs.save_weights);
  if (request.inputs.save_batch.empty()) return;
  const auto samples = [](const Case& c) {
    return std::int64_t{c.steps} * c.micro_batches * c.degrees.dp * c.batch_size;
  };
  const auto largest =
      std::max_element(request.cases.begin(), request.cases.end(),
                       [&](const Case& a, const Case& b) { return samples(a) < samples(b); });
  save_case_batches(*largest, request.inputs.save_batch);
}

int run_verify(const ParsedOptions& options) {
  const VerifyRequest request = verify_request_of(options);
  const KeepResults keep_results;
  const OutputFolder reports(request.output_dir, "--output-dir"), dump(request.dump, "--dump");
  save_inputs(request);
  warm_up_training(request.cases);
  const SharedWeights weights(request.cases);
  Output output;
  run_cases(request, output);
  output.print(summary_line(request, output));
  write_reports(request.output_dir, output.exit_code, output.cases, output.tables, output.text);
  return output.exit_code;
}

}  // namespace

Command verify_command() {
  return {"verify",
          "judge our parallel training against a single process, tensor by tensor",
          "verify [options]",
          "  isoshard verify                                            Qwen2.5-0.5B cut to 2 "
          "layers: ddp and autotp on 2 and 4 processes\n"
          "  isoshard verify --preset small --tp 2 --dp 2 --subjects autotp --dtype fp32\n"
          "  isoshard verify --model DIR --tp 2 --dp 2                  a Hugging Face folder with "
          "its weights\n"
          "  isoshard verify --preset small --data ids.bin --shuffle --tail drop       nanoGPT's "
          "or Megatron's flat ids, in a seeded order\n"
          "  isoshard verify --preset small --tp 3 --dp 2 --subjects autotp --reduction-order ring "
          "--reference plain\n"
          "                                                             within tolerances only, "
          "not bit by bit\n"
          "  isoshard verify --fault mlp_input_grad_partial             what a real bug looks like "
          "(exits 1)",
          declare_verify_options,
          run_verify};
}

}  // namespace isoshard
