// SPDX-License-Identifier: Apache-2.0
/// What the name of a record says. Names are put together and taken apart here and nowhere else.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "core/observe/site.h"

namespace isoshard {

/// What a record holds, beyond its base.
enum class NameRole : std::uint8_t {
  kPlain,       ///< the value itself, under its own name; a scalar without a role
  kRecomputed,  ///< a mask or an activation that backward computed again
  kReadAgain,   ///< a parameter as forward reads it in a step after the first
  kClipped,     ///< a gradient as the optimizer gets it
  kMicroBatch,  ///< a gradient's sum after a micro-batch that is not the last (call 0: the first)
  kSummand,     ///< what one rank adds to a module's output, or to its gradient
  kMaster,      ///< the optimizer's copy of a parameter in a dtype of its own
  /// optimizer: the numbers by which it steps a parameter (hyperparameters.h)
  kHyperparameters,
  kState,        ///< any other state of the optimizer
  kNext,         ///< data ids of the next step
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
  /// The module or the parameter. Collectives have "<axis>.rank<rank>", data ids have their kind,
  /// a scalar without a role has its whole name, and other scalars have nothing.
  std::string_view base;
  NameRole role = NameRole::kPlain;
  /// The optimizer's state by name ("exp_avg", "master"). A name without a dot is a state as a
  /// whole.
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

/// The name with these parts. Parsing a name and joining its parts gives the same name.
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
