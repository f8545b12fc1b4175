// SPDX-License-Identifier: Apache-2.0
/// `isoshard verify`: runs every selected case against its reference and prints what was found.
#include <fmt/format.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "app/commands.h"
#include "app/output_folder.h"
#include "app/verify_options.h"
#include "base/error.h"
#include "conformance/detection/fault.h"
#include "conformance/subjects/registry.h"
#include "conformance/subjects/run_case.h"
#include "fixtures/cases/case_settings.h"
#include "fixtures/cases/inputs.h"
#include "fixtures/reference/emulated_reference.h"
#include "fixtures/reference/reference.h"
#include "harness/cli/exit_code.h"
#include "harness/cli/progress.h"
#include "harness/report/report.h"
#include "harness/trace/bundle.h"
#include "harness/world/interrupt.h"
#include "harness/world/warm_up.h"
#include "train/file_weights.h"

namespace isoshard {
namespace {

/// What is printed, and what goes to --output-dir.
struct Output {
  std::string text;
  nlohmann::json cases = nlohmann::json::array();
  int exit_code = kExitConforms;
  int judged = 0, conforming = 0;  ///< cases

  void print(const std::string& part) {
    fmt::print("{}", part);
    std::fflush(stdout);
    text += part;
  }
};

/// What a bundle says of the single process that a case is judged against.
std::string reference_settings(Case item) {
  item.subject = "reference";
  item.tp = 1;
  return bundle_settings(item, judge_options(item));
}

/// What one verdict was made against, for the reader.
struct JudgedAgainst {
  const char* reference;  ///< "plain" or "emulated"
  const char* heading;    ///< printed above the report; empty: nothing
};
constexpr JudgedAgainst kPlainReference = {"plain", ""};
constexpr JudgedAgainst kRecordItself = {"plain",
                                         "The declared arithmetic itself, emulated, against the plain reference, within its tolerances:\n"};
constexpr JudgedAgainst kEmulatedReference = {
    "emulated", "Against the emulated reference (the declared arithmetic in one process); the tolerance is zero:\n"};

Trace run_one(const VerifyRequest& request, const Case& item, const Reference& reference) {
  RunOptions options;
  if (!request.dump.empty()) options.keep = Keep::kEverything;
  const FaultProbe probe;
  if (!request.fault.empty()) options = with_fault(options, find_fault(request.fault), item, probe);
  Trace trace = run_case(item, reference, options);
  if (!request.fault.empty() && probe.count() == 0)
    throw InfrastructureError(fmt::format("fault {} never fired in {}: the case does not use what it breaks", request.fault, item.slug()));
  if (!request.dump.empty()) write_bundle(request.dump / item.slug(), trace, bundle_settings(item, judge_options(item)));
  return trace;
}

/// Prints one verdict. True if it conforms.
bool report_one(const VerifyRequest& request, const Case& item, const Verdict& verdict, const JudgedAgainst& against, Output& output) {
  RenderOptions options;
  options.color = isatty(STDOUT_FILENO) != 0;
  options.all_tensors = request.verbose;
  output.print(against.heading);
  output.print(render(verdict, options));
  output.print("\n");
  nlohmann::json json = report_json(verdict);
  json["case"] = item.slug();
  json["reference"] = against.reference;
  json["fault"] = request.fault.empty() ? nlohmann::json(nullptr) : nlohmann::json(request.fault);
  output.cases.push_back(std::move(json));
  output.exit_code = combine_exit_codes(output.exit_code, exit_code_of(verdict.status));
  return verdict.status == Status::kConforms;
}

/// A case whose world broke down: reported, and the other cases still run.
void report_failure(const Case& item, const InfrastructureError& error, Output& output) {
  output.print(fmt::format("INCOMPLETE  {}: {}\n\n", item.slug(), error.what()));
  output.cases.push_back({{"case", item.slug()}, {"status", "incomplete"}, {"reason", error.what()}});
  output.exit_code = combine_exit_codes(output.exit_code, kExitInfrastructure);
}

/// The plain reference of the last case that asked for one: cases that share it are neighbours.
class PlainReference {
 public:
  explicit PlainReference(const VerifyRequest& request) : request_(request) {}

  const Reference& of(const Case& item) {
    if (item.reference_slug() == slug_) return reference_;
    reference_ = Reference();  // frees the last one's memory before the next is made
    slug_.clear();
    reference_ = make_reference(item);
    slug_ = item.reference_slug();
    if (!request_.dump.empty()) write_bundle(request_.dump / ("reference_" + slug_), reference_, reference_settings(item));
    return reference_;
  }

 private:
  const VerifyRequest& request_;
  Reference reference_;
  std::string slug_;
};

/// Against the subject's own arithmetic; with kBoth that arithmetic against the plain reference first.
bool verify_exactly(const VerifyRequest& request, const Case& item, PlainReference& plain, Progress& progress, Output& output) {
  const bool both = request.reference == ReferenceKind::kBoth;
  EmulationOptions emulation;
  if (both) emulation.compare_with = &plain.of(item);
  const Trace emulated = emulate(item, arithmetic_of(item), emulation);
  bool conforms = true;
  if (both) {
    const Verdict verdict = judge(*emulation.compare_with, emulated, judge_options(item));
    progress.clear();
    conforms = report_one(request, item, verdict, kRecordItself, output);
  }
  const Reference reference = reference_of_emulated(emulated);
  if (!request.dump.empty()) write_bundle(request.dump / ("emulated_" + item.slug()), reference, reference_settings(item));
  JudgeOptions judging = judge_options(item);
  judging.level = Level::kExact;
  const Verdict verdict = judge(reference, run_one(request, item, reference), judging);
  progress.clear();
  return report_one(request, item, verdict, kEmulatedReference, output) && conforms;
}

bool verify_within_tolerances(const VerifyRequest& request, const Case& item, PlainReference& plain, Progress& progress, Output& output) {
  const Reference& reference = plain.of(item);
  const Verdict verdict = judge(reference, run_one(request, item, reference), judge_options(item));
  progress.clear();
  return report_one(request, item, verdict, kPlainReference, output);
}

void run_cases(const VerifyRequest& request, Output& output) {
  Progress progress(static_cast<int>(request.cases.size()));
  PlainReference plain(request);
  const auto verify = request.reference == ReferenceKind::kPlain ? verify_within_tolerances : verify_exactly;
  for (const Case& item : request.cases) {
    progress.show(item.slug());
    try {
      if (verify(request, item, plain, progress, output)) ++output.conforming;
    } catch (const InfrastructureError& error) {
      progress.clear();
      report_failure(item, error, output);
      if (interrupt_signal() != 0) {
        output.exit_code = 128 + interrupt_signal();
        return;
      }
    }
    ++output.judged;
  }
}

std::string summary_line(const VerifyRequest& request, const Output& output) {
  const auto total = request.cases.size();
  if (output.exit_code >= kExitInterrupted) return fmt::format("interrupted after {} of {} cases\n", output.judged, total);
  return fmt::format("{} of {} case{} conform{}\n", output.conforming, total, total == 1 ? "" : "s", total == 1 ? "s" : "");
}

void save_initial_weights(const VerifyRequest& request) {
  const Case& item = request.cases.front();
  const auto specs = make_model(item.config, item.attention)->parameters();
  save_weights(request.save_init_weights, specs, *case_weights(item), Dtype::kFloat32);
}

int run_verify(const ParsedOptions& options) {
  const VerifyRequest request = verify_request_of(options);
  if (!request.output_dir.empty()) require_writable_folder(request.output_dir, "--output-dir");
  if (!request.dump.empty()) require_writable_folder(request.dump, "--dump");
  if (!request.save_init_weights.empty()) save_initial_weights(request);
  warm_up_kernels();
  Output output;
  run_cases(request, output);
  output.print(summary_line(request, output));
  write_reports(request.output_dir, output.exit_code, output.cases, output.text);
  return output.exit_code;
}

}  // namespace

Command verify_command() {
  return {"verify",
          "judge our parallel training against a single process, tensor by tensor",
          "verify [options]",
          "  isoshard verify                                            the small preset: ddp and autotp on 2 to 6 processes\n"
          "  isoshard verify --tp 2 --dp 2 --subjects autotp --dtype fp32\n"
          "  isoshard verify --model DIR --tp 2 --dp 2                  a Hugging Face Qwen2 folder with its weights\n"
          "  isoshard verify --data ids.bin --shuffle --tail drop       nanoGPT's or Megatron's flat ids, in a seeded order\n"
          "  isoshard verify --tp 3 --dp 2 --subjects autotp --reference both --reduction-order ring\n"
          "                                                             bit by bit against the subject's declared arithmetic\n"
          "  isoshard verify --fault mlp_input_grad_partial             what a real bug looks like (exits 1)",
          declare_verify_options,
          run_verify};
}

}  // namespace isoshard
