// SPDX-License-Identifier: Apache-2.0
/// What the name of a record says. Names are put together and taken apart here and nowhere else.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "core/observe/site.h"

namespace isoshard {

/// What a record holds of what its name is about.
enum class NameRole : std::uint8_t {
  kPlain,       ///< the value itself, under its own name; a scalar nobody knows
  kRecomputed,  ///< of a mask or an activation: backward made it again
  kReadAgain,   ///< of a parameter: as forward reads it in a later step than the first
  kClipped,     ///< of a gradient: what the optimizer is given
  kMicroBatch,  ///< of a gradient: the sum when a micro-batch but the last one ends (call 0: first)
  kSummand,     ///< of an activation, or its gradient: what one rank adds to a module's output
  kMaster,      ///< of the optimizer: the parameter in a dtype of its own
  kState,       ///< of the optimizer: any other state
  kNext,        ///< of data ids: those of the next step
  kCollectives,  ///< scalar: what a rank called
  kLearningRate,
  kGradNorm,
  kFoundInf,  ///< scalar: whether gradients were not finite
  kOptimizerSteps,
  kRngState,
  kLossScale,
  kLoss,
  kLossBackward,
  kLossPerDpRank,
  kOtherLoss  ///< scalar: any other one whose name begins with "loss"
};

/// A name in parts. It refers to the characters of the name that it was parsed from.
struct RecordName {
  /// The module or the parameter; of collectives "<axis>.rank<rank>", of data ids what they are,
  /// of a scalar without a role of its own its whole name, and of other scalars nothing.
  std::string_view base;
  NameRole role = NameRole::kPlain;
  /// Of the optimizer: which one ("exp_avg", "master"). Of a record of the optimizer whose name has
  /// no dot, which is plain, its whole name.
  std::string_view state = {};
  friend bool operator==(const RecordName&, const RecordName&) = default;
};

/// The kind of a record decides how its name is read: ".clipped" says something at the end of the
/// name of a gradient, and nothing at the end of a module's. One suffix is taken off, the last one,
/// so a base may have a role itself: of "m.partial.recomputed" it is the summand "m.partial".
///
/// Within a kind the suffix alone decides. A parameter that is called "net.read" itself is taken
/// for "net", read again, and the output of a module "net.partial" for a summand of "net": names
/// say no more, and a bundle need not have the record of the base. Its gradient and its state have
/// other kinds, and are read right.
[[nodiscard]] RecordName parse_record_name(RecordKind kind, std::string_view name) noexcept;
RecordName parse_record_name(RecordKind kind, std::string&& name) = delete;  // it would dangle

/// The name of these parts: of every name that was parsed the same name again.
[[nodiscard]] std::string to_string(const RecordName& name);

/// The name of a scalar that has a role.
[[nodiscard]] inline std::string scalar_name(NameRole role) {
  return to_string(RecordName{{}, role});
}

/// Whether the name of a scalar begins with "loss", as that of the loss scale does, too.
[[nodiscard]] constexpr bool is_named_loss(NameRole role) noexcept {
  return role >= NameRole::kLossScale && role <= NameRole::kOtherLoss;
}

}  // namespace isoshard
