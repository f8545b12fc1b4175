// SPDX-License-Identifier: Apache-2.0
/// The summands of a parameter's gradient by micro-batch, rank and sample, made again from the
/// reference's activations and their gradients.
///
/// A gradient is the sum of what each micro-batch, and in it each rank's samples, adds: dY^T X for
/// a weight, where dY is the gradient at its module's output and X the module's input; the rows of
/// dY by token id for an embedding; the sum of dY for a bias. Which activation is X is not known:
/// the nearest ones before the module are tried, and believed only if the summands add up to the
/// reference's gradient. A tied weight is used by two modules, whose summands are added: the other
/// one is a module without a weight of its own, as wide as the weight is long. Matrices are never
/// made whole: a few random columns P probe them as G P, which costs little for weights of any
/// size.
#pragma once
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "harness/causes/view/evidence.h"

namespace isoshard::detail {

/// The summands of a gradient by micro-batch and slice of the samples, [micro-batches x slices], as
/// the probes see them.
struct Summands {
  std::string module = {};  ///< that the parameter belongs to
  int micro_batches = 0, slices = 1;
  Axis axis = Axis::kWorld;  ///< along which the slices lie; kWorld if there is but one
  std::vector<Values> pieces = {};
  /// The same pieces added up by the modules that use the weight, if these are several.
  std::vector<std::pair<std::string, Values>> uses = {};
  Values probes = {};  ///< columns P; undefined for a vector, which is seen as it is

  /// A rank's part of the gradient, at the probes.
  [[nodiscard]] Values seen(const View& view) const;
};

/// The summands by micro-batch and slice of the samples that ranks share out. Nothing if they are
/// not found. A single micro-batch is split only where ranks hold no copies, and for a weight that
/// two modules use: elsewhere copies are compared.
///
/// `view`   what a rank holds: only its columns are probed
[[nodiscard]] std::optional<Summands> summands_of_micro_batches(const Evidence& e, const View& view,
                                                                bool has_copies);

/// The summands by sample; nothing if there are more than 64, or they are not found.
[[nodiscard]] std::optional<Summands> summands_of_samples(const Evidence& e, const View& view);

/// The weights with which pieces enter what a rank holds; empty if they do not explain it. A right
/// gradient has weights of 1.
[[nodiscard]] std::vector<double> weights_in(const Evidence& e, const View& view,
                                             const Summands& summands,
                                             const std::vector<Values>& pieces);

}  // namespace isoshard::detail
