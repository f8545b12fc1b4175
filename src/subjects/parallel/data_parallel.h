// SPDX-License-Identifier: Apache-2.0
/// How a rank's parameters, gradients and optimizer state are spread over dp: the seam between a
/// training step and DDP, ZeRO, FSDP.
///
/// Terms. Held: a parameter as this rank's forward reads it, its part of a tp split. Piece: the run
/// of the flattened held parameter that this rank's optimizer steps - all of it with replicas, a
/// shard of it with ZeRO and FSDP. Master: a piece in the dtype that is stepped.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/param_class.h"
#include "core/mesh/layout.h"
#include "core/mesh/mesh.h"
#include "subjects/optim/optimizer.h"

namespace isoshard {

/// A parameter as forward reads it on this rank.
struct HeldParameter {
  std::string name;
  ParamClass param_class = ParamClass::kMatrix;
  Layout layout;      ///< of `tensor` in the whole parameter
  at::Tensor tensor;  ///< leaf that requires grad unless the parameter is frozen
};

struct DataParallelSetup {
  std::vector<HeldParameter> parameters;  ///< in model order, the same on every rank of a dp group
  Mesh* mesh = nullptr;
  std::int64_t bucket_bytes = 25 << 20;
  /// Of what the optimizer steps, and of its states. None: the parameters' own. Masters start from
  /// the parameters as forward reads them.
  std::optional<Dtype> master_dtype;
  /// Called with what forward reads of a parameter that is not in before_forward()'s map yet, when
  /// it is: with a layer that is gathered when forward comes to it. May be empty.
  std::function<void(std::string_view name, const at::Tensor& read)> on_read;
};

/// What the micro-batches of a step have added up so far, by parameter name.
struct AccumulatedGradients {
  NamedTensors gradients;
  /// Averages over dp, as pieces (DataParallel::piece_layout). Else each rank's own sum, of the
  /// whole held parameter (held_layout): the gradient is the average of those of the dp ranks.
  bool is_reduced = false;
};

/// Requires     phases in this order: setup; then per step before_forward, before_backward,
///              after_backward for each micro-batch, finish, gradients, publish. What setup was
///              given outlives it.
/// Guarantees   gradients() are averages over dp of all micro-batches' sums; after publish every
///              rank's forward reads the stepped values. A frozen parameter is read and held like
///              any other; it is in none of accumulated(), masters() and gradients().
/// Ranks        every phase but clear_gradients is collective over the dp group.
class DataParallel {
 public:
  virtual ~DataParallel() = default;
  /// Whether setup takes frozen parameters; else FrozenBeside holds them
  /// (subjects/parallel/frozen_weights.h).
  [[nodiscard]] virtual bool takes_frozen() const noexcept { return false; }
  virtual void setup(DataParallelSetup setup) = 0;
  virtual void clear_gradients() = 0;
  /// What forward reads in the next micro-batch, by parameter name.
  [[nodiscard]] virtual const NamedTensors& before_forward() = 0;
  /// `reduces`: gradients as they are after this backward are reduced over dp, during it or right
  /// after it.
  virtual void before_backward(bool reduces) = 0;
  virtual void after_backward(bool reduces, bool is_last) = 0;
  /// Waits for reductions that are under way. A parameter that no gradient reached has a gradient
  /// of zeros.
  virtual void finish() = 0;
  /// Between two micro-batches: the gradients in the dtype in which they are added up, where they
  /// are. The next backward changes them. Local.
  [[nodiscard]] virtual AccumulatedGradients accumulated() const = 0;
  /// Where what has been added up without reduction lies.
  [[nodiscard]] virtual Layout accumulated_layout(std::string_view name) const {
    return held_layout(name);
  }

  /// What forward reads, for the record: whole held parameters or, where a rank keeps less, its
  /// pieces. Layouts as held_layout.
  [[nodiscard]] virtual const NamedTensors& held() const = 0;
  [[nodiscard]] virtual Layout held_layout(std::string_view name) const = 0;
  /// The parameter in the tensor that forward reads for it (with fused layers a part of it), and
  /// where that lies.
  [[nodiscard]] virtual at::Tensor held_in(std::string_view /*name*/,
                                           const at::Tensor& read) const {
    return read;
  }
  [[nodiscard]] virtual Layout read_layout(std::string_view name) const {
    return held_layout(name);
  }
  /// By parameter name, equal names and shapes; of a parameter that other dp ranks step an empty
  /// tensor [0]. Layouts as piece_layout.
  [[nodiscard]] virtual NamedTensors& masters() = 0;
  [[nodiscard]] virtual NamedTensors gradients() = 0;
  [[nodiscard]] virtual Layout piece_layout(std::string_view name) const = 0;
  /// True if pieces of dp ranks differ: sums over all parameters are then sums over dp, too.
  [[nodiscard]] virtual bool is_cut_over_dp() const noexcept = 0;
  /// Brings stepped masters to where forward reads them, on every rank.
  virtual void publish() = 0;
};

/// The gradients of leaves, zeros where there is none.   Ranks   local.
[[nodiscard]] NamedTensors gradients_of(const NamedTensors& leaves);

/// Where elements [begin, begin + count) of a flattened local tensor lie in the whole tensor, as
/// flat ranges. `part` says where that tensor lies; its boxes tile it but for padding, which is
/// left out.
/// Shapes   `local` is the tensor's shape.   Ranks   local.
[[nodiscard]] Layout layout_of_run(const Layout& part, const Shape& local, const MeshShape& mesh,
                                   int rank, std::int64_t begin, std::int64_t count);

}  // namespace isoshard
