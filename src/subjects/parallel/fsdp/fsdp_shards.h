// SPDX-License-Identifier: Apache-2.0
/// FSDP2: every dp rank keeps its rows of each parameter and gathers a block's parameters only
/// while they are used.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "subjects/parallel/data_parallel.h"
#include "subjects/parallel/fsdp/fsdp_group.h"

namespace isoshard {

/// Block: a decoder layer. Its parameters are gathered when forward enters it, given back when it
/// leaves, gathered again when backward comes to it, and given back when its gradients are there.
/// What is in no layer (embedding, final norm, head) is the root group: gathered before forward,
/// given back by backward.
///
/// Gradients are averaged over dp in every micro-batch, block by block, and added up as shards in
/// the dtype of masters, so `reduces` changes nothing (FSDP2's default,
/// set_requires_gradient_sync(True)).
/// Requires     the model announces its layers (Strategy::enter_block, leave_block): see
///              FsdpStrategy.
/// Guarantees   gathered parameters never take more than the root group and the largest block
///              (gathered().peak); a layer that backward computes again is gathered once for that.
/// Source       torch/distributed/fsdp/_fully_shard, reshard_after_forward=True for layers, and for
///              the root, which backward needs first, False: fully_shard's defaults. No
///              prefetching: a call is done when it returns.
class FsdpShards final : public DataParallel {
 public:
  /// `groups`: without them, parameters are cut over the mesh's dp.
  explicit FsdpShards(std::optional<Dtype> reduce_dtype = {}, const ShardGroups& groups = {},
                      GradAverage average = GradAverage::kInCollective)
      : reduce_dtype_(reduce_dtype), average_(average), groups_(groups) {}
  [[nodiscard]] bool takes_frozen() const noexcept override { return true; }
  void setup(DataParallelSetup setup) override;
  void clear_gradients() override;
  [[nodiscard]] const NamedTensors& before_forward() override;
  void before_backward(bool reduces) override;
  void after_backward(bool reduces, bool is_last) override;
  void finish() override {}
  [[nodiscard]] AccumulatedGradients accumulated() const override {
    return {gradients_of(masters_), /*is_reduced=*/true};
  }
  [[nodiscard]] const NamedTensors& held() const override;
  [[nodiscard]] Layout held_layout(std::string_view name) const override;
  /// What is gathered, in the shards of all dp ranks.
  [[nodiscard]] Layout read_layout(std::string_view name) const override;
  [[nodiscard]] NamedTensors& masters() override { return masters_; }
  [[nodiscard]] NamedTensors gradients() override;
  [[nodiscard]] Layout piece_layout(std::string_view name) const override {
    return held_layout(name);
  }
  [[nodiscard]] bool is_cut_over_dp() const noexcept override { return groups_.shards->size() > 1; }
  void publish() override {}

  /// Errors   UsageError for a module that has no parameters.
  void enter_block(std::string_view module);
  [[nodiscard]] at::Tensor leave_block(std::string_view module, at::Tensor output);
  [[nodiscard]] const GatheredBytes& gathered() const noexcept { return gathered_bytes_; }

 private:
  struct Place {
    Layout layout;  ///< of the parameter as forward reads it
    Shape shape;
    std::vector<Range> runs;  ///< by dp rank
  };
  struct Block {
    std::unique_ptr<FsdpGroup> group;
    FsdpGroup::Pass open_pass = 0;
  };
  [[nodiscard]] Block& block(std::string_view module);

  [[nodiscard]] Layout layout_of_shard(const Place& place, const Range& run) const;

  std::optional<Dtype> reduce_dtype_;
  GradAverage average_;
  ShardGroups groups_;
  std::function<void(std::string_view name, const at::Tensor& read)> on_read_;
  Mesh* mesh_ = nullptr;
  at::ScalarType compute_ = at::kFloat, master_ = at::kFloat;
  std::map<std::string, Place, std::less<>> places_;
  NamedTensors masters_;
  NamedTensors frozen_;  ///< shards, in the dtype that forward reads
  /// Masters as forward reads them, for the record; they are made at the first request.
  mutable NamedTensors held_;
  NamedTensors whole_;  ///< what is gathered now
  GatheredBytes gathered_bytes_;
  std::map<std::string, Block, std::less<>> blocks_;  ///< the root group under ""
  bool is_in_backward_ = false;
};

}  // namespace isoshard
