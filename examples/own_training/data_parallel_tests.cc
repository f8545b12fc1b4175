// SPDX-License-Identifier: Apache-2.0
// Two steps of SGD under data parallelism, in floats: ranks add in another order than one process,
// so runs are judged by how far the reference moves when its weights move by one ulp.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/comm/tensor.h"
#include "core/mesh/layout.h"
#include "core/observe/sink.h"
#include "core/tensor/moved_by_an_ulp.h"
#include "harness/fault/collective_fault.h"
#include "harness/report/formats/report_formats.h"
#include "harness/run/run_spec.h"
#include "harness/verify/verify_runs.h"
#include "harness/world/subject.h"

using namespace isoshard;

constexpr std::int64_t kSamples = 8, kInputs = 6, kHidden = 16;

// loss = mean over all samples of (tanh(x w1) w2 - target)^2. Each rank has its part of the samples
// and all weights. `seed` above 0: the weights are moved by one ulp.
class Net final : public Subject {
 public:
  Net(Rank& rank, Sink& sink, std::uint64_t seed) : dp_(rank.comm()), sink_(sink), seed_(seed) {}

  void setup() override {
    w1_ = weight("w1", at::arange(kInputs * kHidden, at::kFloat).sin().view({kInputs, kHidden}));
    w2_ = weight("w2", at::arange(kHidden, at::kFloat).cos().view({kHidden, 1}));
    state();
  }
  void forward_backward(std::span<const Batch> batches) override {
    const Batch& own = batches[0];
    const at::Tensor hidden =
        tap(&sink_, "hidden", own.tensors.at("x").matmul(w1_).tanh(), 1.0, [] {
          return Layout{{kSamples, kHidden}, {shard(Axis::kDp, 0)}, {}, {}};
        });
    const at::Tensor error = hidden.matmul(w2_) - own.tensors.at("target");
    const at::Tensor loss = error.square().sum().div(kSamples);  // this rank's part of the mean
    loss.backward();
    at::Tensor sum = loss.detach().reshape({1});
    all_reduce(dp_, sum, Reduction::kSum, {Purpose::kLossReduce, Axis::kDp, {}}).wait();
    record(RecordKind::kScalar, "loss", sum);
  }
  void reduce_gradients() override {
    for (const at::Tensor& grad : {w1_.grad(), w2_.grad()})
      all_reduce(dp_, grad, Reduction::kSum, {Purpose::kGradReduce, Axis::kDp, {}}).wait();
    record(RecordKind::kGrad, "w1", w1_.grad());
    record(RecordKind::kGrad, "w2", w2_.grad());
  }
  void clip() override {}
  void step() override {
    constexpr double kLearningRate = 0.1;
    for (at::Tensor* w : {&w1_, &w2_})
      *w = (w->detach() - kLearningRate * w->grad()).requires_grad_(true);
  }
  void state() override {
    record(RecordKind::kParam, "w1", w1_);
    record(RecordKind::kParam, "w2", w2_);
  }

 private:
  [[nodiscard]] at::Tensor weight(const char* name, const at::Tensor& values) const {
    return (seed_ == 0 ? values : moved_by_an_ulp(values, seed_, name)).requires_grad_(true);
  }
  void record(RecordKind kind, const char* name, const at::Tensor& value) {
    sink_.on_record({kind, name, replicated(value.sizes().vec()), 1.0}, value.detach());
  }

  Communicator& dp_;
  Sink& sink_;
  std::uint64_t seed_;
  at::Tensor w1_, w2_;
};

// Two steps on `dp` ranks, each with other samples.
RunSpec run_on(int dp, std::uint64_t seed = 0) {
  RunSpec run{.name = "dp" + std::to_string(dp), .mesh = MeshShape({{Axis::kDp, dp}}), .steps = 2};
  run.make = [seed](Rank& rank, Sink& sink) { return std::make_unique<Net>(rank, sink, seed); };
  run.batches = [dp](int rank, int step) {
    const at::Tensor x = at::arange(kSamples * kInputs, at::kFloat).add(7 * step).cos();
    const auto part = [&](const at::Tensor& all) { return all.chunk(dp, 0)[std::size_t(rank)]; };
    Batch batch{{{"x", part(x.view({kSamples, kInputs}))},
                 {"target", part(at::arange(kSamples, at::kFloat).sin().view({kSamples, 1}))}},
                {}};
    const std::int64_t count = kSamples / dp;
    for (std::int64_t i = 0; i < count; ++i)
      batch.sample_ids.push_back(step * kSamples + rank * count + i);
    return std::vector<Batch>{batch};
  };
  return run;
}

RunPlan plan(std::vector<RunSpec> runs) {
  return {.reference = run_on(1),
          .perturbed = {run_on(1, 1), run_on(1, 2), run_on(1, 3)},
          .runs = std::move(runs)};
}

TEST(DataParallel, ConformsOnTwoAndFourRanks) {
  const Report report = verify_runs(plan({run_on(2), run_on(4)}));

  EXPECT_EQ(report.exit_code, kExitConforms) << text_of(report);
}

TEST(DataParallel, DivergesWithoutTheSumOfGradients) {
  RunPlan wrong = plan({run_on(2)});
  wrong.fault = {"lost_sum", skip_calls(Purpose::kGradReduce, Axis::kDp)};

  const Report report = verify_runs(wrong);

  EXPECT_EQ(report.exit_code, kExitDiverges) << text_of(report);
}
