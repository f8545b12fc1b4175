// SPDX-License-Identifier: Apache-2.0
/// Which part of a model each stage of a pipeline has.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "subjects/model/model.h"
#include "subjects/model/training_pass.h"
#include "subjects/parallel/nd/schedule/pipeline_schedule.h"
#include "subjects/settings/settings.h"

namespace isoshard {

/// The schedule that settings name, over `pp` ranks.   Errors   as pipeline_spec of names.
[[nodiscard]] PipelineSpec pipeline_spec(const NdSettings& settings, int pp, int micro_batches = 1);

/// Layers in order, in each stage as many as layers_of_stages says. The embedding is in the first,
/// the final norm and the head are in the last.
/// Errors   as layers_of_stages.
[[nodiscard]] std::vector<ModelSection> stages_of(std::int64_t num_layers, int num_stages,
                                                  std::span<const std::int64_t> given = {});

/// Whether the section reads the parameter. A tied embedding is read by the first and by the last.
[[nodiscard]] bool reads(const ModelSection& section, const ParameterSpec& spec);

}  // namespace isoshard
