// SPDX-License-Identifier: Apache-2.0
/// Parameters that are gathered, freed and reduced together.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/base/param_class.h"
#include "core/comm/communicator.h"
#include "subjects/optim/optimizer.h"
#include "subjects/parallel/fsdp/dim_shards.h"
#include "subjects/settings/settings.h"

namespace isoshard {

/// This dp rank's rows of one parameter.
struct FsdpShard {
  std::string name;
  ParamClass param_class = ParamClass::kMatrix;
  Shape whole;       ///< of the parameter as forward reads it
  DimShards shards;  ///< of `whole` over dp
  /// The own rows: a leaf that requires grad, in the dtype that is stepped; of a frozen parameter
  /// one that does not, in the dtype that is gathered.
  at::Tensor tensor;
};

/// Bytes of gathered parameters that are there now, and the most that ever were. Communication
/// buffers, which live within one call, do not count.
struct GatheredBytes {
  std::int64_t now = 0, peak = 0;
};

/// The ranks over which a parameter is cut, and those that have the same pieces of it (HSDP).
struct ShardGroups {
  Communicator* shards = nullptr;
  Communicator* replicas = nullptr;  ///< nullptr: every piece is on one rank
};

struct FsdpDtypes {
  at::ScalarType compute = at::kFloat;  ///< gathered parameters and their gradients
  /// What gradients are rounded to before they are averaged; none: `compute`
  std::optional<at::ScalarType> reduce = {};
  /// Over the shards; only kInCollective where there are replicas.
  GradAverage average = GradAverage::kInCollective;
};

/// Pass: one gathering of the group with its node in the autograd graph. Its parameters are tensors
/// whose memory can be given back and filled again; autograd keeps them and does not notice.
///
/// Flat buffers: each rank's block holds one padded segment per parameter, in the group's order.
/// The segments of a call name those of all blocks: of what is gathered, and of what is to be
/// scattered.
/// Requires     the group outlives the graph of a pass; backward runs with the parameters gathered
///              (regather).
/// Guarantees   backward of a pass gives the memory back, averages the gradients over dp and hands
///              each shard its own rows. A parameter that no gradient reached enters as zeros.
///              A frozen one is gathered with the others and not reduced.
/// Ranks        collective over the shards: one all-gather per gather and regather (param_gather),
///              one reduce-scatter per backward of a pass (grad_reduce), then one all-reduce over
///              replicas, if there are any (grad_reduce); both average.
/// Source       torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py.
class FsdpGroup {
 public:
  using Pass = std::int64_t;
  FsdpGroup(std::vector<FsdpShard> shards, const ShardGroups& groups, FsdpDtypes dtypes,
            GatheredBytes& bytes);
  FsdpGroup(const FsdpGroup&) = delete;
  FsdpGroup& operator=(const FsdpGroup&) = delete;

  /// Puts the whole parameters under their names into `parameters`.
  [[nodiscard]] Pass gather(NamedTensors& parameters);
  /// Gives a pass's memory back; nothing happens if it has none.
  void release(Pass pass);
  /// Fills a released pass again.
  void regather(Pass pass);
  /// Releases all passes and forgets them: their graphs are gone.
  void forget_passes();
  [[nodiscard]] const std::vector<FsdpShard>& shards() const noexcept { return shards_; }

  // For the node in the graph.
  [[nodiscard]] std::vector<at::Tensor> whole_parameters(Pass pass);
  [[nodiscard]] std::vector<at::Tensor> shard_gradients(Pass pass,
                                                        const std::vector<at::Tensor>& gradients);

 private:
  /// Places in a rank's block, and its segments, of all shards or of those that are trained.
  struct Blocks {
    std::vector<std::size_t> shards;
    std::vector<std::int64_t> offsets;  ///< of each of `shards` in a rank's block
    std::vector<Segment> segments;      ///< of all ranks' blocks, one after the other
    std::int64_t numel = 0;             ///< of a rank's block
  };
  [[nodiscard]] Blocks blocks_of(bool of_trained_only) const;
  void fill(const std::vector<c10::Storage>& storages);
  [[nodiscard]] std::int64_t padded_bytes(const FsdpShard& shard) const;
  /// Of tensors where the shards are.
  [[nodiscard]] at::TensorOptions in(at::ScalarType dtype) const;

  std::vector<FsdpShard> shards_;
  Communicator* dp_;
  Communicator* replicas_;
  Blocks gathered_, reduced_;
  FsdpDtypes dtypes_;
  GatheredBytes* bytes_;
  std::map<Pass, std::vector<c10::Storage>> passes_;
  Pass next_pass_ = 0;
};

}  // namespace isoshard
