// SPDX-License-Identifier: Apache-2.0
/// What a subject says about its own arithmetic, as plain data: enough to repeat its run bit by bit
/// in one process.
///
/// A reduction point is a kind of place at which ranks add their tensors. Each kind of parallelism
/// is a part with its own header, and says where ranks of its axis add.
#pragma once
#include <cstdint>
#include <optional>

#include "core/base/dtype.h"
#include "core/comm/communicator.h"
#include "core/mesh/mesh.h"
#include "subjects/optim/clip.h"
#include "subjects/parallel/context_numerics.h"
#include "subjects/parallel/data_numerics.h"
#include "subjects/parallel/pipeline_numerics.h"
#include "subjects/parallel/reduction_point.h"
#include "subjects/parallel/tensor_numerics.h"
#include "subjects/parallel/vocabulary_numerics.h"
#include "subjects/settings/settings.h"

namespace isoshard {

/// Products in a coarser dtype than the parameters': linear layers, matrix products and attention,
/// as torch.autocast has them.
struct LowPrecisionProducts {
  /// Inputs, weights and biases are rounded to it, results are in it; so are summands of row layers
  Dtype dtype = Dtype::kBFloat16;
  /// The bias that a row layer adds after the sum is rounded to the sum's dtype first
  bool rounds_row_bias = true;
};

/// What values are rounded to on a rank; what is rounded to be sent is said where ranks add.
struct PrecisionNumerics {
  /// Of parameters, activations and gradients
  Dtype dtype = Dtype::kFloat32;
  /// Of what is stepped and of the optimizer's state; none: `dtype`. Masters start from the
  /// parameters as rounded to `dtype`; gradients are converted after the reduction over dp, stepped
  /// masters are rounded to `dtype` again.
  std::optional<Dtype> master_dtype;
  /// What logits are converted to before the loss; none: they stay as they are
  std::optional<Dtype> logits_dtype;
  /// None: in `dtype`; else forward only, backward follows each op's dtype
  std::optional<LowPrecisionProducts> products;
};

/// The order in which the parameters' sums of squares, all in fp64, are added to the squared norm.
enum class NormAdds : std::uint8_t { kModelOrder, kReverseModelOrder };

/// The norm that gradients are clipped by.
///
/// Squares of parameters are summed over dp (the group of shards) if anything is stepped in runs,
/// and of parameters that are cut then over tp (of holders the first counts); those of whole ones
/// are taken from the rank itself.
struct NormNumerics {
  /// Over dp and over tp, fp64: one sum of squares per parameter, in model order
  ReductionPoint square_sums;
  /// Of a parameter's gradient so many elements are squared and added as one op
  std::int64_t block = kNormBlockElements;
  NormAdds adds = NormAdds::kModelOrder;
  /// Instead of all this: norms of parameters as torch's vector_norm makes them, in the dtype of
  /// what is stepped; where it is cut the squares of the shards' norms are summed, in that dtype,
  /// and the root is taken; then vector_norm of all parameters' norms.
  bool is_torchs = false;
};

/// One training run's arithmetic on a mesh.
///
/// After backward gradients are reduced over dp (`data`), then summed over holders (`tensor`), then
/// their norm is made (`norm`).
struct NumericsSpec {
  MeshShape mesh;
  int num_threads = 1;  ///< of every op
  PrecisionNumerics precision;
  TensorNumerics tensor;
  SequenceNumerics sequence;
  ContextNumerics context;
  PipelineNumerics pipeline;
  std::optional<SplitVocabulary> vocabulary;  ///< none: whole on every rank
  DataNumerics data;
  NormNumerics norm;
};

/// What a subject's arithmetic depends on, besides the model.
struct NumericsInputs {
  MeshShape mesh;
  Dtype dtype = Dtype::kFloat32;
  ReductionOrder order = ReductionOrder::kOrdered;  ///< of the communicator
  TrainSettings settings;
};

}  // namespace isoshard
