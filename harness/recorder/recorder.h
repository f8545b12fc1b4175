// SPDX-License-Identifier: Apache-2.0
/// The sink at the end of a rank's chain: what passes goes to the record writer.
#pragma once
#include <memory>

#include "core/observe/sink.h"
#include "core/tensor/convert.h"
#include "harness/recorder/device_digest.h"
#include "harness/trace/record_writer.h"

namespace isoshard {

/// A tensor on a device is fetched to host memory to be compared and kept. But where a digest can
/// be made there (harness/recorder/device_digest.h), a tensor that the reference has, too, is left
/// there: its digest is that of the reference's bytes, which then stand for its own.
///
/// Guarantees   recording never changes a value and never adds to the autograd graph. What is
///              recorded does not depend on whether a tensor was fetched.
/// Errors       as RecordWriter and DeviceDigest.
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
  [[nodiscard]] HostTensor fetched(const Site& site, const at::Tensor& value);
  [[nodiscard]] DeviceDigest* digest_on(c10::DeviceType type);

  RecordWriter writer_;
  std::unique_ptr<DeviceDigest> digest_;  ///< on the type of device that was seen first
  c10::DeviceType seen_ = c10::DeviceType::CPU;
};

}  // namespace isoshard
