// SPDX-License-Identifier: Apache-2.0
/// Options of `verify`: a preset or a fault's own case is the start, every given flag changes it.
#include "app/options/verify_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <boost/program_options/value_semantic.hpp>

#include "app/options/attach_options.h"
#include "app/options/case_options.h"
#include "app/options/setting_options.h"
#include "core/base/error.h"
#include "core/base/suggest.h"
#include "fixtures/cases/presets.h"
#include "harness/cli/report_file.h"
#include "subjects/registry/subject_spec.h"
#include "suite/faults/fault.h"
#include "suite/verify/side_by_side.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;

constexpr int kMostRepeats = 10'000;

/// The cases of `subject`: the preset's own. One that no preset has takes those of the preset's
/// subjects that have the same axes.
std::vector<Case> cases_of(const std::string& subject, const std::vector<Case>& base) {
  std::vector<Case> own, alike;
  const SubjectSpec& spec = subject_spec(subject);
  for (const Case& item : base) {
    if (item.subject == subject) own.push_back(item);
    const SubjectSpec& other = subject_spec(item.subject);
    const bool has_its_axes =
        std::ranges::all_of(other.axes, [&](const Axis axis) { return spec.has(axis); });
    if (spec.is_reference() || !has_its_axes || other.has(Axis::kTp) != spec.has(Axis::kTp))
      continue;
    alike.push_back(item);
    alike.back().subject = subject;
  }
  return own.empty() ? alike : own;
}

/// Meshes: without --tp and --dp the preset's; with one of them, one mesh a subject. A subject
/// without a tp axis stays at tp 1.
std::vector<Case> expand(const ParsedOptions& options, const std::vector<Case>& base) {
  const Strings subjects = subjects_option(options);
  for (const auto& subject : subjects) (void)subject_spec(subject);
  Strings dtypes = list_option(options, "dtype");
  // the only dtype of parameters that autocast takes
  if (dtypes.empty() && options.given("autocast")) dtypes = {"fp32"};
  const auto has_tp_axis = [](const std::string& subject) {
    return subject_spec(subject).has(Axis::kTp);
  };
  const bool is_without_tp =
      !subjects.empty() && std::none_of(subjects.begin(), subjects.end(), has_tp_axis);
  const int workers = options.given("num-workers") ? options.get<int>("num-workers") : 0;
  const int dp = options.given("dp") ? options.get<int>("dp") : is_without_tp ? workers : 0;
  const bool own_mesh = options.given("tp") || dp != 0 || options.given("dp");
  const int tp = options.given("tp") ? options.get<int>("tp") : 0;
  if (!subjects.empty() && tp > 1 && is_without_tp)
    throw UsageError(
        fmt::format("--subjects {0} --tp {1}: {0} has no tp axis; leave --tp out or "
                    "take one of {2}",
                    fmt::join(subjects, ","), tp, join_names(subjects_with(Axis::kTp))));

  std::vector<Case> result;
  const auto add = [&](Case item) {
    if (own_mesh) {
      const bool has_tp = has_tp_axis(item.subject);
      item.degrees.tp = has_tp ? (options.given("tp") ? tp : std::max(item.degrees.tp, 1)) : 1;
      item.degrees.dp = dp != 0 || options.given("dp") ? dp : (has_tp ? 1 : item.degrees.dp);
    }
    const bool known = std::any_of(result.begin(), result.end(), [&](const Case& other) {
      return other.subject == item.subject && other.degrees == item.degrees &&
             other.dtype == item.dtype && other.slug() == item.slug();
    });
    if (!known) result.push_back(std::move(item));
  };
  std::vector<Case> selected = subjects.empty() ? base : std::vector<Case>();
  for (const std::string& subject : subjects) {
    for (Case& item : cases_of(subject, base)) selected.push_back(std::move(item));
  }
  for (const Case& item : selected) {
    if (dtypes.empty()) {
      add(item);
    } else {
      for (const auto& name : dtypes) {
        Case copy = item;
        copy.dtype = parse_dtype(name);
        add(std::move(copy));
      }
    }
  }
  const auto is_too_large = [&](const Case& item) {
    return with_pp_and_cp(options, item.subject, item.degrees).num_ranks() > kMaxWorldSize;
  };
  // of the preset's own meshes, those that fit beside --pp and --cp
  if (!own_mesh && !std::ranges::all_of(result, is_too_large)) std::erase_if(result, is_too_large);
  for (const Case& item : result) {
    const Degrees degrees = with_pp_and_cp(options, item.subject, item.degrees);
    if (options.given("num-workers") && degrees.num_ranks() != workers)
      throw UsageError(
          fmt::format("--num-workers {}: {} has {} ranks ({}); give that number, or leave it out",
                      workers, item.slug(), degrees.num_ranks(), describe(degrees)));
  }
  if (result.empty())
    throw UsageError(
        "nothing selected: no case of the preset has one of these subjects and dtypes");
  if (tp > 1 && std::none_of(result.begin(), result.end(),
                             [&](const Case& item) { return item.degrees.tp == tp; }))
    throw UsageError(
        fmt::format("--tp {}: none of the selected subjects has a tp axis; leave --tp out or add "
                    "--subjects {}",
                    tp, subjects_with(Axis::kTp).front()));
  return result;
}

std::vector<Case> base_cases(const ParsedOptions& options, const std::string& fault) {
  if (!fault.empty()) {
    if (options.given("preset"))
      throw UsageError(
          "--fault brings its own case; leave --preset out and change it by other flags");
    return {find_fault(fault).smallest_case()};
  }
  // A model of one's own starts from sizes that suit any model.
  return preset_cases(options.given("preset")  ? options.get<std::string>("preset")
                      : options.given("model") ? "small"
                                               : "default");
}

bool is_thorough(const ParsedOptions& options) {
  return options.given("preset") && options.get<std::string>("preset") == "thorough";
}

/// The cases of the preset thorough save and warm up in the middle of their runs, which --steps may
/// make too short for that.
void fit_to_steps(const ParsedOptions& options, std::vector<Case>& cases) {
  if (!options.given("steps")) return;
  for (Case& item : cases) {
    const int before_last = std::max(0, item.steps - 1);
    if (!options.given("reload-after"))
      item.reload_after = std::min(item.reload_after, before_last);
    if (!options.given("warmup-steps"))
      item.settings.schedule.warmup_steps =
          std::min<std::int64_t>(item.settings.schedule.warmup_steps, before_last);
  }
}

/// Each case of the preset thorough has settings of its own: those that the given ones do not fit
/// are left out, with a note.   Errors   as Case::validate if none is left.
void leave_out_unfit(std::vector<Case>& cases, std::vector<std::string>& notes) {
  std::string first;
  std::size_t count = 0;
  const std::size_t all = cases.size();
  std::erase_if(cases, [&](const Case& item) {
    try {
      item.validate();
      return false;
    } catch (const UsageError& error) {
      if (++count == all) throw;
      if (first.empty()) first = fmt::format("{} ({})", item.slug(), error.what());
      return true;
    }
  });
  if (count > 0)
    notes.push_back(fmt::format(
        "{} of the {} cases of the preset are left out, as these options do not fit them; the "
        "first: {}",
        count, all, first));
}

/// It prints a table and ends: what would be written or judged beside it is a slip.
bool parse_coverage(const ParsedOptions& options) {
  if (!options.get<bool>("coverage")) return false;
  for (const char* flag : {"output-dir", "dump", "report", "fault", "failed-from"}) {
    if (options.given(flag))
      throw UsageError(fmt::format(
          "--{} must be left out with --coverage, which runs nothing; a run without --coverage "
          "has its coverage in its report",
          flag));
  }
  return true;
}

/// A fault's case keeps its subject unless another is asked for.
void apply_fault_subject(const ParsedOptions& options, std::vector<Case>& cases) {
  const Strings subjects = subjects_option(options);
  if (subjects.empty()) return;
  std::vector<Case> result;
  for (const auto& subject : subjects) {
    for (Case item : cases) {
      item.subject = subject;
      result.push_back(std::move(item));
    }
  }
  cases = std::move(result);
}

ReferenceKind parse_reference(const std::string& name) {
  Strings known;
  for (const ReferenceKind kind : {ReferenceKind::kAuto, ReferenceKind::kPlain,
                                   ReferenceKind::kEmulated, ReferenceKind::kBoth}) {
    if (name == name_of(kind)) return kind;
    known.emplace_back(name_of(kind));
  }
  throw UsageError(fmt::format("unknown reference '{}'{}; known are {}", name,
                               did_you_mean(name, known), join_names(known)));
}

bool parse_tables(const std::string& word, bool wants_them) {
  const Strings known = {"auto", "on", "local", "off"};
  if (std::find(known.begin(), known.end(), word) == known.end())
    throw UsageError(fmt::format("--tables {}{}; known are {}", word, did_you_mean(word, known),
                                 join_names(known)));
  return word == "on" || word == "local" || (word == "auto" && wants_them);
}

/// Tables are made of what ranks write into shared memory.
bool parse_tables_of(const ParsedOptions& options, std::size_t num_cases) {
  const std::string word = options.get<std::string>("tables");
  // runs of the preset thorough have nothing in common
  const bool tables = parse_tables(word, num_cases > 1 && !is_thorough(options));
  if (!options.get<bool>("attach")) return tables;
  if (word == "on" || word == "local")
    throw UsageError("--tables " + word +
                     " needs ranks that share memory; leave it out with --attach");
  return false;
}

}  // namespace

void declare_verify_options(OptionTable& table) {
  const auto list = [] { return po::value<Strings>()->multitoken()->composing(); };
  table.leading_groups = {"cases", "judging", "output"};
  auto add = table.group("cases"), judging = table.group("judging"), output = table.group("output");
  add("failed-from", po::value<std::string>(),
      "run again the cases that were wrong in this folder's report.json, with the options of that "
      "run; other options of this command override them");
  add("preset", po::value<std::string>(),
      "where to start from: default (Qwen2.5-0.5B cut to 2 layers, bf16, 2 x 128 tokens of text "
      "per dp rank), small (2 layers, hidden "
      "96, fp32 and bf16, 2 x 24 tokens; what --model starts from), published (as default, with "
      "1024 "
      "random ids a sample), thorough (tiny models; all subjects, and settings that together have "
      "every feature of --coverage)");
  add("subjects", list(),
      fmt::format("implementations to judge: {} (default: the preset's)",
                  fmt::join(subjects_with(Axis::kDp), " "))
          .c_str());
  add("dtype", list(), "fp32 bf16 fp16 fp64 (default: the preset's)");
  add("steps", po::value<int>(), "training steps (default: 1)");
  judging("reference", po::value<std::string>()->default_value("auto"),
          "plain (one unsharded process, within tolerances), emulated (the subject's declared "
          "arithmetic in one process, bit by bit), both "
          "(and the emulated one against the plain one), or auto (both where an arithmetic is "
          "declared, else plain)");
  judging("fault", po::value<std::string>(),
          "inject a fault of the catalog (isoshard list faults): the run must then exit with 1; "
          "benign variations must pass");
  output("dump", po::value<std::string>(),
         "write every run as a bundle below this folder (for compare)");
  output("output-dir", po::value<std::string>(),
         "write report.json, report.txt and junit.xml to this folder");
  judging("reload-after", po::value<int>(),
          "after this step every rank saves a checkpoint and the run resumes from it: what is "
          "loaded must be what was saved, bit by bit");
  judging("repeat", po::value<int>()->default_value(1),
          "number of runs of each subject, compared bit by bit with the first; from the second on "
          "ranks "
          "are delayed at random before collectives, so that a race shows");
  judging(
      "fail-fast", po::bool_switch(),
      "end with the first case that does not conform: the others do not run, and the report says "
      "how many");
  judging("require", po::value<std::string>()->default_value("any"),
          "any, or exact: a case that conforms only within tolerance exits with 1");
  judging("record-partials", po::bool_switch(),
          "record each rank's summand of row-parallel outputs as <module>.partial");
  output("tables", po::value<std::string>()->default_value("auto"),
         "on: print all runs side by side at the end (losses, norms, differences from the "
         "reference and "
         "from ddp); local: also what rank 0 alone holds, as tools see that take one rank's shard "
         "for the whole; off; auto: with several runs they are made, and --verbose prints them");
  output("coverage", po::bool_switch(),
         "run nothing: print which features the chosen cases exercise, and for each other one the "
         "flags that do");
  declare_report_file(table);
  declare_case_options(table);
  declare_attach_options(table);
}

VerifyRequest verify_request_of(const ParsedOptions& options) {
  VerifyRequest request;
  if (options.given("fault")) request.fault = find_fault(options.get<std::string>("fault")).id;
  std::vector<Case> cases = base_cases(options, request.fault);
  request.inputs = input_files_of(options);
  apply_case_options(options, request.inputs, cases);
  for (Case& item : cases)
    item.settings.record_partials =
        item.settings.record_partials || options.get<bool>("record-partials");
  if (options.given("reload-after")) {
    for (Case& item : cases) item.reload_after = options.get<int>("reload-after");
  }
  if (is_thorough(options)) fit_to_steps(options, cases);
  if (!request.fault.empty()) apply_fault_subject(options, cases);
  request.cases = expand(options, cases);
  apply_subject_options(options, request.cases);
  if (is_thorough(options)) leave_out_unfit(request.cases, request.notes);
  require_usable(request.cases, Recorded::kEveryStep);
  for (std::string& note : fit_to_job(options, request.cases))
    request.notes.push_back(std::move(note));
  order_for_tables(request.cases);
  request.tables = parse_tables_of(options, request.cases.size());
  request.wants_tables = request.tables && options.get<std::string>("tables") != "auto";
  request.local_tables = request.tables && options.get<std::string>("tables") == "local";
  if (options.given("dump")) request.dump = options.get<std::string>("dump");
  if (options.given("output-dir")) request.output_dir = options.get<std::string>("output-dir");
  request.reference = parse_reference(options.get<std::string>("reference"));
  if (request.reference == ReferenceKind::kEmulated || request.reference == ReferenceKind::kBoth) {
    // a subject without one is refused here
    for (const Case& item : request.cases) (void)numerics_of(item);
  }
  request.coverage = parse_coverage(options);
  request.fail_fast = options.get<bool>("fail-fast");
  if (request.fail_fast && options.get<bool>("attach"))
    throw UsageError(
        "--fail-fast must be left out with --attach: all processes of a job run the same cases");
  request.repeat = options.get<int>("repeat");
  if (request.repeat < 1 || request.repeat > kMostRepeats)
    throw UsageError(
        fmt::format("--repeat must be from 1 to {}, got {}", kMostRepeats, request.repeat));
  request.require = parse_required_strength(options.get<std::string>("require"));
  return request;
}

}  // namespace isoshard
