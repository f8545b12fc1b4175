// SPDX-License-Identifier: Apache-2.0
/// The sink of a rank: compares what passes with the reference on the spot and keeps what is worth keeping.
#pragma once
#include <functional>
#include <map>
#include <memory>

#include "harness/trace/reference.h"
#include "observe/sink.h"

namespace isoshard {

enum class Keep : std::uint8_t { kNothing, kWhatDiffers, kEverything };

/// Replaces a value at a tap; returns it unchanged where the fault does not apply. Called before the value is recorded.
using TapMutation = std::function<at::Tensor(const Site& site, at::Tensor value)>;

struct RecorderOptions {
  MeshShape mesh;
  int rank = 0;
  const Reference* reference = nullptr;   ///< nullptr: nothing is compared
  Keep keep = Keep::kNothing;
  /// kWhatDiffers keeps a record if one of its parts differs in bits and exceeds its share of the perturbed tolerance
  /// (see compare/tolerance.h), or has no reference; scalars and ids are always kept.
  std::shared_ptr<Arena> arena;           ///< required unless kNothing
  TapMutation mutation;                   ///< a fault, or nothing
  /// Step and parameter names whose update is judged only where the reference's gradient is above its own response.
  bool mask_small_gradients = false;      ///< set for Adam-like optimizers
};

/// Guarantees   recording never changes a value (unless `mutation` does) and never adds to the autograd graph.
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
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace isoshard
