// SPDX-License-Identifier: Apache-2.0
// The worst part of the report in words, and where the report comes from.
#include "harness/report/html/html_hero.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "harness/report/card/card.h"
#include "harness/report/html/html_text.h"

namespace isoshard::html {
namespace {

using nlohmann::json;

/// "<dt>title</dt><dd>text</dd>"; nothing for no text.
std::string row_in_html(std::string_view title, const std::string& text) {
  return text.empty() ? "" : fmt::format("<dt>{}</dt><dd>{}</dd>\n", title, text);
}

struct Worst {
  const json* item = nullptr;
  std::string part, anchor;
};

Worst first_bad(const json& report) {
  for (const char* const part : {"cases", "curves", "goldens", "benchmarks"}) {
    const json& items = list_of(report, part);
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (is_as_it_should_be(items[i])) continue;
      const std::string name(part);
      return {&items[i], name, fmt::format("{}-{}", name.substr(0, name.size() - 1), i + 1)};
    }
  }
  return {};
}

std::string card_in_html(const Worst& worst) {
  std::string html;
  for (const CardRow& row : card_of(*worst.item, worst.part)) {
    std::string text;
    for (const CardWords& words : row.words) {
      const std::string plain = escaped(words.text);
      switch (words.kind) {
        case CardWords::Kind::kPlain:
          text += plain;
          break;
        case CardWords::Kind::kStrong:
          text += fmt::format("<b>{}</b>", plain);
          break;
        case CardWords::Kind::kTensor:
          text += fmt::format("<span class=name>{}</span>", plain);
          break;
        case CardWords::Kind::kPart:
          text += fmt::format("<a href=\"#{}\">{}</a>", worst.anchor, plain);
          break;
      }
    }
    html += row_in_html(row.title, text);
  }
  return html;
}

/// The one number that a benchmark is run for.
std::string speed_of(const json& benchmark) {
  const json& summary = part_in(part_in(benchmark, "result"), "summary");
  if (!summary.is_object()) return row_in_html("What", text_of(benchmark, "name"));
  const std::string state = text_of(part_in(part_in(benchmark, "result"), "gate"), "state");
  return row_in_html("What", text_of(benchmark, "name")) +
         row_in_html("Speed", fmt::format("<b>{:.1f} tokens/s</b>, {:.3f} ms a step (median)",
                                          number_of(summary, "avg_tokens_per_sec"),
                                          number_of(summary, "p50_step_time_ms"))) +
         row_in_html("Gate", state == "ungated"
                                 ? std::string("none: nothing says that it computes what it should")
                                 : state);
}

std::string command_of(const json& report) {
  std::string line;
  for (const json& word : list_of(part_in(report, "provenance"), "command"))
    if (word.is_string()) line += (line.empty() ? "" : " ") + shell_word(word.get<std::string>());
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

std::string_view what_was_done(Kind kind) {
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
      return "Training steps were timed, after a small twin of each configuration was compared "
             "with one process.";
    case Kind::kVerdicts:
      break;
  }
  return "The same training step ran in one process and sharded over several, and what both "
         "computed was compared.";
}

/// The weakest strength of the parts, in the words of a verdict line: " (within tolerance)".
std::string weakest_strength(const json& report) {
  std::string weakest;
  for (const char* const part : {"cases", "curves"}) {
    for (const json& item : list_of(report, part)) {
      const std::string strength = text_of(item, "strength");
      if (weakest.empty() || strength == "within tolerance") weakest = strength;
    }
  }
  return weakest.empty() ? "" : fmt::format(" ({})", weakest);
}

/// Title of a report in which nothing is wrong.
std::string good_title(Kind kind, const json& report, std::size_t all) {
  if (kind == Kind::kBenchmarks) return "Measured";
  if (all == 0) return "Nothing was judged";
  const std::string every = fmt::format("All {} ", all);
  switch (kind) {
    case Kind::kFaults:
      return all == 1 ? "The mistake was found" : every + "mistakes were found";
    case Kind::kGoldens:
      return all == 1 ? "The number is that of the accepted run"
                      : every + "are as in the accepted runs";
    case Kind::kExperiments:
      return all == 1 ? "Passed: every claim holds" : every + "passed: every claim holds";
    case Kind::kCurves:
      return (all == 1 ? "Passed: it trains as one process trains"
                       : every + "passed: they train as one process trains") +
             weakest_strength(report);
    default:
      return (all == 1 ? "Passed: it computes what one process computes"
                       : every + "passed: they compute what one process computes") +
             weakest_strength(report);
  }
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
      bad += is_as_it_should_be(item) ? 0 : 1;
    }
  }
  const Kind kind = kind_of(report);
  const bool is_bad = bad > 0 || code != 0;
  std::string title = good_title(kind, report, all);
  if (bad > 0)
    title =
        all == 1 ? "Something is wrong" : fmt::format("Something is wrong in {} of {}", bad, all);
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
      is_bad ? "diverges" : "conforms", title, what_was_done(kind), code);
  if (worst.item != nullptr) html += card_in_html(worst);
  if (kind == Kind::kBenchmarks && !is_bad) html += speed_of(list_of(report, "benchmarks")[0]);
  const std::string command = command_of(report);
  if (!command.empty()) html += row_in_html(kRepeatTitle, fmt::format("<code>{}</code>", command));
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
