// SPDX-License-Identifier: Apache-2.0
/// A tensor-parallel MLP of one's own, held bit by bit to its own run in one process.
#include <ATen/ATen.h>

#include "core/comm/tensor.h"
#include "harness/run/run_subject.h"
#include "harness/testing/matchers.h"

using namespace isoshard;

/// y = relu(x U) D, loss = sum(y): U cut by columns, D by rows. Weights and inputs are small
/// integers, so every sum is exact.
class Mlp final : public Subject {
 public:
  Mlp(Rank& rank, Sink& sink, bool sums) : tp_(rank.comm()), sink_(sink), sums_(sums) {}
  void setup() override { up_ = weight("up", 1), down_ = weight("down", 0); }
  void forward_backward(std::span<const Batch> batches) override {
    const at::Tensor partial = batches[0].tensors.at("x").matmul(up_).relu().matmul(down_);
    at::Tensor sum = partial.detach().clone();
    if (sums_)
      all_reduce(tp_, sum, Reduction::kSum, {Purpose::kRowParallelForward, Axis::kTp, {}}).wait();
    at::Tensor y = partial + (sum - partial).detach();  // the sum forward, identity backward
    y = tap(&sink_, "mlp", y, 1.0, [] { return replicated({2, 8}); });
    y.sum().backward();
  }
  void reduce_gradients() override {
    sink_.on_record({RecordKind::kGrad, "up", layout(1), 1.0}, up_.grad());
    sink_.on_record({RecordKind::kGrad, "down", layout(0), 1.0}, down_.grad());
  }
  void clip() override {}
  void step() override {}
  void state() override {}

 private:
  [[nodiscard]] static Layout layout(int dim) {
    return {.global_shape = {8, 8}, .placements = {shard(Axis::kTp, dim)}};
  }
  at::Tensor weight(const char* name, int dim) {
    const at::Tensor whole = at::arange(64, at::kFloat).remainder(7).sub(3).view({8, 8});
    const at::Tensor local =
        whole.chunk(tp_.size(), dim)[static_cast<std::size_t>(tp_.rank())].clone().requires_grad_(
            true);
    sink_.on_record({RecordKind::kParam, name, layout(dim), 1.0}, local.detach());
    return local;
  }
  Communicator& tp_;
  Sink& sink_;
  bool sums_;
  at::Tensor up_, down_;
};

SubjectRun mlp_run(int tp, bool sums = true) {
  const auto make = [sums](Rank& rank, Sink& sink) {
    return std::make_unique<Mlp>(rank, sink, sums);
  };
  const auto batches = [](int, int) {
    return std::vector<Batch>{{{{"x", at::arange(16, at::kFloat).view({2, 8})}}, {0, 1}}};
  };
  return {.name = "mlp", .mesh = MeshShape({{Axis::kTp, tp}}), .make = make, .batches = batches};
}

TEST(OwnMlp, IsExactAndALostSumIsSeen) {
  const Reference reference = record_reference(mlp_run(1));
  EXPECT_THAT(run_subject(mlp_run(4), reference), conforms_to(reference, {.level = Level::kExact}));
  EXPECT_THAT(run_subject(mlp_run(4, false), reference),
              Not(conforms_to(reference, {.level = Level::kExact})));
}
