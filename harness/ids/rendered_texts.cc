// SPDX-License-Identifier: Apache-2.0
// Example values for the placeholders of all texts, and the pages of docs that are made of tables.
#include "harness/ids/rendered_texts.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <ranges>

#include "harness/ids/cause.h"
#include "harness/ids/cause_notes.h"
#include "harness/ids/example_values.h"
#include "harness/ids/finding.h"
#include "harness/ids/phrase.h"
#include "harness/ids/rule.h"

namespace isoshard {
namespace {

constexpr std::string_view kCode = "    ";  ///< the indent of a block of code

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

/// Lines of at most 100 characters; the first one may begin in another way. A line of Markdown must
/// not begin as a list or a heading does, unless it is a block of code.
std::string wrapped(std::string_view text, std::string_view indent = "",
                    std::string_view begin = "") {
  constexpr std::size_t kWidth = 100;
  const bool is_code = indent == kCode;
  std::string lines, line(begin.empty() ? indent : begin);
  bool is_first = true;
  for (const auto word : std::views::split(text, ' ')) {
    const std::string_view next(word.begin(), word.end());
    const bool may_break =
        is_code || next.find_first_not_of("-+*#>0123456789.") != std::string_view::npos;
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

/// "#same-bytes" is the link to the heading "Same bytes".
std::string anchor_of(std::string_view name) {
  std::string anchor(name);
  std::ranges::replace(anchor, ' ', '-');
  return anchor;
}

std::string capitalized(std::string_view words) {
  std::string text(words);
  if (!text.empty() && text[0] >= 'a' && text[0] <= 'z') text[0] = static_cast<char>(text[0] - 32);
  return text;
}

std::string page_of_rules() {
  std::string page =
      "# Rules\n\n" +
      wrapped(
          "A run that breaks a rule is vacuous or incomplete, or an input is refused, whatever its "
          "numbers are. This page lists the rules: what is said where one is broken, with example "
          "values, and why it is there. The names are those of `rule.id` in report.json "
          "([report](report.md)), and `isoshard explain RULE` prints one.") +
      "\n" +
      wrapped(
          "The page is made of harness/ids/rule.cc by `ninja -C build ids_texts && "
          "build/bin/ids_texts rule > docs/reference/rules.md`.");
  for (const RuleId id : all_ids<RuleId>()) {
    const auto& [of, name, text, why] = row_of(id);
    page += fmt::format("\n## {}\n\n", name) +
            wrapped(filled(text, examples_of(text), name), kCode) + "\n" +
            wrapped(filled(why, examples_of(why), name));
  }
  return page;
}

/// `before`   the cause of the section before; what both need is not repeated.
std::string section_of(CauseId id, CauseId before) {
  const CauseNote &note = note_of(id), &known = note_of(before);
  const std::string text = filled(row_of(id).text, readable_examples_of(id), name_of(id));
  std::string section = fmt::format("\n### {}\n\n", name_of(id)) + wrapped(note.meaning) + "\n" +
                        wrapped(text, kCode) + "\n";
  if (note.needs == known.needs && note.looks_like == known.looks_like)
    return section + fmt::format("Needs and Not: as for [{0}](#{0}).\n", name_of(before));
  section += wrapped(fmt::format("Needs: {}.", note.needs), "  ", "- ");
  if (!note.looks_like.empty())
    section += wrapped(fmt::format("Not: {}.", note.looks_like), "  ", "- ");
  return section;
}

std::string page_of_causes() {
  std::string page =
      "# Causes\n\n" +
      wrapped(
          "A cause says what was probably done to the first wrong tensor. This page lists the "
          "causes that a verdict can name. The names are those of `cause.id` in report.json "
          "([report](report.md)), and `isoshard explain CAUSE` prints one. How causes are found, "
          "and what all of them need, is in [detection](../internals/detection.md#causes).") +
      "\n" +
      wrapped(
          "Each cause makes a claim. Several causes may fit a tensor; then the one whose claim is "
          "the first in this table is given, because it fits wrong values by chance least.") +
      "\n| claim | what the cause says |\n|---|---|\n";
  for (const ClaimNote& claim : claim_notes())
    page += fmt::format("| [{}](#{}) | {} |\n", claim.name, anchor_of(claim.name), claim.meaning);
  page += "\n" +
          wrapped(
              "Each cause has a sentence with example values, without the parts that are not "
              "always there, such as the ranks that are wrong. \"Needs\" is what must be recorded "
              "and what must hold before the cause is given. \"Not\" is what looks like it and "
              "has another cause or none.") +
          "\n" +
          wrapped(
              "The page is made of harness/ids/cause.cc and cause_notes.cc by `ninja -C build "
              "ids_texts && build/bin/ids_texts cause > docs/reference/causes.md`.");
  for (const ClaimNote& claim : claim_notes()) {
    page += fmt::format("\n## {}\n\n", capitalized(claim.name)) + wrapped(claim.meaning);
    CauseId before = CauseId::kNone;
    for (const CauseId id : all_ids<CauseId>()) {
      if (claim_of(id) != claim.claim) continue;
      page += section_of(id, before);
      if (note_of(id).needs != note_of(before).needs ||
          note_of(id).looks_like != note_of(before).looks_like)
        before = id;
    }
  }
  return page;
}

}  // namespace

std::string rendered_page(std::string_view kind) {
  return kind == kind_of(CauseId())  ? page_of_causes()
         : kind == kind_of(RuleId()) ? page_of_rules()
                                     : std::string();
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
