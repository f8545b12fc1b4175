// SPDX-License-Identifier: Apache-2.0
// Example values for the placeholders of all texts.
#include "harness/ids/rendered_texts.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <ranges>

#include "harness/ids/cause.h"
#include "harness/ids/finding.h"
#include "harness/ids/phrase.h"
#include "harness/ids/rule.h"

namespace isoshard {
namespace {

NamedValue example_of(const std::string& name, const std::string& specs) {
  if (specs.find_first_of("efg") != std::string::npos && specs.find('.') != std::string::npos)
    return {name, 1.5};
  if (!specs.empty() && specs != "and") return {name, 2};
  return {name, "<" + name + ">"};
}

template <TabledId Id>
void add_table(std::vector<NamedText>& texts) {
  for (const Id id : all_ids<Id>()) {
    texts.push_back({kind_of(id), name_of(id), row_of(id).text});
    if (!row_of(id).more.empty())
      texts.push_back({kind_of(id), name_of(id), row_of(id).more, true});
  }
}

/// Lines of at most 100 characters. A line of Markdown must not begin as a list or a heading does.
std::string wrapped(std::string_view text, std::string_view indent) {
  constexpr std::size_t kWidth = 100;
  std::string lines, line(indent);
  bool is_first = true;
  for (const auto word : std::views::split(text, ' ')) {
    const std::string_view next(word.begin(), word.end());
    const bool may_break =
        !indent.empty() || next.find_first_not_of("-+*#>0123456789.") != std::string_view::npos;
    if (!is_first && may_break && line.size() + 1 + next.size() > kWidth) {
      lines += line + "\n";
      line = indent;
      is_first = true;
    }
    if (!is_first) line += ' ';
    line += next;
    is_first = false;
  }
  return lines + line + "\n";
}

struct Page {
  std::string_view kind, title, intro;
};

constexpr std::array kPages = {
    Page{
        "cause", "Causes",
        "A cause says what was probably done to the first wrong tensor. This page lists the causes "
        "that a verdict can name, with example values: 2 for a count, 1.5 for a number, `<name>` "
        "for "
        "a word. The names are those of `cause.id` in report.json ([report](report.md)), and "
        "`isoshard explain CAUSE` prints one. How causes are found is in "
        "[detection](../internals/detection.md)."},
    Page{"rule", "Rules",
         "A run that breaks a rule is vacuous or incomplete, or an input is refused, whatever its "
         "numbers are. This page lists the rules: what is said where one is broken, with example "
         "values, and why it is there. The names are those of `rule.id` in report.json "
         "([report](report.md)), and `isoshard explain RULE` prints one."}};

}  // namespace

std::string rendered_page(std::string_view kind) {
  const auto page = std::ranges::find(kPages, kind, &Page::kind);
  if (page == kPages.end()) return "";
  std::string rendered = fmt::format("# {}\n\n{}\n", page->title, wrapped(page->intro, ""));
  rendered +=
      wrapped(fmt::format("The page is made of harness/ids/{0}.cc by `ninja -C build ids_texts "
                          "&& build/bin/ids_texts {0} > docs/reference/{0}s.md`.",
                          kind),
              "");
  for (const NamedText& row : all_texts()) {
    if (row.kind != kind) continue;
    const std::string text = filled(row.text, examples_of(row.text), row.name);
    if (row.is_more)
      rendered += "\n" + wrapped(text, "");
    else
      rendered += fmt::format("\n## {}\n\n", row.name) + wrapped(text, "    ");
  }
  return rendered;
}

std::vector<NamedText> all_texts() {
  std::vector<NamedText> texts;
  add_table<FindingId>(texts);
  add_table<CauseId>(texts);
  add_table<RuleId>(texts);
  add_table<PhraseId>(texts);
  return texts;
}

NamedValues examples_of(std::string_view text) {
  std::map<std::string, std::string> specs;
  for (const Placeholder& place : placeholders_in(text))
    specs[std::string(place.name)] += place.spec;
  NamedValues values;
  for (const auto& [name, all] : specs) values.push_back(example_of(name, all));
  return values;
}

std::string rendered_texts() {
  std::string rendered;
  for (const auto& [kind, name, text, is_more] : all_texts()) {
    if (!is_more) rendered += fmt::format("{} {}\n", kind, name);
    rendered += fmt::format("  {}\n", filled(text, examples_of(text), name));
  }
  return rendered;
}

}  // namespace isoshard
