// SPDX-License-Identifier: Apache-2.0
/// The part of a declared arithmetic over dp: how gradients are added up and reduced, and what each
/// rank steps.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "subjects/parallel/range.h"
#include "subjects/parallel/reduction_point.h"

namespace isoshard {

/// Elements [begin, begin + count) of a flattened parameter stand at `place` of a bucket's flat
/// buffer.
struct PlacedRun {
  std::int64_t begin = 0, place = 0, count = 0;
};

/// Where the parameters of a bucket lie in its flat buffer; the rest is padding, zeros.
struct BucketPlaces {
  /// By parameter of the bucket, in rising order and covering it
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

/// Which parameters' gradients are reduced over dp together.
struct GradientBuckets {
  /// Parameters that are reduced as one flat buffer, in its order
  std::vector<std::vector<std::string>> parameters;
  /// Buckets are made anew before the second reduction; none: they stay. Not together with `places`
  /// or OptimizerSharding::reduces_to_owner.
  std::optional<RebuiltBuckets> rebuilt;
  /// By bucket; empty: one parameter right behind the other
  std::vector<BucketPlaces> places;
};

/// How gradients of micro-batches become those of a step.
struct GradientAccumulation {
  /// Gradients of each micro-batch are reduced over dp on their own, and ranks add up results.
  /// Otherwise each rank adds up its gradients, and the sum is reduced.
  bool reduces_every_micro_batch = false;
  /// What gradients of micro-batches are added up in: each is converted to it, and so is what is
  /// reduced. None: PrecisionNumerics::dtype.
  std::optional<Dtype> dtype;
  /// Sums of micro-batches begin as zeros, so that a -0 becomes 0; else as the first gradient
  bool adds_to_zeros = false;
};

/// Which ranks have parts of one parameter together. Of dp ranks in order the first
/// dp / `replicas` are one group of shards, then the next; with `spans_context` a group has all of
/// their cp ranks, too, those of one dp rank after each other. Wherever a group's ranks are counted
/// here as "dp ranks" they are those of a group of shards. Ranks in the same place of each group
/// are replicas of each other.
struct ShardGrouping {
  int replicas = 1;
  bool spans_context = false;
};

/// What each dp rank steps, where this is not everything.
struct OptimizerSharding {
  ShardGrouping groups;
  /// The runs of a parameter's part (that of a tp rank, flattened) that each dp rank steps, in
  /// rising order, with gaps between them; one that is not listed is stepped whole by every dp
  /// rank.
  std::map<std::string, std::vector<std::vector<Range>>, std::less<>> stepped_runs;
  /// A bucket is reduced to those who step it: it holds dp rank 0's runs of all its parameters,
  /// then rank 1's, ...; each rank gets its own ones, in DataNumerics::parameter_gradient.dtype,
  /// and ring's chunks are the ranks' blocks. Otherwise every rank gets the whole bucket.
  bool reduces_to_owner = false;
  /// Outside of a forward and its backward a rank has only the runs that it steps; a parameter is
  /// recorded as those.
  bool keeps_runs = false;
  /// Parameters are read in one flat buffer, each at its element; empty: each has its own memory.
  /// Products may add in another order where a matrix does not begin at a vector's border.
  std::map<std::string, std::int64_t, std::less<>> places_in_buffer;
};

/// Gradients are added up over micro-batches and reduced over dp bucket by bucket; each dp rank
/// goes on with what it steps.
struct DataNumerics {
  GradientBuckets buckets;
  GradientAccumulation accumulation;
  OptimizerSharding sharding;
  ReductionPoint parameter_gradient;  ///< over dp
  /// Over replicas, after that, in its dtype: a bucket's runs one behind the other, each filled up
  /// with zeros to the longest that any rank of the group steps
  ReductionPoint replica_gradient;
  ReductionPoint token_count;  ///< over dp, int64
  ReductionPoint loss;         ///< over dp, fp64
};

}  // namespace isoshard
