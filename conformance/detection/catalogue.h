// SPDX-License-Identifier: Apache-2.0
/// The parts of the fault catalogue, one function per class of bug, and what they share.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "conformance/detection/fault.h"

namespace isoshard {

using Faults = std::vector<Fault>;

void add_reduction_faults(Faults& faults);  ///< A: missing and extra reductions
void add_scale_faults(Faults& faults);      ///< B: wrong divisors and factors
void add_clip_faults(Faults& faults);       ///< C: clipping and gradient norm; I: replicas that clip differently
void add_data_faults(Faults& faults);       ///< D: labels; I: samples
void add_sharding_faults(Faults& faults);   ///< E: places of shards; H: values they are drawn from
void add_step_faults(Faults& faults);       ///< G: tied weights; J: accumulation; K: optimizer
void add_vocab_faults(Faults& faults);      ///< A, D: a vocabulary that is split over tp
void add_near_misses(Faults& faults);       ///< legal differences

/// The tiny model of an architecture: 2 layers, hidden 48, 6 heads, ffn 96, vocabulary 96; random ids; no weight has a special value.
/// Group sizes of a case differ pairwise, and plain SGD is used: nothing can hide a factor.
[[nodiscard]] Case fault_case(std::string_view model_type, std::string subject, int tp, int dp);

/// Qwen2 with 8 heads and 2 kv heads on tp 4: two ranks hold each kv head.
[[nodiscard]] Case copied_kv_heads_case();

/// The same, with the norm to clip to at half the norm of its own first gradient (which is run for it).
[[nodiscard]] Case clipped(Case item);

/// Whether a gradient's piece is of this class. (No segment: the call says nothing of its content.)
[[nodiscard]] bool is_gradient_of(const CallInfo& info, const Segment* segment, Axis axis, ParamClass param_class);

/// A rank on which anything may be named first: 0 to size - 1.
[[nodiscard]] std::vector<int> any_rank(int size);

}  // namespace isoshard
