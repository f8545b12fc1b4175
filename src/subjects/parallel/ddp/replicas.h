// SPDX-License-Identifier: Apache-2.0
/// Every dp rank holds and steps everything: PyTorch DDP, and the single process.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "subjects/parallel/data_parallel.h"
#include "subjects/parallel/ddp/gradient_reducer.h"
#include "subjects/parallel/ddp/gradient_sums.h"

namespace isoshard {

/// Gradients are averaged in buckets while backward runs (GradientReducer); pieces are whole
/// parameters.
class Replicas final : public DataParallel {
 public:
  enum class Reduces : std::uint8_t { kNever, kOverDp, kOverDpInRebuiltBuckets };
  /// `accumulate_dtype`: what micro-batches are added up in, where it is not the parameters' dtype.
  explicit Replicas(Reduces reduces, GradAverage average = GradAverage::kInCollective,
                    std::optional<Dtype> accumulate_dtype = {})
      : reduces_(reduces), average_(average), sums_(accumulate_dtype) {}
  void setup(DataParallelSetup setup) override;
  void clear_gradients() override;
  [[nodiscard]] const NamedTensors& before_forward() override { return held_; }
  void before_backward(bool reduces) override;
  void after_backward(bool reduces, bool is_last) override;
  void finish() override;
  [[nodiscard]] AccumulatedGradients accumulated() const override { return {sums_.of(held_)}; }
  [[nodiscard]] const NamedTensors& held() const override { return held_; }
  [[nodiscard]] Layout held_layout(std::string_view name) const override {
    return layouts_.find(name)->second;
  }
  [[nodiscard]] NamedTensors& masters() override {
    return master_dtype_.has_value() ? masters_ : held_;
  }
  [[nodiscard]] NamedTensors gradients() override;
  [[nodiscard]] Layout piece_layout(std::string_view name) const override {
    return held_layout(name);
  }
  [[nodiscard]] bool is_cut_over_dp() const noexcept override { return false; }
  void publish() override;

 private:
  Reduces reduces_;
  GradAverage average_;
  GradientSums sums_;
  std::optional<Dtype> master_dtype_;
  NamedTensors held_, masters_;
  std::map<std::string, Layout, std::less<>> layouts_;
  std::unique_ptr<GradientReducer> reducer_;
  bool is_reducing_ = false;  ///< a reduction has started that finish() must end
};

}  // namespace isoshard
