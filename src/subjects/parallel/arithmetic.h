// SPDX-License-Identifier: Apache-2.0
/// What a subject says about its own arithmetic, as plain data: enough to repeat its run bit by bit
/// in one process.
///
/// Terms. Region: how the weights of one module are used over tp. Reduction point: a kind of place
/// at which ranks add their tensors. Tied adds: gradients that meet at one tensor and are added
/// there, in an order that rounds. Holders: ranks of one tp group that hold equal parts of a
/// parameter.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "core/comm/communicator.h"
#include "subjects/optim/clip.h"

namespace isoshard {

/// kColumn: a rank computes its own output features; the input's gradient is summed over tp. kRow:
/// a rank computes a summand of all output features; the bias is added once, after the sum.
/// kVocabEmbedding: a rank looks up its own entries and gives 0 for those of others; the sum over
/// tp is the output. kVocabHead: as kColumn, over the entries; the logits stay cut.
enum class Region : std::uint8_t { kReplicated, kColumn, kRow, kVocabEmbedding, kVocabHead };

struct Range {
  std::int64_t begin = 0, count = 0;
  friend auto operator<=>(const Range&, const Range&) = default;
};

/// tp rank r holds the ranges by_rank[r] of dim `dim` of a parameter, one after the other. Ranks
/// with equal ranges are its holders.
struct ParameterCut {
  int dim = 0;
  std::vector<std::vector<Range>> by_rank;
  /// Of `dim` on every rank, filled up with zeros; 0: what the ranges have.
  std::int64_t padded_size = 0;
};

/// Activations that several tp ranks hold alike, as they come out of copied weights. Each rank uses
/// its copy for its own part of the model, so the gradient is the sum over all ranks that hold it.
struct CopiedActivations {
  int num_parts = 0;
  std::vector<int> part_of_rank;    ///< by tp rank
  std::vector<std::string> points;  ///< names of taps
};

/// How ranks add (or take the maximum) at one kind of place. The sum is made over the ranks of one
/// group; a group of one adds nothing and rounds nothing.
struct ReductionPoint {
  bool is_made = true;                    ///< false: every rank goes on with its own tensor
  Reduction reduction = Reduction::kSum;  ///< kSum, kAvg or kMax
  ReductionOrder order = ReductionOrder::kOrdered;
  /// What values are rounded to before they are added; none: their own dtype.
  std::optional<Dtype> dtype;
  /// kOrdered: to that dtype after each addition, not once at the end
  bool rounds_every_add = false;
  /// kOrdered: group ranks in the order of adding; empty: 0, 1, 2, ...
  std::vector<int> addends;
  /// kRing: sizes of the group ranks' chunks; empty: equal ones, as docs/reduction.md says
  std::vector<std::int64_t> chunks;
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
  /// Tied adds: indices into `modules`, in the order of adding.
  std::vector<std::size_t> adds;
  /// Added on each rank and then over tp, once; otherwise each over tp and then added.
  bool reduced_together = false;
  /// One product for all: there is one gradient, and nothing is added.
  std::optional<FusedProduct> fused = {};
};

/// Elements [begin, begin + count) of a flattened parameter stand at `place` of a bucket's flat
/// buffer.
struct PlacedRun {
  std::int64_t begin = 0, place = 0, count = 0;
};

/// Where the parameters of a bucket lie in its flat buffer; the rest is padding, zeros.
struct BucketPlaces {
  /// By parameter of the bucket, in rising order and covering it.
  std::vector<std::vector<PlacedRun>> runs;
  std::int64_t numel = 0;  ///< of the buffer
};

/// Parameters in the order in which their gradients became ready in the backward of the first
/// reduction on dp rank 0, each when its last summand had been added; those without gradient
/// behind, from the last in model order to the first. A bucket is closed when it has as many bytes
/// as these, in the dtype of the gradients.
struct RebuiltBuckets {
  std::int64_t first_bytes = 0;  ///< of the first bucket
  std::int64_t bytes = 0;
};

/// A vocabulary that is cut over tp, and the loss of logits that stay cut along it.
///
/// Of one token: x its logits on a rank, y its target, V the size, a the label smoothing, s = a V /
/// (V - 1), c the token's weight. Every line rounds to `loss_dtype`; sums over columns are one op
/// on a block of tokens.
///
///     M = max x, over tp;  z = x - M
///     E = sum exp(z), over tp; T = z[y], or 0 where y is another rank's, over tp; S = sum z, over
///       tp
///     loss      (log E - T), smoothed: (log E - T) (1 - s) + (log E - S / V) s
///     gradient p = exp((x - M) - log E); p -= s / V; p[y] += s - 1; p c, rounded to the logits'
///       dtype
///
/// Columns behind a rank's entries are padding: they enter nothing, and their gradient is 0.
struct SplitVocabulary {
  std::int64_t size = 0;
  std::vector<Range> by_rank;  ///< entries of each tp rank; empty where a rank has padding only
  Dtype loss_dtype = Dtype::kFloat32;
  /// A block has as many whole tokens as fit, at least one.
  std::int64_t logits_per_block = 1 << 18;
  ReductionPoint embedding_output;     ///< over tp, forward
  ReductionPoint head_input_gradient;  ///< over tp, backward
  ReductionPoint largest_logit;        ///< M
  ReductionPoint sum_of_exponentials;  ///< E
  ReductionPoint target_logit;         ///< T
  ReductionPoint sum_of_logits;        ///< S, with label smoothing only
};

/// Products in a coarser dtype than the parameters': linear layers, matrix products and attention,
/// as torch.autocast has them.
struct LowPrecisionProducts {
  /// Inputs, weights and biases are rounded to it, results are in it; so are summands of row layers
  Dtype dtype = Dtype::kBFloat16;
  /// The bias that a row layer adds after the sum is rounded to the sum's dtype first.
  bool rounds_row_bias = true;
};

/// The order in which the parameters' sums of squares, all in fp64, are added to the squared norm.
enum class NormAdds : std::uint8_t { kModelOrder, kReverseModelOrder };

/// One training run's arithmetic on a dp x tp mesh (tp fastest).
///
/// Gradients are reduced over dp bucket by bucket, each dp rank goes on with what it steps, then
/// the sums over holders are made, then the norm: squares of parameters are summed over dp if
/// anything is stepped in runs, and of parameters that are cut then over tp, both at `clip_norm`
/// (of holders the first counts); those of whole ones are taken from the rank itself.
struct Arithmetic {
  int dp = 1, tp = 1;
  /// Of parameters, activations and gradients.
  Dtype dtype = Dtype::kFloat32;
  int num_threads = 1;  ///< of every op
  /// By module; one that is not listed is replicated.
  std::map<std::string, Region, std::less<>> regions;
  /// By parameter; one that is not listed is whole on every rank.
  std::map<std::string, ParameterCut, std::less<>> cuts;
  CopiedActivations copies;                ///< none: num_parts is 0
  std::vector<SharedInput> shared_inputs;  ///< every column module is in one
  /// Activations that are whole on every tp rank are cut along dim 1 instead, in tp equal parts.
  /// Column modules and the head gather the parts first, and of their input's gradient each rank
  /// keeps its part of the sum; row modules and the embedding keep their part of the sum, and
  /// gather their output's gradient. A sum is made of the parts one after the other, part 0 of all
  /// samples first. A replicated embedding looks up the own part of its indices.
  bool is_sequence_cut = false;
  /// Parameters that are reduced over dp as one flat buffer, in its order.
  std::vector<std::vector<std::string>> gradient_buckets;
  /// Buckets are made anew before the second reduction; none: they stay. Not together with
  /// bucket_places or reduces_to_owner.
  std::optional<RebuiltBuckets> rebuilt_buckets;
  /// By bucket; empty: one parameter right behind the other.
  std::vector<BucketPlaces> bucket_places;
  /// The runs of a parameter's part (that of a tp rank, flattened) that each dp rank steps, in
  /// rising order, with gaps between them; one that is not listed is stepped whole by every dp
  /// rank.
  std::map<std::string, std::vector<std::vector<Range>>, std::less<>> stepped_runs;
  /// Of what is stepped and of the optimizer's state; none: `dtype`. Masters start from the
  /// parameters as rounded to `dtype`; gradients are converted after the reduction over dp, stepped
  /// masters are rounded to `dtype` again.
  std::optional<Dtype> master_dtype;
  /// A bucket is reduced to those who step it: it holds dp rank 0's runs of all its parameters,
  /// then rank 1's, ...; each rank gets its own ones, in parameter_gradient.dtype, and ring's
  /// chunks are the ranks' blocks. Otherwise every rank gets the whole bucket.
  bool reduces_to_owner = false;
  /// Gradients of each micro-batch are reduced over dp on their own, and ranks add up results.
  /// Otherwise each rank adds up its gradients, and the sum is reduced.
  bool reduces_every_micro_batch = false;
  /// Outside of a forward and its backward a rank has only the runs that it steps; a parameter is
  /// recorded as those.
  bool keeps_runs = false;
  /// What gradients of micro-batches are added up in: each is converted to it, and so is what is
  /// reduced. None: `dtype`.
  std::optional<Dtype> accumulation_dtype;
  /// Sums of micro-batches begin as zeros, so that a -0 becomes 0; else as the first gradient.
  bool adds_to_zeros = false;
  /// Parameters whose gradients are then summed over their holders, flat too.
  std::vector<std::vector<std::string>> holder_sums;
  std::optional<SplitVocabulary> vocabulary;  ///< none: whole on every rank
  /// What logits are converted to before the loss; none: they stay as they are.
  std::optional<Dtype> logits_dtype;
  /// None: in `dtype`; else forward only, backward follows each op's dtype.
  std::optional<LowPrecisionProducts> products;
  ReductionPoint row_output;  ///< over tp, forward
  /// Over tp, backward; in the dtype of the input, before it is rounded for a product.
  ReductionPoint column_input_gradient;
  ReductionPoint parameter_gradient;  ///< over dp
  ReductionPoint holder_gradient;     ///< over the holders
  ReductionPoint token_count;         ///< over dp, int64
  ReductionPoint loss;                ///< over dp, fp64
  /// Over tp, fp64: one sum of squares per cut parameter, in model order.
  ReductionPoint clip_norm;
  /// Of a parameter's gradient so many elements are squared and added as one op.
  std::int64_t norm_block = kNormBlockElements;
  NormAdds norm_adds = NormAdds::kModelOrder;
};

/// What a subject's arithmetic depends on, besides the model.
struct ArithmeticInputs {
  int dp = 1, tp = 1;
  Dtype dtype = Dtype::kFloat32;
  ReductionOrder order = ReductionOrder::kOrdered;  ///< of the communicator
  std::int64_t bucket_bytes = 25 << 20;
  /// As TrainSettings::make_vocab_size_divisible_by.
  std::int64_t make_vocab_size_divisible_by = 0;
  std::optional<Dtype> autocast = {};
  int zero_stage = 0;  ///< as TrainSettings
  std::optional<Dtype> master_dtype = {};
  bool sequence_parallel = false, distributed_optimizer = false;  ///< as TrainSettings
  std::optional<Dtype> reduce_dtype = {}, output_dtype = {};      ///< as TrainSettings
};

}  // namespace isoshard
