// SPDX-License-Identifier: Apache-2.0
/// Values with names, and texts with placeholders for them: what causes, findings and rules share.
#pragma once
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

namespace isoshard {

/// A number, some numbers, a word (an axis, a parameter) or some words.
using IdValue = std::variant<std::int64_t, double, std::string, std::vector<std::int64_t>,
                             std::vector<double>, std::vector<std::string>>;

/// A value by the name of its placeholder: NamedValue("copies", 3), NamedValue("axis", "tp").
struct NamedValue {
  template <class T>
  NamedValue(std::string_view its_name, const T& its_value)
      : name(its_name), value(as_value(its_value)) {}
  /// A value for the sentence alone, as phrase() makes it. It is not written to report.json.
  [[nodiscard]] static NamedValue words(std::string_view name, std::string words);

  std::string name;
  IdValue value;
  bool is_data = true;

 private:
  template <class T>
  static IdValue as_value(const T& given) {
    if constexpr (std::is_same_v<T, IdValue>) {
      return given;
    } else if constexpr (std::is_convertible_v<const T&, std::string_view>) {
      return std::string(std::string_view(given));
    } else if constexpr (std::is_integral_v<T>) {
      return static_cast<std::int64_t>(given);
    } else if constexpr (std::is_floating_point_v<T>) {
      return static_cast<double>(given);
    } else {
      using Element = std::decay_t<decltype(*std::begin(given))>;
      if constexpr (std::is_convertible_v<const Element&, std::string_view>) {
        return std::vector<std::string>(std::begin(given), std::end(given));
      } else if constexpr (std::is_integral_v<Element>) {
        return std::vector<std::int64_t>(std::begin(given), std::end(given));
      } else {
        return std::vector<double>(std::begin(given), std::end(given));
      }
    }
  }
};

using NamedValues = std::vector<NamedValue>;

/// The text with its placeholders filled. A placeholder `{name}` or `{name:spec}` is replaced by
/// the value, which is formatted as fmt does it; several values are joined by ", ". The specs s,
/// es, is, has and verb choose between one and several, by a number or by how many values there
/// are: `{steps} step{steps:s}`, `{rows:is} wrong`, `{ranks} hold{ranks:verb}`. A placeholder whose
/// value is not given is left out. A brace of the text itself is doubled.
[[nodiscard]] std::string filled(std::string_view text, const NamedValues& values);

/// Cuts lists of more than 64 values to the first 64, and adds "num_<name>": how many there were.
[[nodiscard]] NamedValues with_short_lists(NamedValues values);

/// The value of that name; null where there is none.
[[nodiscard]] const IdValue* find_value(const NamedValues& values, std::string_view name);
/// The number of that name; nothing where there is none, or several.
[[nodiscard]] std::optional<double> number_of(const NamedValues& values, std::string_view name);
/// The numbers of that name, one or several; empty where there are none.
[[nodiscard]] std::vector<double> numbers_of(const NamedValues& values, std::string_view name);
/// The word of that name, or several joined by ", "; empty where there is none.
[[nodiscard]] std::string word_of(const NamedValues& values, std::string_view name);

/// Why values are not the wanted ones: "axis must be tp, got dp"; empty if they are. Numbers may be
/// off by `relative` of the wanted ones; values that are not listed may be any.
[[nodiscard]] std::string mismatch_of(const NamedValues& wanted, const NamedValues& values,
                                      double relative);

/// "axis tp, copies 3".
[[nodiscard]] std::string in_words(const NamedValues& values);

}  // namespace isoshard
