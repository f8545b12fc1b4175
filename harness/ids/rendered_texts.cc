// SPDX-License-Identifier: Apache-2.0
// Placeholders of a row, and values for them.
#include "harness/ids/rendered_texts.h"

#include <fmt/format.h>

#include <map>
#include <string_view>

#include "harness/ids/cause.h"
#include "harness/ids/finding.h"
#include "harness/ids/rule.h"

namespace isoshard {
namespace {

NamedValue example_of(const std::string& name, const std::string& specs) {
  if (specs.find_first_of("efg") != std::string::npos && specs.find('.') != std::string::npos)
    return {name, 1.5};
  if (!specs.empty()) return {name, 2};
  return {name, "<" + name + ">"};
}

NamedValues examples_of(std::string_view text) {
  std::map<std::string, std::string> specs;
  for (std::size_t open = text.find('{'); open != text.npos; open = text.find('{', open + 1)) {
    if (text.substr(open, 2) == "{{") {
      ++open;
      continue;
    }
    const std::string_view place = text.substr(open + 1, text.find('}', open) - open - 1);
    const std::size_t colon = place.find(':');
    specs[std::string(place.substr(0, colon))] +=
        colon == place.npos ? "" : place.substr(colon + 1);
  }
  NamedValues values;
  for (const auto& [name, all] : specs) values.push_back(example_of(name, all));
  return values;
}

void add(std::string_view kind, std::string_view name, std::string_view text, std::string& to) {
  to += fmt::format("{} {}\n  {}\n", kind, name, filled(text, examples_of(text)));
}

template <TabledId Id>
void add_table(std::string& text) {
  for (const Id id : all_ids<Id>()) {
    add(kind_of(id), name_of(id), row_of(id).text, text);
    if (!row_of(id).more.empty())
      text += fmt::format("  {}\n", filled(row_of(id).more, examples_of(row_of(id).more)));
  }
}

}  // namespace

std::string rendered_texts() {
  std::string text;
  add_table<FindingId>(text);
  add_table<CauseId>(text);
  add_table<RuleId>(text);
#define ISOSHARD_FINDING(id, name, words, evidence)
#define ISOSHARD_FINDING_PHRASE(id, words) add("phrase of findings", #id, words, text);
#include "harness/ids/finding_texts.inc"
#undef ISOSHARD_FINDING
#undef ISOSHARD_FINDING_PHRASE
#define ISOSHARD_CAUSE(id, name, words)
#define ISOSHARD_PHRASE(id, words) add("phrase of causes", #id, words, text);
#include "harness/ids/cause_texts.inc"
#undef ISOSHARD_CAUSE
#undef ISOSHARD_PHRASE
  return text;
}

}  // namespace isoshard
