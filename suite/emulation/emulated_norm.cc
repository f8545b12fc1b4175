// SPDX-License-Identifier: Apache-2.0
// Norms in the dtype of gradients, each rounding written out.
#include <ATen/ATen.h>

#include <vector>

#include "subjects/optim/clip.h"
#include "suite/emulation/emulated_rank.h"
#include "suite/emulation/emulated_reduction.h"

namespace isoshard {

double EmulatedRank::torchs_norm() {
  const at::ScalarType type = master_type();
  const NumericsSpec& numerics = run_->numerics;
  std::vector<double> of_parameters;
  for (const ParameterSpec& spec : trained_)
    of_parameters.push_back(gradients_.at(spec.name).flatten().norm().item<double>());
  at::Tensor norms = fp64_tensor(of_parameters).to(type);
  if (!numerics.data.sharding.stepped_runs.empty() && shard_members().size() > 1) {
    for (double& norm : of_parameters) norm *= norm;
    const at::Tensor sums =
        world_->reduce(rank_, shard_members(), "clip norm", fp64_tensor(of_parameters).to(type),
                       numerics.norm.square_sums);
    // The library's root of many numbers: on some CPUs it is an ulp from the rounded one.
    norms = sums.pow(0.5);
  }
  return norms.norm().item<double>();
}

double EmulatedRank::factor_of(double norm) const {
  const double most = run_->item.settings.max_grad_norm;
  if (!run_->numerics.norm.is_torchs || most == 0) return clip_factor(norm, most);
  // 16-bit values are computed with in fp32
  const at::ScalarType type = master_type();
  const auto number = [type](double value) {
    return type == at::kDouble ? value : static_cast<double>(static_cast<float>(value));
  };
  const auto rounded = [&](double value) {
    return fp64_tensor({number(value)}).to(type).item<double>();
  };
  const double factor = rounded(rounded(1 / rounded(norm + number(1e-6))) * number(most));
  return factor > 1 ? 1 : factor;
}

}  // namespace isoshard
