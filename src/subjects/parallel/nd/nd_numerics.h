// SPDX-License-Identifier: Apache-2.0
/// What nd says about its own arithmetic.
#pragma once
#include "subjects/model/model.h"
#include "subjects/parallel/numerics_spec.h"
#include "subjects/parallel/subject_traits.h"

namespace isoshard {

inline constexpr SubjectTraits kNdTraits{.shards_parameters = true};

/// autotp's over tp, tokens by ContextSplit over cp, stages_of over pp. Over dp x cp each rank
/// steps its rows of a parameter's part (dim0_shards). Without a pipeline gradients of each
/// micro-batch are averaged on their own, as fsdp_tp has it; in a pipeline they are added up in the
/// reduce dtype and averaged once. Then they are averaged over replicas.
/// Errors   as autotp_plan, stages_of and NdGroups.
[[nodiscard]] NumericsSpec nd_numerics(const Model& model, const NumericsInputs& inputs);

}  // namespace isoshard
