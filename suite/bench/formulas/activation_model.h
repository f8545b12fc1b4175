// SPDX-License-Identifier: Apache-2.0
/// What a rank keeps for backward, by formula.
#pragma once
#include <vector>

#include "fixtures/cases/case.h"
#include "subjects/model/training_pass.h"

namespace isoshard {

/// All in bytes, of one rank.
struct ActivationBytes {
  double kept = 0;  ///< when most are there: all layers and the head's input, without logits
  double logits = 0;
  double loss_blocks = 0;  ///< of the loss's backward, beside the logits
  double head_weight_gradient = 0;
  double head_gradients = 0;  ///< of the head's weight and input, while the logits are there
  double layer_backward = 0;  ///< gradients inside a layer, at most
  /// Of an embedding that is the head, too: both gradients lie beside their sum.
  double tied_gradients = 0;
  double last_layer = 0;  ///< what is left of activations when the last weights' gradients come
};

/// `sections`: the parts of the model that the rank has, empty for all of it. `in_flight`: forward
/// passes of a section that are alive at once.
[[nodiscard]] ActivationBytes activation_bytes(const Case& c,
                                               const std::vector<ModelSection>& sections,
                                               int in_flight);

}  // namespace isoshard
