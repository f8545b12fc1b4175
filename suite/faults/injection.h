// SPDX-License-Identifier: Apache-2.0
/// A change of a run as data: where, of what, on which ranks, and what is done. The fault catalog,
/// benign variations, their controls and the random study share this type and its injector.
#pragma once
#include <ATen/core/Tensor.h>

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/axis.h"
#include "core/base/param_class.h"
#include "core/comm/collective.h"
#include "fixtures/cases/case.h"
#include "harness/fault/probe.h"
#include "suite/record/run_case.h"

namespace isoshard {

/// Where a run is changed: an activation or its gradient as it passes a tap, a collective, what a
/// step of the optimizer adds to a parameter, the loss that goes backward, the positions of tokens,
/// a setting of the run.
enum class FaultPoint : std::uint8_t {
  kForward,
  kBackward,
  kCollective,
  kUpdate,
  kLoss,
  kPositions,
  kSetting
};
/// forward, backward, collective, update, loss, positions, setting.
[[nodiscard]] std::string_view name_of(FaultPoint point) noexcept;

/// Those with a magnitude m, x the values and s their root mean square: kScale x (1 + m); kShift x
/// + m s; kNoise x + m s u, u of -1..1. Those without: kZero 0; kRoll each value its neighbor's;
/// kRound to bf16 (or, with a magnitude, to so many bits after the leading one); kSkip the
/// reduction is not made, and each rank keeps its own summand. Of one point: kSplit the loss is the
/// sum over m runs of the sequence; kRestart positions begin at 0; kSet the setting gets a value.
enum class FaultChange : std::uint8_t {
  kScale,
  kShift,
  kNoise,
  kZero,
  kRoll,
  kRound,
  kSkip,
  kSplit,
  kRestart,
  kSet
};
/// scale, shift, noise, zero, roll, round, skip, split, restart, set.
[[nodiscard]] std::string_view name_of(FaultChange change) noexcept;

/// A part of what one rank has of a tensor: all, a quarter in a row, one element, a half in a row,
/// the elements that are 0, the second of three equal parts (keys in a fused projection).
enum class FaultExtent : std::uint8_t { kAll, kPart, kElement, kHalf, kZeros, kSecondThird };
/// all, part, element, half, zeros, second third.
[[nodiscard]] std::string_view name_of(FaultExtent extent) noexcept;

/// The factor of kScale, where it is a number of the case. kMagnitude: 1 + magnitude.
enum class FaultFactor : std::uint8_t {
  kMagnitude,
  kTp,
  kOneOverTp,
  kCp,
  kMicroBatches,
  kOneOverMicroBatches
};
/// "tp", "1/tp", "micro-batches", ...
[[nodiscard]] std::string_view name_of(FaultFactor factor) noexcept;

/// Which layers a module or parameter is in. kFirstOfEach: in each layer the first row-parallel
/// bias, which is attention's where it has one.
enum class FaultLayers : std::uint8_t { kAny, kLast, kInside, kOutside, kFirstOfEach };

/// Whether a collective's result is changed, or what a rank gives to it.
enum class FaultSide : std::uint8_t { kResult, kGiven };

/// The purpose of a collective call. Without an op it is any reduction, part by part.
struct CalledFor {
  std::optional<CollectiveOp> op = {};
  Purpose purpose = Purpose::kUnspecified;
  Axis axis = Axis::kWorld;
  auto operator<=>(const CalledFor&) const = default;
};

/// Ranks of one coordinate on an axis, or all others.
struct FaultRanks {
  Axis axis = Axis::kWorld;
  int coordinate = 0;
  bool are_others = false;
};

struct Injection {
  FaultPoint point = FaultPoint::kForward;
  /// Name of a module, a parameter, a part of what a collective carries, or a setting; '*' stands
  /// for any letters. Empty: all, also the content of a call that names nothing.
  std::string name = {};
  CalledFor called = {};
  std::vector<ParamClass> classes = {};  ///< classes of what a collective carries; empty: all
  FaultLayers layers = FaultLayers::kAny;
  FaultSide side = FaultSide::kResult;
  FaultChange change = FaultChange::kScale;
  FaultFactor factor = FaultFactor::kMagnitude;
  FaultExtent extent = FaultExtent::kAll;
  double magnitude = 0;                  ///< m; 0 for a change without
  std::string value = {};                ///< the setting's new value
  std::optional<FaultRanks> ranks = {};  ///< ranks that go wrong; none: all
  double position = 0;                   ///< where a part begins, from 0 to 1
  int least_micro_batches = 1;           ///< a case with fewer is left alone

  /// Whether the rank of a mesh is one of those that go wrong.
  [[nodiscard]] bool is_on(const MeshShape& mesh, int rank) const;
};
using Injections = std::vector<Injection>;

/// "skips grad_reduce over dp of matrices".
[[nodiscard]] std::string in_words(const Injection& injection);

/// The same with its factor as a number of the case: 1 + magnitude.
[[nodiscard]] Injection with_numbers_of(const Case& item, Injection injection);

/// What the injection makes of a tensor: a new one of the same shape and dtype. Values are computed
/// in fp64 and rounded once.
/// Requires      a factor that is a magnitude
/// Determinism   a function of its arguments.
[[nodiscard]] at::Tensor changed(const at::Tensor& value, const Injection& injection);

/// Options that put the injection on a run of the case, in every step, besides what they do
/// already: of two, the later sees a call first. `probe` counts how often it changed a bit.
/// Errors   UsageError for a change that its point, side or ranks cannot have, or an unknown
///          setting.
[[nodiscard]] RunOptions inject(RunOptions options, const Injection& injection, const Case& item,
                                const FaultProbe& probe);

}  // namespace isoshard
