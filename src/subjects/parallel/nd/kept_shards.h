// SPDX-License-Identifier: Apache-2.0
/// FSDP2 without resharding after forward, as a pipeline needs it: parameters stay gathered over
/// all micro-batches of a step.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "subjects/parallel/data_parallel.h"
#include "subjects/parallel/fsdp/dim_shards.h"
#include "subjects/parallel/fsdp/fsdp_group.h"

namespace isoshard {

/// Every rank keeps its rows of each parameter (dim0_shards), gathers all parameters when the first
/// micro-batch of a step needs them, and adds up the gradients of whole parameters over the
/// micro-batches, in the reduce dtype. After the last one they are averaged, block by block, and
/// the gathered parameters are given back.
///
/// Ranks        collective over the shards: one all-gather a block and step (param_gather) and one
///              reduce-scatter (grad_reduce); then one all-reduce over replicas, if there are any.
/// Source       torch/distributed/fsdp/_fully_shard with reshard_after_forward=False and
///              set_requires_gradient_sync only in the last backward, as torchtitan's pipelines
///              have it (_fsdp_param.py: accumulate_unsharded_grad_if_needed).
class KeptShards final : public DataParallel {
 public:
  KeptShards(std::optional<Dtype> reduce_dtype, const ShardGroups& groups,
             GradAverage average = GradAverage::kInCollective)
      : reduce_dtype_(reduce_dtype), average_(average), groups_(groups) {}
  [[nodiscard]] bool takes_frozen() const noexcept override { return true; }
  void setup(DataParallelSetup setup) override;
  void clear_gradients() override;
  [[nodiscard]] const NamedTensors& before_forward() override;
  void before_backward(bool reduces) override { (void)reduces; }
  void after_backward(bool reduces, bool is_last) override;
  void finish() override;
  [[nodiscard]] AccumulatedGradients accumulated() const override { return {sums_, false}; }
  [[nodiscard]] Layout accumulated_layout(std::string_view name) const override {
    return place_of(name).layout;
  }
  [[nodiscard]] const NamedTensors& held() const override;
  [[nodiscard]] Layout held_layout(std::string_view name) const override;
  [[nodiscard]] Layout read_layout(std::string_view name) const override;
  [[nodiscard]] NamedTensors& masters() override { return masters_; }
  [[nodiscard]] NamedTensors gradients() override { return gradients_; }
  [[nodiscard]] Layout piece_layout(std::string_view name) const override {
    return held_layout(name);
  }
  [[nodiscard]] bool is_cut_over_dp() const noexcept override { return groups_.shards->size() > 1; }
  void publish() override { held_.clear(); }

 private:
  struct Place {
    Layout layout;  ///< of the parameter as forward reads it
    Shape shape;
    DimShards shards;
    ParamClass param_class = ParamClass::kMatrix;
  };
  [[nodiscard]] const Place& place_of(std::string_view name) const;
  /// This rank's rows, of a frozen parameter, too.
  [[nodiscard]] const at::Tensor& shard_of(const std::string& name) const;
  void gather(const std::vector<std::string>& names);
  void reduce(const std::vector<std::string>& names);
  [[nodiscard]] std::vector<Segment> segments_of(const std::vector<std::string>& names) const;

  std::optional<Dtype> reduce_dtype_;
  GradAverage average_;
  ShardGroups groups_;
  Mesh* mesh_ = nullptr;
  at::ScalarType compute_ = at::kFloat, master_ = at::kFloat;
  std::map<std::string, Place, std::less<>> places_;
  std::map<std::string, std::vector<std::string>, std::less<>> blocks_;
  std::map<std::string, std::vector<std::string>, std::less<>> trained_;  ///< of blocks_
  NamedTensors masters_, gradients_;
  NamedTensors frozen_;  ///< shards, in the dtype that forward reads
  NamedTensors whole_;   ///< leaves; empty between steps
  NamedTensors sums_;
  mutable NamedTensors held_;
};

}  // namespace isoshard
