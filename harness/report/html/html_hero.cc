// SPDX-License-Identifier: Apache-2.0
// The worst part of the report in words, and where the report comes from.
#include "harness/report/html/html_hero.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "core/mesh/mesh_words.h"
#include "harness/report/html/html_evidence.h"
#include "harness/report/html/html_text.h"

namespace isoshard::html {
namespace {

using nlohmann::json;

/// "<dt>title</dt><dd>text</dd>"; nothing for no text.
std::string row_of_words(const char* title, const std::string& text) {
  return text.empty() ? "" : fmt::format("<dt>{}</dt><dd>{}</dd>\n", title, text);
}

bool is_good(const json& item) {
  if (item.contains("holds")) return item["holds"] == true;
  if (const json& detection = part_in(item, "detection"); detection.is_object())
    return part_in(detection, "as_expected") == true;
  const json& status = part_in(item, "status");
  if (status.is_null()) return true;  // a reference
  static const std::set<std::string> kGood = {"conforms", "match",   "accepted", "reviewed",
                                              "pending",  "removed", "measured", "fits"};
  return status.is_string() && kGood.contains(status.get<std::string>()) &&
         !part_in(item, "unmet").is_string();
}

struct Worst {
  const json* item = nullptr;
  std::string part, anchor;
};

Worst first_bad(const json& report) {
  for (const char* const part : {"cases", "curves", "goldens", "benchmarks"}) {
    const json& items = list_of(report, part);
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (is_good(items[i])) continue;
      const std::string name(part);
      return {&items[i], name, fmt::format("{}-{}", name.substr(0, name.size() - 1), i + 1)};
    }
  }
  return {};
}

/// Ranks of the first divergent tensor: those that are off, those that are as they should be.
std::pair<std::vector<int>, std::vector<int>> ranks_of(const json& item, const json& finding) {
  std::set<int> off, right;
  for (const json& held : list_of(part_in(item, "evidence"), "around")) {
    if (!is_same_tensor(held, finding)) continue;
    for (const json& part : list_of(held, "parts")) {
      const int rank = static_cast<int>(number_of(part, "rank"));
      if (number_of(part, "compared") > 0)
        (number_of(part, "unequal") > 0 ? off : right).insert(rank);
    }
  }
  for (const int rank : off) right.erase(rank);
  return {{off.begin(), off.end()}, {right.begin(), right.end()}};
}

std::string where_of(const json& item, const json& finding, const std::string& anchor) {
  std::string name = text_of(item, "case");
  std::string words = fmt::format("<a href=\"#{}\">{}</a>: step {:.0f}, {}, {}", anchor,
                                  name.empty() ? "this run" : name, number_of(finding, "step"),
                                  text_of(finding, "stage"), row_of(finding));
  const auto [off, right] = ranks_of(item, finding);
  const json& ranks = list_of(finding, "ranks");
  if (!ranks.empty() && ranks[0].is_number_integer())
    words += fmt::format("; first on {}", rank_in_words(item, ranks[0].get<int>()));
  if (off.size() > 1) words += "; wrong on " + words_of_ranks(off);
  if (!right.empty()) words += "; right on " + words_of_ranks(right);
  const std::string subject = text_of(item, "subject"), copied = text_of(item, "copy_of");
  if (!subject.empty())
    words += fmt::format(". Judged was {}{}", subject,
                         copied.empty() ? "" : ", this project's copy of " + copied);
  return words + ".";
}

std::string_view advice_of(const std::string& stage) {
  static const std::map<std::string, std::string_view> kAdvice = {
      {"step settings", "Compare what both runs were told of this step, such as the learning rate"},
      {"data ids", "Look at the sampler: both runs must take the same samples in each step"},
      {"masks", "Look at how random numbers are drawn: seeds and offsets of each rank"},
      {"weights as read",
       "Look at how weights reach this rank: loading, sharding, and what came back from the last "
       "step"},
      {"forward", "Look at the forward code between the two, and at the collective that ends it"},
      {"activation gradient", "Look at the backward code between the two and its collectives"},
      {"parameter gradient",
       "Look at how this gradient is made and summed: the backward of its module, and the "
       "reduction over ranks"},
      {"grad norm", "Look at how the norm is summed over ranks: each shard once"},
      {"clipped gradient", "Look at clipping: the norm and the factor that ranks clip with"},
      {"optimizer state", "Look at the optimizer's step: its state, and who owns which part of it"},
      {"parameter after step",
       "Look at the optimizer's step, and at what gathers parameters after it"},
      {"replica drift", "Look at what must keep copies equal: some rank applied another update"},
      {"collectives", "Compare the calls of the ranks below: another call was made than declared"}};
  const auto found = kAdvice.find(stage);
  return found == kAdvice.end() ? "Look at what makes it" : found->second;
}

/// Words of a cause, and what they mean to somebody who does not know them.
constexpr std::array<std::pair<std::string_view, std::string_view>, 6> kMeanings = {
    {{"dtype differs between ranks",
      "Some ranks round what others do not: a cast or autocast depends on the rank"},
     {"rank-local",
      "Each rank has its own addend of a sum that was never made: a reduction over "
      "these ranks is missing"},
     {"scale", "It is a multiple of the right value: a factor is missing, or is there twice"},
     {"permuted",
      "The right numbers stand in the wrong places: shards were put together in "
      "another order"},
     {"stale", "It is the value of an earlier step: something was read before it was written"},
     {"copies differ", "Ranks that must hold the same hold different values"}}};

/// The tensors before the first divergence say where the mistake is not.
std::string look_at(const json& item, const json& finding) {
  const json& tensors = list_of(item, "tensors");
  const auto found = std::ranges::find_if(
      tensors, [&](const json& tensor) { return is_same_tensor(tensor, finding); });
  std::string words;
  if (found != tensors.end() && found != tensors.begin()) {
    const auto before = found - tensors.begin();
    const auto wrong = std::count_if(tensors.begin(), found, [](const json& tensor) {
      return part_in(tensor, "within") == false;
    });
    if (wrong == 0) {
      words = fmt::format(
          "All {} tensors recorded before it are right, the last of them <span "
          "class=name>{}</span> "
          "({}). ",
          before, text_of(*(found - 1), "name"), text_of(*(found - 1), "stage"));
    }
  }
  words += fmt::format("{}.", advice_of(text_of(finding, "stage")));
  const std::string cause = text_of(finding, "diagnosis");
  for (const auto& [pattern, meaning] : kMeanings)
    if (cause.find(pattern) != cause.npos) return words + fmt::format(" {}.", meaning);
  return words;
}

std::string cause_of(const json& finding) {
  const std::string cause = text_of(finding, "diagnosis");
  return cause.empty() ? "no known pattern fits; the numbers below are what is known" : cause;
}

std::string last_line(std::string text) {
  while (text.ends_with('\n')) text.pop_back();
  return text.substr(text.find_last_of('\n') + 1);  // npos + 1 is 0
}

std::string words_of_case(const Worst& worst) {
  const json& item = *worst.item;
  const json& findings = list_of(item, "findings");
  const std::string missed = text_of(part_in(item, "detection"), "problem");
  if (!missed.empty()) {
    return row_of_words("What broke", fmt::format("<b>{} was not found as it must be</b>: {}",
                                                  text_of(item, "fault"), missed)) +
           row_of_words("Where",
                        fmt::format("<a href=\"#{}\">{}</a>", worst.anchor, text_of(item, "case")));
  }
  if (findings.empty()) {
    std::string reason = text_of(item, "reason");
    if (const std::string unmet = text_of(item, "unmet"); !unmet.empty()) reason = unmet;
    if (reason.empty()) reason = text_of(item, "text");
    // what is printed of a benchmark ends with what came out
    if (worst.part == "benchmarks") reason = last_line(reason);
    std::string name = text_of(item, "case");
    if (name.empty()) name = text_of(item, "name");
    if (name.empty()) name = text_of(item, "experiment");
    return row_of_words(worst.part == "benchmarks" ? "What came out" : "What broke", reason) +
           row_of_words("Where", fmt::format("<a href=\"#{}\">{}</a>", worst.anchor, name));
  }
  const json& first = findings[0];
  return row_of_words("What broke", fmt::format("<b>{}</b>", text_of(first, "what"))) +
         row_of_words("Likely cause", cause_of(first)) +
         row_of_words("Where", where_of(item, first, worst.anchor)) +
         row_of_words("What to look at", look_at(item, first));
}

/// The one number that a benchmark is run for.
std::string speed_of(const json& benchmark) {
  const json& summary = part_in(part_in(benchmark, "result"), "summary");
  if (!summary.is_object()) return row_of_words("What", text_of(benchmark, "name"));
  const std::string state = text_of(part_in(part_in(benchmark, "result"), "gate"), "state");
  return row_of_words("What", text_of(benchmark, "name")) +
         row_of_words("Speed", fmt::format("<b>{:.1f} tokens/s</b>, {:.3f} ms a step (median)",
                                           number_of(summary, "avg_tokens_per_sec"),
                                           number_of(summary, "p50_step_time_ms"))) +
         row_of_words("Gate",
                      state == "ungated"
                          ? std::string("none: nothing says that it computes what it should")
                          : state);
}

/// As a shell takes it.
std::string quoted(const std::string& word) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=:,./@%";
  if (!word.empty() && word.find_first_not_of(kPlain) == word.npos) return word;
  std::string result = "'";
  for (const char c : word) result += c == '\'' ? "'\\''" : std::string(1, c);
  return result + "'";
}

std::string command_of(const json& report) {
  std::string line;
  for (const json& word : list_of(part_in(report, "provenance"), "command"))
    if (word.is_string()) line += (line.empty() ? "" : " ") + quoted(word.get<std::string>());
  return escaped(line);
}

std::string list_in_words(const json& object) {
  std::string html;
  if (!object.is_object()) return html;
  for (const auto& [name, value] : object.items()) {
    html += fmt::format("<dt class=name>{}</dt><dd class=name>{}</dd>\n", escaped(name),
                        escaped(value.is_string() ? value.get<std::string>() : value.dump()));
  }
  return html;
}

/// What a report is of, which says what was done for it.
enum class Kind : std::uint8_t { kVerdicts, kFaults, kExperiments, kCurves, kGoldens, kBenchmarks };

Kind kind_of(const json& report) {
  if (!list_of(report, "benchmarks").empty()) return Kind::kBenchmarks;
  if (!list_of(report, "goldens").empty()) return Kind::kGoldens;
  const json& cases = list_of(report, "cases");
  if (cases.empty() && !list_of(report, "curves").empty()) return Kind::kCurves;
  const auto all_have = [&](const char* part) {
    return !cases.empty() && std::ranges::all_of(cases, [&](const json& item) {
      return item.is_object() && !part_in(item, part).is_null();
    });
  };
  if (all_have("detection")) return Kind::kFaults;
  return all_have("holds") ? Kind::kExperiments : Kind::kVerdicts;
}

bool is_plan(const json& report) {
  const json& benchmarks = list_of(report, "benchmarks");
  const std::string name = benchmarks.empty() ? "" : text_of(benchmarks[0], "name");
  return name.starts_with("plan of ");
}

std::string_view what_was_done(Kind kind, const json& report) {
  switch (kind) {
    case Kind::kFaults:
      return "Known mistakes were put into a right implementation on purpose, one at a time. Each "
             "must be found, at the tensor where it comes up first.";
    case Kind::kExperiments:
      return "A published experiment was run again, and its claims were compared with the new "
             "numbers.";
    case Kind::kCurves:
      return "Whole training runs were made, sharded over several processes, and their losses were "
             "compared step by step with those of a run that is trusted.";
    case Kind::kGoldens:
      return "Earlier runs were made again, and their numbers were compared with those stored when "
             "they were accepted (goldens).";
    case Kind::kBenchmarks:
      return is_plan(report) ? "The memory of training steps was predicted; nothing ran."
                             : "Training steps were timed, after a small twin of each "
                               "configuration was compared with one process.";
    case Kind::kVerdicts:
      break;
  }
  return "The same training step ran in one process and sharded over several, and what both "
         "computed was compared.";
}

/// Of a report in which nothing is wrong.
std::string good_title(Kind kind, const json& report, std::size_t all) {
  if (kind == Kind::kBenchmarks) return is_plan(report) ? "It fits" : "Measured";
  if (all == 0) return "Nothing was judged";
  if (kind == Kind::kFaults)
    return all == 1 ? "The mistake was found" : fmt::format("All {} mistakes were found", all);
  if (kind == Kind::kGoldens)
    return all == 1 ? "The number is that of the accepted run"
                    : fmt::format("All {} are as in the accepted runs", all);
  return all == 1 ? "It is as it should be" : fmt::format("All {} are as they should be", all);
}

}  // namespace

std::string hero_of(const json& report) {
  const double code = number_of(report, "exit_code");
  const Worst worst = first_bad(report);
  std::size_t all = 0, bad = 0;
  for (const char* const part : {"cases", "curves", "goldens", "benchmarks"}) {
    for (const json& item : list_of(report, part)) {
      if (part_in(item, "status").is_null() && !item.contains("holds")) continue;
      ++all;
      bad += is_good(item) ? 0 : 1;
    }
  }
  const Kind kind = kind_of(report);
  const bool is_bad = bad > 0 || code != 0;
  std::string title = good_title(kind, report, all);
  if (bad > 0)
    title =
        all == 1 ? "Something is wrong" : fmt::format("Something is wrong in {} of {}", bad, all);
  if (bad > 0 && is_plan(report)) title = "No configuration fits";
  if (bad > 0 && kind == Kind::kFaults)
    title = all == 1 ? "The mistake was not found as it must be"
                     : fmt::format("{} of {} mistakes were not found as they must be", bad, all);
  if (bad > 0 && worst.part == "cases" && text_of(*worst.item, "status") == "diverges" &&
      !part_in(*worst.item, "detection").is_object()) {
    title = all == 1 ? "The run does not compute what one process computes"
                     : fmt::format("{} of {} runs: not as one process computes", bad, all);
  }
  if (bad == 0 && is_bad) title = "Something is wrong";
  std::string html = fmt::format(
      "<div class=\"verdict hero {}\"><strong>{}</strong>\n<p>{} Exit code {:.0f}.</p>\n<dl>\n",
      is_bad ? "diverges" : "conforms", title, what_was_done(kind, report), code);
  if (worst.item != nullptr) html += words_of_case(worst);
  if (kind == Kind::kBenchmarks && !is_bad) html += speed_of(list_of(report, "benchmarks")[0]);
  const std::string command = command_of(report);
  if (!command.empty()) html += row_of_words("Repeat it", fmt::format("<code>{}</code>", command));
  return html + "</dl></div>\n";
}

std::string provenance_of(const json& report) {
  const json& provenance = part_in(report, "provenance");
  std::string html =
      "<section aria-labelledby=provenance><h2 id=provenance>Where this comes from</h2>\n";
  const std::string command = command_of(report);
  if (!command.empty()) html += fmt::format("<p>Repeat it:</p><pre>{}</pre>\n", command);
  html += "<dl>" + list_in_words(part_in(provenance, "versions")) + "</dl>\n";
  std::set<std::string> told;
  for (const json& item : list_of(report, "cases")) {
    const json& digests = part_in(part_in(item, "evidence"), "digests");
    const std::string words = list_in_words(digests);
    if (words.empty() || told.size() == 8 || !told.insert(words).second) continue;
    html += fmt::format("<p>Digests of the inputs of {}:</p><dl>{}</dl>\n", text_of(item, "case"),
                        words);
  }
  if (const std::string settings = list_in_words(part_in(provenance, "settings"));
      !settings.empty()) {
    html += "<details><summary>All settings</summary><dl>" + settings + "</dl></details>\n";
  }
  const json& environment = part_in(report, "environment");
  if (!environment.is_object() || environment.empty()) {
    html += "<p>No variable that may decide how kernels compute was set.</p>\n";
  } else {
    html += "<h3>Environment</h3>\n<dl>" + list_in_words(environment) + "</dl>\n";
  }
  return html + "</section>\n";
}

}  // namespace isoshard::html
