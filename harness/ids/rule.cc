// SPDX-License-Identifier: Apache-2.0
// The table of rules.
#include "harness/ids/rule.h"

#include <fmt/format.h>

namespace isoshard {
namespace {

constexpr IdRow kRules[] = {
    {"", ""},
#define ISOSHARD_RULE(id, name, text, why) {name, text, why},
#include "harness/ids/rule_texts.inc"
#undef ISOSHARD_RULE
};

}  // namespace

std::span<const IdRow> rows_of(RuleId) noexcept {
  return kRules;
}

const Rule* rule_of(const std::exception& error) noexcept {
  const auto* const broken = dynamic_cast<const BrokenRule*>(&error);
  return broken == nullptr ? nullptr : &broken->rule();
}

std::string message_of(const std::exception& error) {
  const Rule* const rule = rule_of(error);
  return rule == nullptr ? error.what() : error.what() + in_brackets(*rule);
}

std::string in_brackets(const Rule& rule) {
  return rule.empty() ? "" : fmt::format(" [{}]", name_of(rule.id));
}

void refuse(const std::filesystem::path& file, RuleId id, NamedValues values) {
  throw Refused<FileError>(file, said(id, std::move(values)));
}

}  // namespace isoshard
