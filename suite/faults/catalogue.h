// SPDX-License-Identifier: Apache-2.0
/// The parts of the fault catalogue, one function per class of bug, and what they share.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "suite/faults/fault.h"

namespace isoshard {

using Faults = std::vector<Fault>;

void add_reduction_faults(Faults& faults);  ///< A: missing and extra reductions
void add_scale_faults(Faults& faults);      ///< B: wrong divisors and factors
/// C: clipping and gradient norm; I: replicas that clip differently.
void add_clip_faults(Faults& faults);
void add_data_faults(Faults& faults);  ///< D: labels; I: samples
/// E: places of shards and tokens; H: values they are drawn from.
void add_sharding_faults(Faults& faults);
/// G: tied weights; J: accumulation; K: precision, optimizer; L: ZeRO's shared buffers.
void add_step_faults(Faults& faults);
void add_vocab_faults(Faults& faults);   ///< A, D: a vocabulary that is split over tp
void add_random_faults(Faults& faults);  ///< H: masks of dropout, recomputed layers
/// E, L: buffers that are walked wrongly, read late or published late.
void add_buffer_faults(Faults& faults);
/// H, I, K: the state that a run resumes with after it was saved and loaded.
void add_checkpoint_faults(Faults& faults);
void add_context_faults(Faults& faults);   ///< B to F: context parallelism
void add_pipeline_faults(Faults& faults);  ///< B to M: pipelines
/// Legal differences: orders of sums, buckets, layouts, data.
void add_benign_variations(Faults& faults);
void add_buffer_benign_variations(Faults& faults);  ///< what pads a buffer
/// Legal differences of values: zeros, padding, roundings, the loss, the step.
void add_value_benign_variations(Faults& faults);

[[nodiscard]] ExpectedDetection expect(Stage stage, std::string name, std::vector<int> ranks,
                                       ExpectedCause cause, int step = 0);

/// The tiny model of an architecture: 2 layers, hidden 48, 6 heads, ffn 96, vocabulary 96; random
/// ids; no weight has a special value. Group sizes of a case differ pairwise, and plain SGD is
/// used: nothing can hide a factor.
[[nodiscard]] Case fault_case(std::string_view model_type, std::string subject,
                              const Degrees& degrees);
/// The same on subject nd, with two layers for each rank of pp.
[[nodiscard]] Case pipeline_case(std::string_view model_type, const Degrees& degrees,
                                 int micro_batches);
[[nodiscard]] Case of_four_micro_batches(Case item);
/// Its head is its embedding.
[[nodiscard]] Case tied(Case item);
/// On subject megatron with sequence parallelism.
[[nodiscard]] Case sequence_case(std::string_view model_type, const Degrees& degrees);

/// Qwen2 with 8 heads and 2 kv heads on tp 4: two ranks hold each kv head.
[[nodiscard]] Case copied_kv_heads_case();

/// The same, with the norm to clip to at half the norm of its own first gradient (which is run for
/// it).
[[nodiscard]] Case clipped(Case item);

/// Each rank keeps its own summand, of what is carried that has these classes (none: of all).
[[nodiscard]] Injection skipped(Purpose purpose, Axis axis, std::vector<ParamClass> classes = {});
/// What comes out is multiplied.
[[nodiscard]] Injection scaled(Purpose purpose, Axis axis, FaultFactor factor,
                               std::vector<ParamClass> classes = {});

/// Whether a segment of a gradient is of this class. Without a segment the call names no content.
[[nodiscard]] bool is_gradient_of(const CallInfo& info, const Segment* segment, Axis axis,
                                  ParamClass param_class);

/// All ranks, 0 to size - 1, for findings that may name any of them first.
[[nodiscard]] std::vector<int> any_rank(int size);

}  // namespace isoshard
