// SPDX-License-Identifier: Apache-2.0
// The column-parallel probe.
#include "suite/published/column_probe.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <array>
#include <cmath>

#include "core/comm/tensor.h"
#include "subjects/model/ops/linear.h"
#include "subjects/parallel/tensor/tensor_parallel_strategy.h"
#include "suite/published/drawn.h"

namespace isoshard {

std::span<const ProductShape> probed_shapes() {
  static constexpr std::array kShapes{ProductShape{1, 64, 56},     ProductShape{7, 896, 896},
                                      ProductShape{21, 96, 168},   ProductShape{64, 896, 896},
                                      ProductShape{48, 896, 4872}, ProductShape{256, 1024, 1792}};
  return kShapes;
}

ColumnProbe probe_column(Rank& rank, Dtype dtype, const ProductShape& shape, std::uint64_t seed,
                         c10::Device device) {
  const at::NoGradGuard no_grad;
  const int tp = rank.size();
  const Drawn x{"column.x", {shape.rows, shape.in}, 1.0, seed, device};
  const Drawn weight{"column.weight",
                     {shape.out, shape.in},
                     1 / std::sqrt(static_cast<double>(shape.in)),
                     seed,
                     device};
  ShardPlan plan;
  plan.kinds = {{"column.weight", ShardKind::kColumn}};
  const TensorParallelStrategy split(plan, rank.comm(), 1, 1.0);
  const at::Tensor x_MI = x.whole(dtype);
  const at::Tensor local =
      split.linear("column", x_MI, weight.part(dtype, 0, rank.rank(), tp), std::nullopt, nullptr);
  const at::Tensor gathered =
      all_gather(rank.comm(), local.contiguous(), {Purpose::kUnspecified, Axis::kTp, {}});
  const at::Tensor actual = at::cat(gathered.chunk(tp, 0), 1),
                   whole = apply_linear(x_MI, weight.whole(dtype));

  ColumnProbe probe{dtype, shape, tp, 0, 0};
  // Values, not bits, would take -0 for 0 and NaN for unequal: none of them comes up in sums of
  // products of normals.
  probe.unequal = actual.ne(whole).sum().item<std::int64_t>();
  probe.max = (actual.to(at::kDouble) - whole.to(at::kDouble)).abs().max().item<double>();
  return probe;
}

}  // namespace isoshard
