// SPDX-License-Identifier: Apache-2.0
/// ZeRO 1 and 2: every dp rank holds all parameters, and masters and optimizer state of its own
/// part only; with stage 2 gradients, too.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "subjects/parallel/data_parallel.h"
#include "subjects/parallel/ddp/gradient_reducer.h"
#include "subjects/parallel/ddp/gradient_sums.h"
#include "subjects/parallel/zero/owner_reducer.h"
#include "subjects/parallel/zero/partition.h"

namespace isoshard {

/// Held parameters are views of one flat buffer in model order (ZeroPartition). Gradients are
/// averaged over dp bucket by bucket: with stage 1 the sums of all micro-batches, for every rank
/// (GradientReducer); with stage 2 those of each micro-batch, for the ranks that step them
/// (OwnerReducer). A rank steps the masters of its part, writes them into the buffer and gathers
/// the others' parts (param_gather).
///
/// Source   DeepSpeed, runtime/zero/stage_1_and_2.py.
class ZeroOptimizerShards final : public DataParallel {
 public:
  /// Errors   UsageError for another stage than 1 and 2.
  /// `accumulate_dtype`: what micro-batches are added up in, where it is not the parameters' dtype.
  explicit ZeroOptimizerShards(int stage, GradAverage average = GradAverage::kInCollective,
                               std::optional<Dtype> accumulate_dtype = {});
  void setup(DataParallelSetup setup) override;
  void clear_gradients() override;
  [[nodiscard]] const NamedTensors& before_forward() override { return held_; }
  void before_backward(bool reduces) override;
  void after_backward(bool reduces, bool is_last) override;
  void finish() override;
  [[nodiscard]] AccumulatedGradients accumulated() const override;
  [[nodiscard]] const NamedTensors& held() const override { return held_; }
  [[nodiscard]] Layout held_layout(std::string_view name) const override {
    return places_.find(name)->second.layout;
  }
  [[nodiscard]] NamedTensors& masters() override { return masters_; }
  [[nodiscard]] NamedTensors gradients() override;
  [[nodiscard]] Layout piece_layout(std::string_view name) const override;
  [[nodiscard]] bool is_cut_over_dp() const noexcept override {
    return mesh_->degree(Axis::kDp) > 1;
  }
  void publish() override;

 private:
  struct Place {
    Layout layout;
    Shape shape;
    std::size_t index = 0;  ///< in model order
  };
  [[nodiscard]] const Range& own_run(const Place& place) const;
  /// The own part of the flattened `whole`; the tensor itself where that is all of it.
  [[nodiscard]] at::Tensor piece_of(const at::Tensor& whole, const Place& place) const;

  int stage_;
  GradAverage average_;
  std::optional<Dtype> accumulate_dtype_;
  GradientSums sums_;  ///< with stage 1
  Mesh* mesh_ = nullptr;
  at::ScalarType master_type_ = at::kFloat;
  ZeroPartition partition_;
  std::map<std::string, Place, std::less<>> places_;
  std::vector<Segment> segments_;  ///< of the flat buffer
  at::Tensor flat_;
  NamedTensors held_, masters_;
  std::unique_ptr<GradientReducer> reducer_;     ///< stage 1
  std::unique_ptr<OwnerReducer> owner_reducer_;  ///< stage 2
  bool is_reducing_ = false;
};

}  // namespace isoshard
