// SPDX-License-Identifier: Apache-2.0
// Initial weights by (seed, name, flat index), any box of them.
#include "model/weights.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <functional>
#include <span>

#include "base/error.h"
#include "base/normal.h"

namespace isoshard {
namespace {

void check_box(const ParameterSpec& spec, const Shape& offset, const Shape& size) {
  bool inside = offset.size() == spec.shape.size() && size.size() == spec.shape.size();
  for (std::size_t dim = 0; inside && dim < size.size(); ++dim) {
    inside = offset[dim] >= 0 && size[dim] >= 0 && offset[dim] <= spec.shape[dim] && size[dim] <= spec.shape[dim] - offset[dim];
  }
  if (inside) return;
  throw ShapeError(fmt::format("box at [{}] of size [{}] does not lie in {} [{}]", fmt::join(offset, ", "), fmt::join(size, ", "),
                               spec.name, fmt::join(spec.shape, ", ")));
}

/// Calls `visit(part of out, flat index in the whole tensor)` for each run that is contiguous in both.
void for_each_run(const Shape& shape, const Shape& offset, const Shape& size, std::span<float> out,
                  const std::function<void(std::span<float>, std::uint64_t)>& visit) {
  if (out.empty()) return;
  // Trailing dims that the box covers whole join one run with the dim before them.
  std::size_t run_dim = shape.size();
  std::int64_t run = 1;
  while (run_dim > 0) {
    --run_dim;
    run *= size[run_dim];
    if (size[run_dim] != shape[run_dim]) break;
  }
  Shape index(run_dim, 0);
  for (std::size_t written = 0; written < out.size(); written += static_cast<std::size_t>(run)) {
    std::int64_t flat = 0;
    for (std::size_t dim = 0; dim < shape.size(); ++dim) flat = flat * shape[dim] + offset[dim] + (dim < run_dim ? index[dim] : 0);
    visit(out.subspan(written, static_cast<std::size_t>(run)), static_cast<std::uint64_t>(flat));
    for (std::size_t dim = run_dim; dim-- > 0;) {
      if (++index[dim] < size[dim]) break;
      index[dim] = 0;
    }
  }
}

struct Distribution {
  double mean, std;
};

Distribution distribution_of(const ParameterSpec& spec, double std, bool generic) {
  constexpr double kGenericStd = 0.1;
  switch (spec.init) {
    case ParamInit::kNormal:
      return {0, std};
    case ParamInit::kZeros:
      return {0, generic ? kGenericStd : 0};
    case ParamInit::kOnes:
      return {1, generic ? kGenericStd : 0};
  }
  throw ShapeError(fmt::format("{} has no known way to be initialised", spec.name));
}

}  // namespace

at::Tensor InitialWeights::read(const ParameterSpec& spec, const Shape& offset, const Shape& size) const {
  check_box(spec, offset, size);
  const auto [mean, std] = distribution_of(spec, std_, generic_);
  if (std == 0) return at::full(size, mean, at::kFloat);
  at::Tensor result = at::empty(size, at::kFloat);
  const std::span<float> out(result.mutable_data_ptr<float>(), static_cast<std::size_t>(result.numel()));
  for_each_run(spec.shape, offset, size, out, [&, m = mean, s = std](std::span<float> run, std::uint64_t first_index) {
    fill_normal(run, seed_, spec.name, first_index, m, s);
  });
  return result;
}

}  // namespace isoshard
