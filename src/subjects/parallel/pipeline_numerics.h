// SPDX-License-Identifier: Apache-2.0
/// The part of a declared arithmetic over pp: which layers run where.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "subjects/model/training_pass.h"

namespace isoshard {

/// A micro-batch goes through the stages in order, and its gradient back. A rank adds up gradients
/// of micro-batches in their order, whatever it does in between; so no schedule changes a bit.
///
/// What only one stage knows (the loss, a parameter's squares) is added over pp to zeros of the
/// other ranks, in fp64: exact in every order.
struct PipelineNumerics {
  std::vector<ModelSection> stages;  ///< empty: every rank has the whole model
  std::vector<int> rank_of_stage;    ///< pp ranks
  /// By parameter: the stages that read it
  std::map<std::string, std::vector<int>, std::less<>> readers;
};

}  // namespace isoshard
