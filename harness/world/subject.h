// SPDX-License-Identifier: Apache-2.0
/// The interface of the implementation that is judged: one rank's part of it, as phases that the
/// harness can observe.
#pragma once
#include <filesystem>
#include <span>

#include "core/base/error.h"
#include "harness/world/batch.h"

namespace isoshard {

/// One rank of an implementation. A subject is given its communicator and sink at construction and
/// sends every tensor that design.md section 5 names through the sink.
///
/// Ranks   every phase is collective over the subject's world.
///
///     subject.setup();
///     subject.train_step(micro_batches); // forward_backward, reduce_gradients, clip, step, state
class Subject {
 public:
  virtual ~Subject() = default;
  /// Builds model, shards and optimizer, and records the parameters as first read.
  virtual void setup() = 0;
  virtual void forward_backward(std::span<const Batch> micro_batches) = 0;
  virtual void reduce_gradients() = 0;
  /// Clips by the global norm and records it (the norm before clipping), whether clipping is due or
  /// not.
  virtual void clip() = 0;
  virtual void step() = 0;
  /// Records parameters and optimizer state after the step.
  virtual void state() = 0;
  /// Between steps: writes a checkpoint from which another subject can resume.   Errors
  /// UsageError if it writes none.
  virtual void save(const std::filesystem::path& folder) {
    throw UsageError(folder.string() + ": this subject does not write checkpoints");
  }

  void train_step(std::span<const Batch> micro_batches) {
    forward_backward(micro_batches);
    reduce_gradients();
    clip();
    step();
    state();
  }
};

}  // namespace isoshard
