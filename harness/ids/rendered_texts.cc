// SPDX-License-Identifier: Apache-2.0
// Example values for the placeholders of all texts.
#include "harness/ids/rendered_texts.h"

#include <fmt/format.h>

#include <map>

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

}  // namespace

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
