// SPDX-License-Identifier: Apache-2.0
/// Base of a data parallelism that changes some calls of another one and forwards everything else
/// to it.
#pragma once
#include <memory>
#include <string_view>
#include <utility>

#include "subjects/parallel/data_parallel.h"

namespace isoshard {

/// Forwards all.   Ranks, Errors   those of `inner`.
class WrappedDataParallel : public DataParallel {
 public:
  explicit WrappedDataParallel(std::unique_ptr<DataParallel> inner) : inner_(std::move(inner)) {}
  [[nodiscard]] bool takes_frozen() const noexcept override { return inner_->takes_frozen(); }
  void setup(DataParallelSetup setup) override { inner_->setup(std::move(setup)); }
  void clear_gradients() override { inner_->clear_gradients(); }
  [[nodiscard]] const NamedTensors& before_forward() override { return inner_->before_forward(); }
  void before_backward(bool reduces) override { inner_->before_backward(reduces); }
  void after_backward(bool reduces, bool is_last) override {
    inner_->after_backward(reduces, is_last);
  }
  void finish() override { inner_->finish(); }
  [[nodiscard]] AccumulatedGradients accumulated() const override { return inner_->accumulated(); }
  [[nodiscard]] Layout accumulated_layout(std::string_view name) const override {
    return inner_->accumulated_layout(name);
  }
  [[nodiscard]] const NamedTensors& held() const override { return inner_->held(); }
  [[nodiscard]] Layout held_layout(std::string_view name) const override {
    return inner_->held_layout(name);
  }
  [[nodiscard]] at::Tensor held_in(std::string_view name, const at::Tensor& read) const override {
    return inner_->held_in(name, read);
  }
  [[nodiscard]] Layout read_layout(std::string_view name) const override {
    return inner_->read_layout(name);
  }
  [[nodiscard]] NamedTensors& masters() override { return inner_->masters(); }
  [[nodiscard]] NamedTensors gradients() override { return inner_->gradients(); }
  [[nodiscard]] Layout piece_layout(std::string_view name) const override {
    return inner_->piece_layout(name);
  }
  [[nodiscard]] bool is_cut_over_dp() const noexcept override { return inner_->is_cut_over_dp(); }
  void publish() override { inner_->publish(); }

 protected:
  [[nodiscard]] DataParallel& inner() noexcept { return *inner_; }

 private:
  std::unique_ptr<DataParallel> inner_;
};

}  // namespace isoshard
