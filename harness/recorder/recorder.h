// SPDX-License-Identifier: Apache-2.0
/// The sink of a rank: what passes goes through a fault, if there is one, and to the record writer.
#pragma once
#include <functional>
#include <memory>

#include "core/observe/sink.h"
#include "core/tensor/convert.h"
#include "harness/trace/record_writer.h"

namespace isoshard {

/// Replaces a value at a tap; returns it unchanged where the fault does not apply. Called before
/// the value is recorded.
using TapMutation = std::function<at::Tensor(const Site& site, at::Tensor value)>;

struct RecorderOptions : RecordOptions {
  TapMutation mutation;  ///< a fault, or nothing
};

/// Guarantees   recording never changes a value (unless `mutation` does) and never adds to the
///              autograd graph.
/// Errors       as RecordWriter.
class Recorder final : public Sink {
 public:
  explicit Recorder(RecorderOptions options);
  ~Recorder() override;
  void begin_step(int step) override;
  [[nodiscard]] at::Tensor on_activation(const Site& site, at::Tensor value) override;
  [[nodiscard]] at::Tensor on_activation_grad(const Site& site, at::Tensor gradient) override;
  void on_record(const Site& site, const at::Tensor& value) override;
  /// How often `mutation` returned something other than what it was given.
  [[nodiscard]] int mutations() const noexcept;
  /// Ends recording and hands over the records.
  [[nodiscard]] RankTrace finish();

 private:
  [[nodiscard]] at::Tensor mutate(const Site& site, at::Tensor value);
  void record(const Site& site, const at::Tensor& value);

  TapMutation mutation_;
  int mutations_ = 0;
  RecordWriter writer_;
};

}  // namespace isoshard
