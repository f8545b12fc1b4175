// SPDX-License-Identifier: Apache-2.0
/// The groups of ranks that nd needs besides the axes of its mesh.
#pragma once
#include <memory>

#include "core/comm/communicator.h"
#include "core/mesh/mesh.h"

namespace isoshard {

/// dp is dp_replicate groups of dp_shard ranks, one after the other. Parameters are cut over the
/// dp_shard x cp ranks of a group (cp is the faster), and copied over dp_replicate; gradients are
/// averaged over all dp x cp ranks. Ranks that differ in pp or tp are in none of these together.
///
/// Ranks    the constructor is collective over the mesh (five splits).
/// Errors   UsageError unless dp is a multiple of dp_replicate.
class NdGroups {
 public:
  NdGroups(Mesh& mesh, int dp_replicate);
  [[nodiscard]] Communicator& data() const noexcept { return *data_; }      ///< dp x cp
  [[nodiscard]] Communicator& shards() const noexcept { return *shards_; }  ///< dp_shard x cp
  [[nodiscard]] Communicator& replicas() const noexcept { return *replicas_; }
  [[nodiscard]] Communicator& context() const noexcept { return *context_; }    ///< cp
  [[nodiscard]] Communicator& pipeline() const noexcept { return *pipeline_; }  ///< pp

 private:
  std::unique_ptr<Communicator> data_, shards_, replicas_, context_, pipeline_;
};

}  // namespace isoshard
