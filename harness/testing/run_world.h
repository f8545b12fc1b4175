// SPDX-License-Identifier: Apache-2.0
/// Runs a test's body on forked ranks; their failed expectations become failures of the test that
/// runs. A program that is linked with this becomes the controller of forked worlds before its main
/// begins (make_controller), so it needs no main of its own: GTest::gtest_main will do.
#pragma once
#include <cstring>
#include <functional>
#include <source_location>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "harness/world/forked/forked_world.h"

namespace isoshard {

namespace detail {

struct Deduced {};

template <class T>
inline constexpr bool kIsVector = false;
template <class T>
inline constexpr bool kIsVector<std::vector<T>> = true;

template <class T>
inline constexpr bool kIsPlain = std::is_arithmetic_v<T> || std::is_enum_v<T>;

/// Sends a number, a std::string or a std::vector of numbers or bytes as the rank's result.
template <class T>
void post_value(Rank& rank, const T& value) {
  if constexpr (kIsPlain<T>) {
    rank.post_result(std::as_bytes(std::span(&value, 1)));
  } else {
    static_assert(std::is_same_v<T, std::string> || kIsVector<T>,
                  "a rank returns a number, a std::string or a std::vector of those");
    static_assert(std::is_trivially_copyable_v<typename T::value_type> &&
                  !std::is_same_v<T, std::vector<bool>>);
    rank.post_result(std::as_bytes(std::span(value.data(), value.size())));
  }
}

/// The value of a result; a default one if the rank posted none.
template <class T>
T value_of(const std::vector<std::byte>& bytes) {
  T value{};
  if constexpr (kIsPlain<T>) {
    if (bytes.size() == sizeof(T)) std::memcpy(&value, bytes.data(), sizeof(T));
  } else {
    value.resize(bytes.size() / sizeof(typename T::value_type));
    if (!value.empty())
      std::memcpy(value.data(), bytes.data(), value.size() * sizeof(typename T::value_type));
  }
  return value;
}

/// Runs the world and turns what went wrong into failures of the running test, at `where`.
WorldReport run_and_record(WorldOptions options, const ForkedWorld::Body& body,
                           const std::source_location& where);

}  // namespace detail

/// Why the sizes of the worlds that this process has started are not those of `declared`, such as
/// "2,3,6"; empty if they are. Worlds of one are left out: every reference is one. `is_share`: a
/// share of the suite's tests ran, which need not start all of the declared sizes.
[[nodiscard]] std::string world_sizes_problem(std::string_view declared, bool is_share = false);

/// Runs `body(rank)` on every rank and gives their values back in rank order; nothing if body
/// returns nothing.
///
/// Ranks    called by the controller; body runs on all ranks.
/// Errors   a failed EXPECT_ or ASSERT_ of a rank becomes a failure of the running test, "[rank 1]"
///          in front, at its own file and line; a rank that throws, crashes, exits or hangs becomes
///          one failure that names it. The vector always has one element per rank: those without a
///          value are T{}. Tests about failures use run_world_report.
///
///     const std::vector<double> sums = run_world(2, [](Rank& rank) { return sum_over(rank.comm());
///       });
template <class T = detail::Deduced, class Body>
auto run_world(WorldOptions options, Body body,
               std::source_location where = std::source_location::current()) {
  using Returned = std::invoke_result_t<Body&, Rank&>;
  using Value = std::conditional_t<std::is_same_v<T, detail::Deduced>, Returned, T>;
  if constexpr (std::is_void_v<Value>) {
    (void)detail::run_and_record(
        std::move(options), [body](Rank& rank) mutable { body(rank); }, where);
  } else {
    const WorldReport report = detail::run_and_record(
        std::move(options),
        [body](Rank& rank) mutable { detail::post_value<Value>(rank, body(rank)); }, where);
    std::vector<Value> values;
    for (const RankReport& rank : report.ranks)
      values.push_back(detail::value_of<Value>(rank.result));
    return values;
  }
}

template <class T = detail::Deduced, class Body>
auto run_world(int size, Body body, std::source_location where = std::source_location::current()) {
  return run_world<T>(WorldOptions{.size = size}, std::move(body), where);
}

/// Runs the world and records nothing: for tests whose claim is how a world fails.
[[nodiscard]] WorldReport run_world_report(WorldOptions options, ForkedWorld::Body body);

}  // namespace isoshard
