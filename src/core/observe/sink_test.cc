// SPDX-License-Identifier: Apache-2.0
// What a tap sends to its sink and returns, and that no hook keeps its tensor alive.
#include "core/observe/sink.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace isoshard {
namespace {

using ::testing::ElementsAre;

/// Writes down every visit; multiplies what it passes on by the two factors.
class RecordingSink : public Sink {
 public:
  struct Visit {
    Site site;
    at::Tensor value;
  };
  void begin_step(int step) override { steps.push_back(step); }
  [[nodiscard]] at::Tensor on_activation(const Site& site, at::Tensor value) override {
    visits.push_back({site, value.detach().clone()});
    return activation_factor == 1.0 ? value : value * activation_factor;
  }
  [[nodiscard]] at::Tensor on_activation_grad(const Site& site, at::Tensor gradient) override {
    visits.push_back({site, gradient.clone()});
    return gradient_factor == 1.0 ? gradient : gradient * gradient_factor;
  }
  void on_record(const Site& site, const at::Tensor& value) override {
    visits.push_back({site, value.clone()});
  }

  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const Visit& visit : visits)
      out.push_back(std::string(name_of(visit.site.kind)) + " " + visit.site.name);
    return out;
  }

  std::vector<Visit> visits;
  std::vector<int> steps;
  double activation_factor = 1.0;
  double gradient_factor = 1.0;
};

at::Tensor leaf(std::vector<double> values) {
  return at::tensor(values, at::kDouble).requires_grad_(true);
}

const Layout kLayout = [] {
  Layout layout = replicated({6});
  layout.placements = {shard(Axis::kTp, 0)};
  return layout;
}();

TEST(Tap, WithoutASinkNothingIsComputed) {
  const at::Tensor x = leaf({1, 2, 3});

  const at::Tensor y = tap(nullptr, "a", x, 0.5,
                           [&]() -> Layout { throw std::logic_error("layout was asked for"); });

  EXPECT_TRUE(y.is_same(x));
}

TEST(Tap, RecordsTheActivationAndThenItsGradient) {
  RecordingSink sink;
  const at::Tensor x = leaf({1, 2, 3});

  const at::Tensor y = tap(&sink, "model.norm", x * 2, 0.25, [&] { return kLayout; });
  EXPECT_THAT(sink.names(), ElementsAre("activation model.norm"));
  (y * y).sum().backward();

  ASSERT_THAT(sink.names(), ElementsAre("activation model.norm", "activation_grad model.norm"));
  EXPECT_TRUE(sink.visits[0].value.equal(at::tensor({2.0, 4.0, 6.0}, at::kDouble)));
  EXPECT_TRUE(sink.visits[1].value.equal(at::tensor({4.0, 8.0, 12.0}, at::kDouble)));
  EXPECT_EQ(sink.visits[0].site.grad_scale, 1.0);
  EXPECT_EQ(sink.visits[1].site.grad_scale, 0.25);
  EXPECT_EQ(sink.visits[0].site.layout, kLayout);
  EXPECT_EQ(sink.visits[1].site.layout, kLayout);
  EXPECT_TRUE(x.grad().equal(at::tensor({8.0, 16.0, 24.0}, at::kDouble)));
}

TEST(Tap, GradientsArriveInTheOrderOfBackward) {
  RecordingSink sink;
  const at::Tensor x = leaf({1, 2});

  const at::Tensor a = tap(&sink, "a", x * 3, 1.0, [] { return replicated({2}); });
  const at::Tensor b = tap(&sink, "b", a * 5, 1.0, [] { return replicated({2}); });
  b.sum().backward();

  EXPECT_THAT(sink.names(), ElementsAre("activation a", "activation b", "activation_grad b",
                                        "activation_grad a"));
}

TEST(Tap, TheGradientIsSummedOverAllUsesAndSeenOnce) {
  RecordingSink sink;
  const at::Tensor x = leaf({1, 2});

  const at::Tensor a = tap(&sink, "a", x * 1, 1.0, [] { return replicated({2}); });
  (a * 2 + a * 5).sum().backward();

  ASSERT_EQ(sink.visits.size(), 2U);
  EXPECT_TRUE(sink.visits[1].value.equal(at::tensor({7.0, 7.0}, at::kDouble)));
}

TEST(Tap, WhatTheSinkReturnsFlowsOnForwardAndBackward) {
  RecordingSink sink;
  sink.activation_factor = 10.0;
  sink.gradient_factor = 100.0;
  const at::Tensor x = leaf({1, 2});

  const at::Tensor y = tap(&sink, "a", x, 1.0, [] { return replicated({2}); });
  y.sum().backward();

  EXPECT_TRUE(y.detach().equal(at::tensor({10.0, 20.0}, at::kDouble)));
  EXPECT_TRUE(x.grad().equal(at::tensor({1000.0, 1000.0}, at::kDouble)));
}

TEST(Tap, WithoutGradientsOnlyTheForwardValueIsRecorded) {
  RecordingSink sink;
  const at::Tensor constant = at::ones({2}, at::kDouble);
  const at::Tensor x = leaf({1, 2});

  (void)tap(&sink, "constant", constant, 1.0, [] { return replicated({2}); });
  {
    const at::NoGradGuard no_grad;
    (void)tap(&sink, "evaluation", x * 2, 1.0, [] { return replicated({2}); });
  }
  const at::Tensor integers = tap(&sink, "ids", at::arange(4), 1.0, [] { return replicated({4}); });

  EXPECT_THAT(sink.names(),
              ElementsAre("activation constant", "activation evaluation", "activation ids"));
  EXPECT_EQ(integers.scalar_type(), at::kLong);
}

TEST(Tap, AHookDoesNotKeepItsTensorAlive) {
  RecordingSink sink;
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> never_run(
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>{});
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> run = never_run;
  {
    const at::Tensor x = leaf({1, 2});
    const at::Tensor a = tap(&sink, "a", x * 2, 1.0, [] { return replicated({2}); });
    const at::Tensor b = tap(&sink, "b", x * 2, 1.0, [] { return replicated({2}); });
    never_run =
        c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(a.getIntrusivePtr());
    run = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(b.getIntrusivePtr());
    b.sum().backward();
    ASSERT_FALSE(never_run.expired());
  }

  EXPECT_TRUE(never_run.expired());
  EXPECT_TRUE(run.expired());
}

TEST(RecordKindNames, AreTheDocumentedOnes) {
  EXPECT_EQ(name_of(RecordKind::kParam), "param");
  EXPECT_EQ(name_of(RecordKind::kActivationGrad), "activation_grad");
  EXPECT_EQ(name_of(RecordKind::kDataId), "data_id");
  EXPECT_EQ(name_of(RecordKind::kMask), "mask");
}

}  // namespace
}  // namespace isoshard
