// SPDX-License-Identifier: Apache-2.0
/// Stable ids and their tables of texts. A table is a file of rows (cause_texts.inc,
/// finding_texts.inc, rule_texts.inc); an id that is used with values makes a sentence.
#pragma once
#include <concepts>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "harness/ids/named_values.h"

namespace isoshard {

/// The row of an id in its table.
struct IdRow {
  std::string_view name;  ///< "rank_local_partial": stable, used by reports, tests and catalogs
  std::string_view text;  ///< with placeholders
  std::string_view more = {};  ///< evidence text of a finding; reason for a rule
};

/// An enumeration with a table. Its first value, kNone, has an empty row.
template <class Id>
concept TabledId = requires(Id id) {
  { rows_of(id) } -> std::same_as<std::span<const IdRow>>;
  { kind_of(id) } -> std::same_as<std::string_view>;  ///< "cause"
};

template <TabledId Id>
[[nodiscard]] const IdRow& row_of(Id id) noexcept {
  return rows_of(id)[static_cast<std::size_t>(id)];
}

/// "rank_local_partial"; empty for kNone.
template <TabledId Id>
[[nodiscard]] std::string_view name_of(Id id) noexcept {
  return row_of(id).name;
}

/// All ids but kNone, in the order of the table.
template <TabledId Id>
[[nodiscard]] std::vector<Id> all_ids() {
  std::vector<Id> all;
  for (std::size_t i = 1; i < rows_of(Id()).size(); ++i) all.push_back(static_cast<Id>(i));
  return all;
}

template <TabledId Id>
[[nodiscard]] std::optional<Id> find_id(std::string_view name) {
  for (const Id id : all_ids<Id>())
    if (name_of(id) == name) return id;
  return std::nullopt;
}

/// An id with its values.
template <TabledId Id>
struct Said {
  Id id = Id::kNone;
  NamedValues values = {};
  std::string text = {};  ///< the row's text with the values in it

  [[nodiscard]] bool empty() const noexcept { return id == Id::kNone; }
  /// The number of that name; nothing where there is none, or several.
  [[nodiscard]] std::optional<double> number(std::string_view name) const {
    return number_of(values, name);
  }
  /// The text decides: what is said of two tensors is the same where a reader sees no difference.
  [[nodiscard]] bool operator==(const Said& other) const {
    return id == other.id && text == other.text;
  }
};

/// Fills the row's text. Lists are cut after that (with_short_lists).
template <TabledId Id>
[[nodiscard]] Said<Id> said(Id id, NamedValues values = {}) {
  std::string text = filled(row_of(id).text, values);
  return {id, with_short_lists(std::move(values)), std::move(text)};
}

/// The id that is expected, and some of its values. Values without an id are expected of any id.
template <TabledId Id>
struct ExpectedId {
  Id id = Id::kNone;
  NamedValues values = {};
};

/// "rank_local_partial (axis tp, copies 3)".
template <TabledId Id>
[[nodiscard]] std::string in_words(const ExpectedId<Id>& expected) {
  if (expected.values.empty()) return std::string(name_of(expected.id));
  const std::string name(expected.id == Id::kNone ? "any " + std::string(kind_of(expected.id))
                                                  : std::string(name_of(expected.id)));
  return name + " (" + in_words(expected.values) + ")";
}

/// Why an id with values is not the expected one: "the cause must be rank_local_partial, got
/// scale", "cause scale: axis must be tp, got dp"; empty if it is. Numbers may be off by `relative`
/// of the expected ones; values that are not listed may be any.
template <TabledId Id>
[[nodiscard]] std::string mismatch(const ExpectedId<Id>& expected, Id id, const NamedValues& values,
                                   double relative = 0.005) {
  const auto name = [](Id any) { return std::string(any == Id::kNone ? "none" : name_of(any)); };
  const std::string kind(kind_of(id));
  const bool is_any = expected.id == Id::kNone && !expected.values.empty();
  if (id != expected.id && (!is_any || id == Id::kNone))
    return "the " + kind + " must be " + (is_any ? "any" : name(expected.id)) + ", got " + name(id);
  const std::string problem = mismatch_of(expected.values, values, relative);
  return problem.empty() ? problem : kind + " " + name(id) + ": " + problem;
}

template <TabledId Id>
[[nodiscard]] std::string mismatch(const ExpectedId<Id>& expected, const Said<Id>& got,
                                   double relative = 0.005) {
  return mismatch(expected, got.id, got.values, relative);
}

}  // namespace isoshard
