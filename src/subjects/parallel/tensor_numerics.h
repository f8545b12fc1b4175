// SPDX-License-Identifier: Apache-2.0
/// The part of a declared arithmetic over tp: what each rank has of a module, and where they add.
///
/// Terms. Region: how the weights of one module are used over tp. Tied adds: gradients that meet at
/// one tensor and are added there, in an order that rounds. Holders: ranks of one tp group that
/// hold equal parts of a parameter.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "subjects/parallel/range.h"
#include "subjects/parallel/reduction_point.h"

namespace isoshard {

/// kColumn: a rank computes its own output features; the input's gradient is summed over tp. kRow:
/// a rank computes a summand of all output features; the bias is added once, after the sum.
/// kVocabEmbedding: a rank looks up its own entries and gives 0 for those of others; the sum over
/// tp is the output. kVocabHead: as kColumn, over the entries; the logits stay cut.
enum class Region : std::uint8_t { kReplicated, kColumn, kRow, kVocabEmbedding, kVocabHead };

/// tp rank r holds the ranges by_rank[r] of dim `dim` of a parameter, one after the other. Ranks
/// with equal ranges are its holders.
struct ParameterCut {
  int dim = 0;
  std::vector<std::vector<Range>> by_rank;
  /// Of `dim` on every rank, filled up with zeros; 0: what the ranges have
  std::int64_t padded_size = 0;
};

/// Activations that several tp ranks hold alike, as they come out of copied weights. Each rank uses
/// its copy for its own part of the model, so the gradient is the sum over all ranks that hold it.
struct CopiedActivations {
  int num_parts = 0;
  std::vector<int> part_of_rank;    ///< by tp rank
  std::vector<std::string> points;  ///< names of taps
};

/// Modules whose weights are rows of one weight (and whose biases are of one bias), so that their
/// outputs are one product: turn by turn so many rows of each module.
struct FusedProduct {
  std::int64_t turns = 1;
  std::vector<std::int64_t> rows;  ///< by module, of one turn of a rank's part
};

/// Column modules that read one tensor, whose gradient is the sum of what they send back.
struct SharedInput {
  std::vector<std::string> modules;  ///< in the order of use
  /// Tied adds: indices into `modules`, in the order of adding
  std::vector<std::size_t> adds;
  /// Added on each rank and then over tp, once; otherwise each over tp and then added
  bool reduced_together = false;
  /// One product for all: there is one gradient, and nothing is added
  std::optional<FusedProduct> fused = {};
};

/// Modules and parameters that are cut over tp, and the sums over tp that this takes.
struct TensorNumerics {
  /// By module; one that is not listed is replicated
  std::map<std::string, Region, std::less<>> regions;
  /// By parameter; one that is not listed is whole on every rank
  std::map<std::string, ParameterCut, std::less<>> cuts;
  CopiedActivations copies;                ///< none: num_parts is 0
  std::vector<SharedInput> shared_inputs;  ///< every column module is in one
  ReductionPoint row_output;               ///< over tp, forward
  /// Over tp, backward; in the dtype of the input, before it is rounded for a product
  ReductionPoint column_input_gradient;
  /// Parameters whose gradients are summed over their holders after the reduction over dp, as one
  /// flat buffer each
  std::vector<std::vector<std::string>> holder_sums;
  ReductionPoint holder_gradient;  ///< over the holders
};

/// Activations that TensorNumerics leaves whole on every tp rank, cut along dim 1 instead, in tp
/// equal parts.
///
/// Column modules and the head gather the parts first, and of their input's gradient each rank
/// keeps its part of the sum; row modules and the embedding keep their part of the sum, and gather
/// their output's gradient. A sum is made of the parts one after the other, part 0 of all samples
/// first. A replicated embedding looks up the own part of its indices.
struct SequenceNumerics {
  bool is_cut = false;
};

}  // namespace isoshard
