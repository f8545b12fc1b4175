// SPDX-License-Identifier: Apache-2.0
/// A backward pass in two halves: the gradient of the input first, those of the weights later.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

namespace isoshard {

/// A node of the graph *leads to the input* if the input's gradient is made of its result. Where
/// one of these nodes also leads to a weight, the graph is cut: the first half runs the nodes that
/// lead to the input, and keeps what comes into each node of the cut. The second half starts there
/// and runs the others. A node of the cut runs in both halves, and makes one of its results in
/// each. So both halves together compute what one pass does, from the same numbers by the same
/// functions: gradients have the same bits.
///
/// Requires     input_gradient before weight_gradients, each once.
/// Guarantees   a hook of a tensor is called once, in the half that its gradient is made in.
///              Between the halves live the tensors that nodes of the cut and the nodes after them
///              saved; the others are let go of.
/// Source       torch 2.11, distributed/pipelining/_backward.py: stage_backward_input and
///              stage_backward_weight cut at the same places.
///
///     SplitBackward halves;
///     const at::Tensor gradient = halves.input_gradient(result, gradient_of_result, input);
///     halves.weight_gradients();
class SplitBackward {
 public:
  SplitBackward();
  SplitBackward(SplitBackward&&) noexcept;
  SplitBackward& operator=(SplitBackward&&) noexcept;
  ~SplitBackward();
  /// The gradient of `input`, a leaf. No gradient of another leaf changes.
  /// Errors   NotBuiltError where a function that is not torch's makes gradients of weights and of
  ///          its input: it would run twice, with its collectives; or where a leaf is read twice.
  [[nodiscard]] at::Tensor input_gradient(at::Tensor result, const at::Tensor& gradient,
                                          const at::Tensor& input);
  /// Adds the gradients of all other leaves to their grad().
  void weight_gradients();

 private:
  struct Cut;
  std::vector<Cut> cuts_;
};

}  // namespace isoshard
