// SPDX-License-Identifier: Apache-2.0
/// Proof that a lattice case is exact: no sum in it, in whatever order, can leave the integers that
/// its dtype holds.
#pragma once
#include "fixtures/cases/case.h"

namespace isoshard {

[[nodiscard]] bool is_lattice(const Case& c) noexcept;

/// Goes through every step of a lattice case in fp64 by the formulas, forward, backward and update,
/// and adds up abs(a) abs(b) at each op. Every value is a multiple of its op's unit, a power of
/// two; where the sum of magnitudes is at most 2^p units, p the dtype's significant bits, each
/// partial sum is exact, whoever adds it and in which order. Gradients are taken dp-fold, as ranks
/// sum them.
///
/// Does nothing for a case of another model.
/// Errors   UsageError that names the first op that leaves the range, with the numbers; UsageError
///          for settings that are not exact (a mean, clipping, AdamW, weight decay, a rate or
///          momentum that is no power of two, weights from a file).
/// Source   Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., sec. 2.1: multiples of
///          a unit below 2^p of it are floating-point numbers.
void require_exact(const Case& c);

}  // namespace isoshard
