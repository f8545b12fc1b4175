// SPDX-License-Identifier: Apache-2.0
/// Megatron-Core over dp: gradients are added up in fp32 in one contiguous buffer, reduced bucket
/// by bucket, and stepped by every rank or, with the distributed optimizer, by the rank whose part
/// of the bucket they are.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "subjects/parallel/data_parallel.h"
#include "subjects/parallel/megatron/fused_layers.h"
#include "subjects/parallel/megatron/gradient_buffer.h"
#include "subjects/settings/settings.h"

namespace isoshard {

/// Main gradients: of every parameter, zeros at first, to which each micro-batch's gradient is
/// added (fp64 for fp64 parameters, else fp32). Reduced in that dtype: all-reduced, or with the
/// distributed optimizer reduce-scattered, so that a dp rank has the averages of its part of each
/// bucket. It then steps the masters of that part, writes them into the parameters' bucket of the
/// same shape, and gathers the others' parts (param_gather).
///
/// Fused layers are stored as one parameter, which forward reads under each of their names;
/// masters, gradients and what is held are given under the names of the single ones, as copies.
///
/// Source   Megatron-Core 0.19, distributed/param_and_grad_buffer.py,
///          optimizer/distrib_optimizer.py (average_in_collective).
class MainGradients final : public DataParallel {
 public:
  enum class Steps : std::uint8_t { kEverywhere, kDistributed };
  explicit MainGradients(Steps steps, std::vector<FusedLayers> fused = {},
                         GradAverage average = GradAverage::kInCollective)
      : steps_(steps), fused_(std::move(fused)), average_(average) {}
  [[nodiscard]] bool takes_frozen() const noexcept override { return true; }
  /// Errors   UsageError where only some of what is one tensor is frozen.
  void setup(DataParallelSetup setup) override;
  void clear_gradients() override;
  [[nodiscard]] const NamedTensors& before_forward() override { return read_; }
  void before_backward(bool /*reduces*/) override {}
  void after_backward(bool reduces, bool is_last) override;
  void finish() override {}
  [[nodiscard]] AccumulatedGradients accumulated() const override;
  [[nodiscard]] const NamedTensors& held() const override { return held_; }
  [[nodiscard]] Layout held_layout(std::string_view name) const override {
    return places_.find(name)->second.layout;
  }
  [[nodiscard]] at::Tensor held_in(std::string_view name, const at::Tensor& read) const override;
  [[nodiscard]] NamedTensors& masters() override { return masters_; }
  [[nodiscard]] NamedTensors gradients() override;
  [[nodiscard]] Layout piece_layout(std::string_view name) const override;
  [[nodiscard]] bool is_cut_over_dp() const noexcept override {
    return steps_ == Steps::kDistributed && dp_ > 1;
  }
  void publish() override;

 private:
  /// A parameter, its place in what is stored, and what this rank steps of it.
  struct Place {
    Layout layout;
    Shape shape;
    std::size_t stored = 0;
    std::vector<StoredRun> runs;
    std::vector<Range> own;
  };
  /// A leaf that requires grad, and its main gradient in a bucket; a frozen one has none.
  struct Stored {
    at::Tensor parameter, gradient;
  };
  struct Bucket {
    at::Tensor gradients, parameters;  ///< flat; parameters with the distributed optimizer only
    std::vector<Segment> segments;
    [[nodiscard]] at::Tensor part(const at::Tensor& flat, int dp, int dp_rank) const;
  };
  void add_bucket(const BufferBucket& layout, const std::vector<StoredParameter>& stored,
                  std::vector<HeldParameter>& parameters);
  void add_frozen(const StoredParameter& unit, std::vector<HeldParameter>& parameters);
  [[nodiscard]] bool is_frozen(const Place& place) const {
    return !stored_[place.stored].gradient.defined();
  }
  void reduce();
  void refresh_held();
  /// A parameter out of a stored tensor: a view where it is all of it.
  [[nodiscard]] at::Tensor whole_of(const at::Tensor& stored, const Place& place) const;
  [[nodiscard]] at::Tensor piece_of(const at::Tensor& whole, const Place& place) const;

  Steps steps_;
  std::vector<FusedLayers> fused_;
  GradAverage average_;
  Mesh* mesh_ = nullptr;
  int dp_ = 1, dp_rank_ = 0;
  at::ScalarType master_type_ = at::kFloat, gradient_type_ = at::kFloat;
  std::vector<Bucket> buckets_;
  std::vector<Stored> stored_;
  std::map<std::string, Place, std::less<>> places_;
  NamedTensors read_, held_, masters_;
};

}  // namespace isoshard
