// SPDX-License-Identifier: Apache-2.0
// A tensor-parallel MLP of one's own, and how it is run.
#pragma once
#include <ATen/ATen.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/comm/tensor.h"
#include "core/mesh/layout.h"
#include "core/observe/sink.h"
#include "harness/run/run_spec.h"
#include "harness/world/subject.h"

namespace own {
using namespace isoshard;

// y = relu(x U) D, loss = sum(y): U is cut by columns, D by rows. All values are small integers.
struct Mlp final : Subject {
  Mlp(Rank& rank, Sink& sink) : tp_(rank.comm()), sink_(sink) {}
  void setup() override { up_ = weight(1), down_ = weight(0); }
  void forward_backward(std::span<const Batch> batches) override {
    const at::Tensor partial = batches[0].tensors.at("x").matmul(up_).relu().matmul(down_);
    at::Tensor sum = partial.detach().clone();
    all_reduce(tp_, sum, Reduction::kSum, {Purpose::kRowParallelForward, Axis::kTp, {}}).wait();
    at::Tensor y = partial + (sum - partial).detach();  // the sum forward, identity backward
    tap(&sink_, "mlp", y, 1.0, [] { return replicated({2, 8}); }).sum().backward();
  }
  void reduce_gradients() override { record("up", 1, up_.grad()), record("down", 0, down_.grad()); }
  void clip() override {}
  void step() override {}
  void state() override {}
  void record(const char* name, int dim, const at::Tensor& grad) {
    sink_.on_record({RecordKind::kGrad, name, {{8, 8}, {shard(Axis::kTp, dim)}, {}, {}}}, grad);
  }
  at::Tensor weight(int dim) const {
    const at::Tensor whole = at::arange(64, at::kFloat).remainder(7).sub(3).view({8, 8});
    return whole.chunk(tp_.size(), dim)[std::size_t(tp_.rank())].clone().requires_grad_(true);
  }
  Communicator& tp_;
  Sink& sink_;
  at::Tensor up_, down_;
};

// A run on `tp` ranks.
inline RunSpec mlp_run(int tp) {
  RunSpec run{.name = "mlp_tp" + std::to_string(tp), .mesh = MeshShape({{Axis::kTp, tp}})};
  run.make = [](Rank& rank, Sink& sink) { return std::make_unique<Mlp>(rank, sink); };
  const Batch batch{{{"x", at::arange(16, at::kFloat).view({2, 8})}}, {0, 1}};
  run.batches = [batch](int, int) { return std::vector<Batch>{batch}; };
  run.policy.level = Level::kExact;
  return run;
}

}  // namespace own
