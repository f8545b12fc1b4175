// SPDX-License-Identifier: Apache-2.0
/// What fsdp_tp says about its own arithmetic.
#pragma once
#include "subjects/model/model.h"
#include "subjects/parallel/numerics_spec.h"
#include "subjects/parallel/subject_traits.h"

namespace isoshard {

inline constexpr SubjectTraits kFsdpTpTraits{.shards_parameters = true};

/// autotp's over tp. Over dp each rank steps its rows of a parameter's part (dim0_shards); a
/// micro-batch's gradients are averaged on their own, group by group, in the reduce dtype, and
/// added up in the dtype of masters.
/// Errors   as autotp_plan.
[[nodiscard]] NumericsSpec fsdp_tp_numerics(const Model& model, const NumericsInputs& inputs);

}  // namespace isoshard
