// SPDX-License-Identifier: Apache-2.0
/// Data-parallel gradient averaging in buckets, started while backward still runs.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/param_class.h"
#include "core/comm/communicator.h"
#include "subjects/settings/settings.h"

namespace isoshard {

/// A parameter of this rank whose gradient is averaged.
struct ReducedParameter {
  std::string name;
  ParamClass param_class = ParamClass::kMatrix;
  at::Tensor tensor;  ///< leaf that requires grad
};

/// The largest size of the first bucket, which is small so that communication starts early.
inline constexpr std::int64_t kFirstBucketBytes = 1 << 20;

/// Which parameters share a bucket: indices into the parameter list, buckets in the order in which
/// they are reduced.
///
/// Walks the parameters from the last to the first, one open bucket per dtype; a bucket that has
/// reached its limit is closed. The limit is `bucket_bytes`, for the first bucket at most
/// kFirstBucketBytes.
/// Source   PyTorch DDP, compute_bucket_assignment_by_size
///          (torch/csrc/distributed/c10d/reducer.cpp).
[[nodiscard]] std::vector<std::vector<std::size_t>> bucket_assignment(
    const std::vector<ReducedParameter>& parameters, std::int64_t bucket_bytes);

/// The same of parameters in the order in which their gradients become ready: walked from the first
/// to the last, and buckets stay in that order.
[[nodiscard]] std::vector<std::vector<std::size_t>> bucket_assignment_in_order(
    const std::vector<ReducedParameter>& parameters, std::span<const std::size_t> order,
    std::int64_t bucket_bytes);

/// Averages gradients over the dp group.
///
/// Bucket: a flat buffer of one dtype that several gradients are packed into. Each leaf has a hook
/// that runs when backward has accumulated its gradient; the hook packs it, and as soon as the next
/// bucket in order is full its all-reduce starts. Buckets start in their fixed order and never in
/// the order of arrival, so that every rank makes the same sequence of calls.
///
/// Rebuilding: the first reduction takes the parameters from the last to the first, and writes down
/// the order in which rank 0's gradients became ready. Before the second one rank 0 broadcasts that
/// order (setup), and the buckets are rebuilt in it, once. Parameters without gradient come last.
/// Source   Reducer::rebuild_buckets, sync_bucket_indices (reducer.cpp).
///
/// Requires     arm() before the last backward of a step; backward without arm() only accumulates
///              (micro-batches).
/// Guarantees   after finish() every parameter's grad is a view of its bucket and holds the average
///              over the group. A parameter that got no gradient enters as zeros and gets one, so
///              that ranks on which it was unused agree with the others.
/// Ranks        collective over `dp`; parameters in equal order, with equal shapes and dtypes.
/// Determinism  as the communicator's reduction order; a group of one leaves the bits as they are.
///
///     GradientReducer reducer(parameters, dp, 25 << 20);
///     reducer.arm();
///     loss.backward();
///     reducer.finish();
class GradientReducer {
 public:
  enum class Buckets : std::uint8_t { kFixed, kRebuiltOnce };
  /// What is reduced of a parameter, in its dtype, in place of its gradient (which may be
  /// undefined, and so may be the result).
  using Instead = std::function<at::Tensor(const ReducedParameter&, const at::Tensor& gradient)>;
  GradientReducer(std::vector<ReducedParameter> parameters, Communicator& dp,
                  std::int64_t bucket_bytes, Buckets buckets = Buckets::kFixed,
                  GradAverage average = GradAverage::kInCollective, Instead instead = {});
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  void arm();
  /// Starts what has not started (buckets with unused parameters), waits for all, and puts the
  /// averages into the parameters.
  void finish();
  [[nodiscard]] std::size_t num_buckets() const noexcept;
  /// Names of the parameters of each bucket, in the order in which buckets are reduced: of the
  /// reduction under way, or the last one.
  [[nodiscard]] std::vector<std::vector<std::string>> bucket_names() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace isoshard
