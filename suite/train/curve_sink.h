// SPDX-License-Identifier: Apache-2.0
/// What a rank keeps of a long training run: its numbers, now and then digests of what must be
/// equal on other ranks, and, if asked, the first value that is no number.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/observe/sink.h"
#include "harness/curve/curve.h"
#include "harness/recorder/recorder.h"

namespace isoshard {

/// The first tensor of a rank, in its execution order, that holds NaN or an infinity.
struct NonFiniteTensor {
  std::int64_t order = 0;  ///< how many were seen before it
  std::string name;        ///< in words: "forward at model.norm (step 3)"
  std::int64_t nan = 0, infinite = 0, numel = 0;
};

struct CurveSinkOptions {
  MeshShape mesh;
  int rank = 0;
  int num_steps = 1;
  /// Steps between two digests of parameters and optimizer states; the last step always has them.
  int check_interval = 10;
  /// From this step on every tensor is searched for NaN and infinities; -1: never.
  int watch_from = -1;
};

/// What one rank posts.
struct RankCurve {
  std::vector<CurveStep> steps;
  RankTrace copies;  ///< digests only
  std::optional<NonFiniteTensor> first_non_finite;

  [[nodiscard]] std::vector<std::byte> serialize() const;
  [[nodiscard]] static RankCurve deserialize(std::span<const std::byte> bytes);
};

/// Guarantees   values pass unchanged; no tensor is kept.
class CurveSink final : public Sink {
 public:
  explicit CurveSink(CurveSinkOptions options);
  void begin_step(int step) override;
  [[nodiscard]] at::Tensor on_activation(const Site& site, at::Tensor value) override;
  [[nodiscard]] at::Tensor on_activation_grad(const Site& site, at::Tensor gradient) override;
  void on_record(const Site& site, const at::Tensor& value) override;

  /// The step at hand; its loss and norm are what was recorded of it so far.
  [[nodiscard]] CurveStep& current();
  [[nodiscard]] RankCurve finish();

 private:
  [[nodiscard]] bool is_checked(int step) const noexcept;
  void search(const Site& site, const at::Tensor& value);

  CurveSinkOptions options_;
  Recorder copies_;
  RankCurve curve_;
  int step_ = 0;
  bool is_skipped_ = false;  ///< the step under way, because gradients overflowed
  std::int64_t num_searched_ = 0;
};

}  // namespace isoshard
