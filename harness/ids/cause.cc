// SPDX-License-Identifier: Apache-2.0
// The table of causes, and how a row's text is filled.
#include "harness/ids/cause.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "core/base/error.h"
#include "core/base/suggest.h"

namespace isoshard {
namespace {

struct Row {
  std::string_view name, text;
};

constexpr Row kCauses[] = {
    {"", ""},
#define ISOSHARD_CAUSE(id, name, text) {name, text},
#define ISOSHARD_PHRASE(id, text)
#include "harness/ids/cause_texts.inc"
#undef ISOSHARD_CAUSE
#undef ISOSHARD_PHRASE
};

constexpr std::string_view kPhrases[] = {
#define ISOSHARD_CAUSE(id, name, text)
#define ISOSHARD_PHRASE(id, text) text,
#include "harness/ids/cause_texts.inc"
#undef ISOSHARD_CAUSE
#undef ISOSHARD_PHRASE
};

constexpr std::size_t kMostListed = 64;

struct Plural {
  std::string_view spec, one, several;
};

constexpr Plural kPlurals[] = {{"s", "", "s"},
                               {"es", "", "es"},
                               {"is", "is", "are"},
                               {"has", "has", "have"},
                               {"verb", "s", ""}};

bool is_one(const CauseValue& value) {
  return std::visit(
      [](const auto& v) {
        using T = std::decay_t<decltype(v)>;
        if constexpr (std::is_arithmetic_v<T>) return v == 1;
        if constexpr (!std::is_arithmetic_v<T> && !std::is_same_v<T, std::string>)
          return v.size() == 1;
        return true;
      },
      value);
}

std::string formatted(const CauseValue& value, std::string_view spec) {
  for (const Plural& plural : kPlurals) {
    if (spec == plural.spec) return std::string(is_one(value) ? plural.one : plural.several);
  }
  const std::string format = fmt::format("{{:{}}}", spec);
  const bool is_of_reals = !spec.empty() && std::string_view("efg").find(spec.back()) != spec.npos;
  return std::visit(
      [&](const auto& v) {
        using T = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<T, std::int64_t>) {
          // fmt takes no precision for whole numbers
          return is_of_reals ? fmt::format(fmt::runtime(format), static_cast<double>(v))
                             : fmt::format(fmt::runtime(format), v);
        } else if constexpr (std::is_arithmetic_v<T> || std::is_same_v<T, std::string>) {
          return fmt::format(fmt::runtime(format), v);
        } else {
          return fmt::format(fmt::runtime(format), fmt::join(v, ", "));
        }
      },
      value);
}

std::string filled(std::string_view text, const NamedValues& values) {
  std::string made;
  while (!text.empty()) {
    const std::size_t open = text.find('{');
    made += text.substr(0, open);
    if (open == std::string_view::npos) break;
    const std::size_t close = text.find('}', open);
    const std::string_view place = text.substr(open + 1, close - open - 1);
    const std::size_t colon = place.find(':');
    const auto found = std::ranges::find(values, place.substr(0, colon), &NamedValue::name);
    if (found != values.end())
      made +=
          formatted(found->value, colon == std::string_view::npos ? "" : place.substr(colon + 1));
    text.remove_prefix(close + 1);
  }
  return made;
}

/// One or several numbers; empty for words.
std::vector<double> numbers_of(const CauseValue& value) {
  return std::visit(
      [](const auto& v) -> std::vector<double> {
        using T = std::decay_t<decltype(v)>;
        if constexpr (std::is_arithmetic_v<T>) {
          return {static_cast<double>(v)};
        } else if constexpr (std::is_same_v<T, std::string>) {
          return {};
        } else if constexpr (std::is_arithmetic_v<typename T::value_type>) {
          return std::vector<double>(v.begin(), v.end());
        } else {
          return {};
        }
      },
      value);
}

/// Cuts lists of more than kMostListed to that many, and says how many there were.
void cap_lists(NamedValues& values) {
  NamedValues counts;
  for (NamedValue& value : values) {
    std::visit(
        [&](auto& v) {
          using T = std::decay_t<decltype(v)>;
          if constexpr (!std::is_arithmetic_v<T> && !std::is_same_v<T, std::string>) {
            if (v.size() <= kMostListed) return;
            counts.emplace_back(fmt::format("num_{}", value.name), v.size());
            v.resize(kMostListed);
          }
        },
        value.value);
  }
  for (NamedValue& count : counts) {
    if (std::ranges::find(values, count.name, &NamedValue::name) == values.end())
      values.push_back(std::move(count));
  }
}

bool fits(const CauseValue& expected, const CauseValue& seen, double relative) {
  const std::vector<double> wanted = numbers_of(expected), got = numbers_of(seen);
  if (wanted.empty()) return expected == seen;
  return std::ranges::equal(wanted, got, [relative](double a, double b) {
    return std::fabs(a - b) <= relative * std::fabs(a);
  });
}

}  // namespace

NamedValue NamedValue::words(std::string_view name, std::string words) {
  NamedValue made(name, words);
  made.is_data = false;
  return made;
}

std::string_view name_of(CauseId id) noexcept {
  return kCauses[static_cast<std::size_t>(id)].name;
}

std::string_view template_of(CauseId id) noexcept {
  return kCauses[static_cast<std::size_t>(id)].text;
}

std::vector<CauseId> all_causes() {
  std::vector<CauseId> all;
  for (std::size_t i = 1; i < std::size(kCauses); ++i) all.push_back(static_cast<CauseId>(i));
  return all;
}

CauseId parse_cause_id(std::string_view name) {
  std::vector<std::string> names;
  for (const CauseId id : all_causes()) {
    if (name_of(id) == name) return id;
    names.emplace_back(name_of(id));
  }
  throw UsageError(fmt::format("a cause must be one of the table, got '{}'{}", name,
                               did_you_mean(std::string(name), names)));
}

std::optional<double> Cause::number(std::string_view name) const {
  const auto found = std::ranges::find(values, name, &NamedValue::name);
  if (found == values.end()) return std::nullopt;
  if (const auto* const whole = std::get_if<std::int64_t>(&found->value))
    return static_cast<double>(*whole);
  if (const auto* const real = std::get_if<double>(&found->value)) return *real;
  return std::nullopt;
}

std::string mismatch(const ExpectedCause& expected, const Cause& cause, double relative) {
  const bool is_any = expected.id == CauseId::kNone && !expected.values.empty();
  if (cause.id != expected.id && (!is_any || cause.empty()))
    return fmt::format("the cause must be {}, got {}",
                       is_any                          ? "any"
                       : expected.id == CauseId::kNone ? "none"
                                                       : name_of(expected.id),
                       cause.empty() ? "none" : name_of(cause.id));
  for (const NamedValue& wanted : expected.values) {
    const auto found = std::ranges::find(cause.values, wanted.name, &NamedValue::name);
    if (found == cause.values.end())
      return fmt::format("cause {} must have {}", name_of(cause.id), wanted.name);
    if (!fits(wanted.value, found->value, relative))
      return fmt::format("{} of cause {} must be {}, got {}", wanted.name, name_of(cause.id),
                         formatted(wanted.value, ""), formatted(found->value, ""));
  }
  return {};
}

std::string in_words(const ExpectedCause& expected) {
  std::vector<std::string> values;
  for (const NamedValue& value : expected.values)
    values.push_back(fmt::format("{} {}", value.name, formatted(value.value, "")));
  const std::string_view name = expected.id == CauseId::kNone ? "any cause" : name_of(expected.id);
  return values.empty() ? std::string(name_of(expected.id))
                        : fmt::format("{} ({})", name, fmt::join(values, ", "));
}

Cause make_cause(CauseId id, NamedValues values) {
  std::string text = filled(template_of(id), values);
  cap_lists(values);
  return {id, std::move(values), std::move(text)};
}

std::string phrase(PhraseId id, const NamedValues& values) {
  return filled(kPhrases[static_cast<std::size_t>(id)], values);
}

}  // namespace isoshard
