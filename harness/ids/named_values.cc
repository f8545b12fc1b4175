// SPDX-License-Identifier: Apache-2.0
// Placeholders, and values against other values.
#include "harness/ids/named_values.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace isoshard {
namespace {

constexpr std::size_t kMostListed = 64;

struct Plural {
  std::string_view spec, one, several;
};

constexpr Plural kPlurals[] = {{"s", "", "s"},
                               {"es", "", "es"},
                               {"is", "is", "are"},
                               {"has", "has", "have"},
                               {"verb", "s", ""}};

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

NamedValue NamedValue::words(std::string_view name, std::string words) {
  NamedValue made(name, words);
  made.is_data = false;
  return made;
}

const IdValue* find_value(const NamedValues& values, std::string_view name) {
  const auto found = std::ranges::find(values, name, &NamedValue::name);
  return found == values.end() ? nullptr : &found->value;
}

std::string filled(std::string_view text, const NamedValues& values) {
  std::string made;
  while (!text.empty()) {
    const std::size_t brace = text.find_first_of("{}");
    made += text.substr(0, brace);
    if (brace == std::string_view::npos) break;
    text.remove_prefix(brace);
    if (text.substr(0, 2) == "{{" || text.substr(0, 2) == "}}") {
      made += text.front();
      text.remove_prefix(2);
      continue;
    }
    const std::size_t close = text.find('}');
    const std::string_view place = text.substr(1, close - 1);
    const std::size_t colon = place.find(':');
    if (const IdValue* const value = find_value(values, place.substr(0, colon)))
      made += formatted(*value, colon == std::string_view::npos ? "" : place.substr(colon + 1));
    text.remove_prefix(close + 1);
  }
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
