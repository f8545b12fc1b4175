// SPDX-License-Identifier: Apache-2.0
// The hook behind autograd's accumulation.
#include "subjects/parallel/ddp/accumulated_hook.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

namespace isoshard {
namespace {

class AccumulatedHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit AccumulatedHook(std::function<void(const at::Tensor&)> callback)
      : callback_(std::move(callback)) {}
  void operator()(const torch::autograd::Variable& leaf) override { callback_(leaf); }

 private:
  std::function<void(const at::Tensor&)> callback_;
};

}  // namespace

void set_accumulated_hook(const at::Tensor& leaf,
                          std::function<void(const at::Tensor& leaf)> callback) {
  torch::autograd::impl::set_post_acc_grad_hooks(
      leaf, std::make_unique<AccumulatedHook>(std::move(callback)));
}

}  // namespace isoshard
