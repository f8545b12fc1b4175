// SPDX-License-Identifier: Apache-2.0
/// Runs of two steps, a checkpoint, and two more steps.
#pragma once
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "fixtures/cases/resumed_case.h"
#include "harness/testing/test_folder.h"
#include "harness/verdict/equal_runs.h"
#include "subjects/model/zoo/registry.h"
#include "suite/testing/emulated_cases.h"

namespace isoshard {

inline constexpr int kStepsSaved = 2, kSteps = 4;

/// AdamW on a cosine schedule, accumulation of unequal token counts, dropout where the model has
/// it.
inline Case long_case(std::string subject, const Degrees& degrees, Dtype dtype = Dtype::kFloat32,
                      std::string_view model_type = "qwen2") {
  Case item = step_case(std::move(subject), degrees, dtype, model_type);
  item.steps = kSteps;
  item.micro_batches = 2;
  item.batch_size = 1;
  item.data.unequal_labels = true;
  item.settings.optimizer = {};
  item.settings.schedule.kind = LearningRateSettings::Kind::kCosine;
  item.settings.schedule.warmup_steps = 1;
  if (dtype != Dtype::kFloat32) item.settings.master_dtype = Dtype::kFloat32;
  if (model_type == "gpt2" || model_type == "megatron_gpt") set_dropout(item.config, 0.1);
  return item;
}

inline Case saved_to(Case item, const std::filesystem::path& folder, int after = kStepsSaved) {
  item.save_path = folder.string();
  item.save_after = after;
  return item;
}

inline RunOptions keeping(Keep keep) {
  RunOptions options;
  options.keep = keep;
  options.compare = false;
  return options;
}

/// Runs without a reference.
inline Trace run_alone(const Case& item, Keep keep = Keep::kNothing) {
  return run_case(item, Reference(), keeping(keep));
}

/// What a run recorded from `first` on, and the state behind the step before.
inline Trace from_step(Trace run, int first) {
  for (RankTrace& rank : run.ranks) {
    std::erase_if(rank.records, [&](const Record& record) {
      const bool is_state =
          (record.key.kind == RecordKind::kParam && role_of(record.key) != NameRole::kReadAgain) ||
          record.key.kind == RecordKind::kOptimizer ||
          role_of(record.key) == NameRole::kOptimizerSteps ||
          role_of(record.key) == NameRole::kRngState;
      // a new process of DDP orders its buckets anew, in other calls
      return role_of(record.key) == NameRole::kCollectives ||
             (record.key.step < first && !(record.key.step == first - 1 && is_state));
    });
  }
  return run;
}

}  // namespace isoshard
