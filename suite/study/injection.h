// SPDX-License-Identifier: Apache-2.0
/// From a composition to a run that has it.
#pragma once
#include <ATen/core/Tensor.h>

#include "harness/fault/probe.h"
#include "suite/record/run_case.h"
#include "suite/study/composition.h"

namespace isoshard {

/// What the composition makes of a tensor: a new one of the same shape and dtype. Values are
/// computed in fp64 and rounded once.
/// Determinism   a function of its arguments.
[[nodiscard]] at::Tensor changed(const at::Tensor& value, const Composition& composition);

/// Options that put the composition on a run of the case, in every step. `probe` counts how often
/// it changed a bit.
[[nodiscard]] RunOptions with_composition(const Composition& composition, const Case& item,
                                          const FaultProbe& probe);

}  // namespace isoshard
