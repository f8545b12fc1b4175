// SPDX-License-Identifier: Apache-2.0
// Placeholders, and values against other values.
#include "harness/ids/named_values.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace isoshard {
namespace {

bool gaps_are_kept = false;

constexpr std::size_t kMostListed = 64;

struct Plural {
  std::string_view spec, one, several;
};

constexpr Plural kPlurals[] = {{"s", "", "s"},
                               {"es", "", "es"},
                               {"is", "is", "are"},
                               {"has", "has", "have"},
                               {"verb", "s", ""}};

constexpr std::string_view kJoinedByAnd = "and";

/// Calls `words` with each run of plain characters of a text, and `place` with each placeholder.
template <class Words, class Place>
void for_each_part(std::string_view text, const Words& words, const Place& place) {
  while (!text.empty()) {
    const std::size_t brace = std::min(text.find_first_of("{}"), text.size());
    if (brace > 0) words(text.substr(0, brace));
    text.remove_prefix(brace);
    if (text.empty()) break;
    if (text.substr(0, 2) == "{{" || text.substr(0, 2) == "}}") {
      words(text.substr(0, 1));
      text.remove_prefix(2);
      continue;
    }
    const std::size_t close = text.find('}');
    if (close == 0 || close == text.npos) {  // no placeholder
      words(text.substr(0, 1));
      text.remove_prefix(1);
      continue;
    }
    std::string_view inside = text.substr(1, close - 1);
    const bool is_optional = inside.starts_with('?');
    if (is_optional) inside.remove_prefix(1);
    const std::size_t colon = std::min(inside.find(':'), inside.size());
    place(Placeholder{inside.substr(0, colon),
                      colon == inside.size() ? "" : inside.substr(colon + 1), is_optional});
    text.remove_prefix(close + 1);
  }
}

const Plural* find_plural(std::string_view spec) {
  const auto* const found = std::ranges::find(kPlurals, spec, &Plural::spec);
  return found == std::end(kPlurals) ? nullptr : found;
}

bool is_one(const IdValue& value) {
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

std::string formatted(const IdValue& value, std::string_view spec) {
  if (const Plural* const plural = find_plural(spec))
    return std::string(is_one(value) ? plural->one : plural->several);
  const std::string_view separator = spec == kJoinedByAnd ? " and " : ", ";
  if (spec == kJoinedByAnd) spec = "";
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
          return fmt::format(fmt::runtime(format), fmt::join(v, separator));
        }
      },
      value);
}

/// One or several numbers; empty for words.
std::vector<double> numbers_of(const IdValue& value) {
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

/// Whole numbers are counts, ranks and places: near is wrong.
bool is_whole(const IdValue& value) {
  return std::holds_alternative<std::int64_t>(value) ||
         std::holds_alternative<std::vector<std::int64_t>>(value);
}

bool fits(const IdValue& expected, const IdValue& seen, double relative) {
  if (is_whole(expected) && is_whole(seen)) return numbers_of(expected) == numbers_of(seen);
  const std::vector<double> wanted = numbers_of(expected), got = numbers_of(seen);
  if (wanted.empty()) return expected == seen;
  return std::ranges::equal(wanted, got, [relative](double a, double b) {
    return std::fabs(a - b) <= relative * std::fabs(a);
  });
}

}  // namespace

NamedValue NamedValue::words(std::string_view name, std::string_view words) {
  NamedValue made(name, words);
  made.is_data = false;
  return made;
}

const IdValue* find_value(const NamedValues& values, std::string_view name) {
  const auto found = std::ranges::find(values, name, &NamedValue::name);
  return found == values.end() ? nullptr : &found->value;
}

std::vector<Placeholder> placeholders_in(std::string_view text) {
  std::vector<Placeholder> places;
  for_each_part(
      text, [](std::string_view) {}, [&](const Placeholder& place) { places.push_back(place); });
  return places;
}

void keep_gaps() noexcept {
  gaps_are_kept = true;
}

std::string filled(std::string_view text, const NamedValues& values, std::string_view of) {
  std::string made;
  for_each_part(
      text, [&](std::string_view words) { made += words; },
      [&](const Placeholder& place) {
        const IdValue* const value = find_value(values, place.name);
        if (value != nullptr)
          made += formatted(*value, place.spec);
        else if (!place.is_optional && gaps_are_kept)
          made += fmt::format("{{{}}}", place.name);
        else if (!place.is_optional)
          throw std::logic_error(
              fmt::format("the text of {} must be given a value {{{}}}, got none", of, place.name));
      });
  return made;
}

std::string with_names(std::string_view text) {
  std::string made;
  for_each_part(
      text, [&](std::string_view words) { made += words; },
      [&](const Placeholder& place) {
        if (const Plural* const plural = find_plural(place.spec))
          made += plural->several;
        else
          made += fmt::format(fmt::runtime(place.is_optional ? "[{{{}}}]" : "{{{}}}"), place.name);
      });
  return made;
}

NamedValues with_short_lists(NamedValues values) {
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
    if (find_value(values, count.name) == nullptr) values.push_back(std::move(count));
  }
  return values;
}

std::optional<double> number_of(const NamedValues& values, std::string_view name) {
  const IdValue* const found = find_value(values, name);
  if (found == nullptr) return std::nullopt;
  if (const auto* const whole = std::get_if<std::int64_t>(found))
    return static_cast<double>(*whole);
  if (const auto* const real = std::get_if<double>(found)) return *real;
  return std::nullopt;
}

std::vector<double> numbers_of(const NamedValues& values, std::string_view name) {
  const IdValue* const found = find_value(values, name);
  return found == nullptr ? std::vector<double>() : numbers_of(*found);
}

std::string word_of(const NamedValues& values, std::string_view name) {
  const IdValue* const found = find_value(values, name);
  if (found == nullptr || !numbers_of(*found).empty()) return "";
  return formatted(*found, "");
}

std::string mismatch_of(const NamedValues& wanted, const NamedValues& values, double relative) {
  for (const NamedValue& one : wanted) {
    const IdValue* const found = find_value(values, one.name);
    if (found == nullptr) return fmt::format("there must be {}", one.name);
    if (!fits(one.value, *found, relative))
      return fmt::format("{} must be {}, got {}", one.name, formatted(one.value, ""),
                         formatted(*found, ""));
  }
  return {};
}

std::string in_words(const NamedValues& values) {
  std::vector<std::string> words;
  for (const NamedValue& value : values)
    words.push_back(fmt::format("{} {}", value.name, formatted(value.value, "")));
  return fmt::format("{}", fmt::join(words, ", "));
}

}  // namespace isoshard
