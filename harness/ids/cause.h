// SPDX-License-Identifier: Apache-2.0
/// The likely cause of a divergence as data: an id, named values, and the sentence made of them.
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

/// One id for each row of cause_texts.inc. Ids are stable: reports, tests and the fault catalog use
/// their names.
enum class CauseId : std::uint16_t {
  kNone,
#define ISOSHARD_CAUSE(id, name, text) id,
#define ISOSHARD_PHRASE(id, text)
#include "harness/ids/cause_texts.inc"
#undef ISOSHARD_CAUSE
#undef ISOSHARD_PHRASE
};

/// Parts of sentences that several causes share, or that some causes end with.
enum class PhraseId : std::uint16_t {
#define ISOSHARD_CAUSE(id, name, text)
#define ISOSHARD_PHRASE(id, text) id,
#include "harness/ids/cause_texts.inc"
#undef ISOSHARD_CAUSE
#undef ISOSHARD_PHRASE
};

/// "rank_local_partial"; empty for kNone.
[[nodiscard]] std::string_view name_of(CauseId id) noexcept;
/// Errors   UsageError that lists the nearest name.
[[nodiscard]] CauseId parse_cause_id(std::string_view name);
/// All ids but kNone, in the order of the table.
[[nodiscard]] std::vector<CauseId> all_causes();
/// The row's text with its placeholders, for `explain`.
[[nodiscard]] std::string_view template_of(CauseId id) noexcept;

/// A number, some numbers, a word (an axis, a parameter) or some words.
using CauseValue = std::variant<std::int64_t, double, std::string, std::vector<std::int64_t>,
                                std::vector<double>, std::vector<std::string>>;

/// A value by the name of its placeholder: NamedValue("copies", 3), NamedValue("axis", "tp").
struct NamedValue {
  template <class T>
  NamedValue(std::string_view its_name, const T& its_value)
      : name(its_name), value(as_value(its_value)) {}
  /// Words that belong to the sentence alone, not to the data: what phrase() makes.
  [[nodiscard]] static NamedValue words(std::string_view name, std::string words);

  std::string name;
  CauseValue value;
  bool is_data = true;

 private:
  template <class T>
  static CauseValue as_value(const T& given) {
    if constexpr (std::is_convertible_v<const T&, std::string_view>) {
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

/// What a pattern found. Without an id it found nothing.
struct Cause {
  CauseId id = CauseId::kNone;
  NamedValues values;
  std::string text;  ///< the row's text with the values in it

  [[nodiscard]] bool empty() const noexcept { return id == CauseId::kNone; }
  /// The number of that name; nothing where there is none, or several.
  [[nodiscard]] std::optional<double> number(std::string_view name) const;
  /// The text decides: causes of two tensors are the same where a reader sees no difference.
  [[nodiscard]] bool operator==(const Cause& other) const {
    return id == other.id && text == other.text;
  }
};

/// What a cause must be: its id, and some of its values. With values and no id, any cause that has
/// these values.
struct ExpectedCause {
  CauseId id = CauseId::kNone;
  NamedValues values = {};
};

/// Why a cause is not the expected one: "the cause must be rank_local_partial, got scale", "axis
/// must be tp, got dp"; empty if it is. Numbers may be off by `relative` of the expected ones;
/// values that are not listed may be any.
[[nodiscard]] std::string mismatch(const ExpectedCause& expected, const Cause& cause,
                                   double relative = 0.005);

/// "rank_local_partial (axis tp, copies 3)".
[[nodiscard]] std::string in_words(const ExpectedCause& expected);

/// Fills the row's text. A placeholder `{name}` or `{name:spec}` is replaced by the value, which is
/// formatted as fmt does it; several values are joined by ", ". The specs s, es, is, has and verb
/// choose between one and several, by a number or by how many values there are: `{steps}
/// step{steps:s}`, `{rows:is} wrong`, `{ranks} hold{ranks:verb}`. A placeholder whose value is not
/// given is left out. A list of more than 64 values is cut to the first 64 after the text is made,
/// and "num_<name>" says how many there were.
[[nodiscard]] Cause make_cause(CauseId id, NamedValues values = {});
[[nodiscard]] std::string phrase(PhraseId id, const NamedValues& values = {});

}  // namespace isoshard
