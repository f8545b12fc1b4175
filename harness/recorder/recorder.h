// SPDX-License-Identifier: Apache-2.0
/// The sink at the end of a rank's chain: what passes goes to the record writer.
#pragma once
#include "core/observe/sink.h"
#include "core/tensor/convert.h"
#include "harness/trace/record_writer.h"

namespace isoshard {

/// Guarantees   recording never changes a value and never adds to the autograd graph.
/// Errors       as RecordWriter.
class Recorder final : public Sink {
 public:
  explicit Recorder(RecordOptions options);
  ~Recorder() override;
  void begin_step(int step) override;
  [[nodiscard]] at::Tensor on_activation(const Site& site, at::Tensor value) override;
  [[nodiscard]] at::Tensor on_activation_grad(const Site& site, at::Tensor gradient) override;
  void on_record(const Site& site, const at::Tensor& value) override;
  /// Ends recording and hands over the records.
  [[nodiscard]] RankTrace finish();

 private:
  void record(const Site& site, const at::Tensor& value);

  RecordWriter writer_;
};

}  // namespace isoshard
