// SPDX-License-Identifier: Apache-2.0
// Initial weights by (seed, name, flat index), any box of them.
#include "subjects/model/weights.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <span>

#include "core/base/error.h"
#include "core/base/philox.h"
#include "core/random/normal.h"

namespace isoshard {
namespace {

constexpr std::int64_t kElementsAtOnce = 1 << 20;  // read in fp32 before they are converted

void check_box(const ParameterSpec& spec, const Shape& offset, const Shape& size) {
  bool inside = offset.size() == spec.shape.size() && size.size() == spec.shape.size();
  for (std::size_t dim = 0; inside && dim < size.size(); ++dim) {
    inside = offset[dim] >= 0 && size[dim] >= 0 && offset[dim] <= spec.shape[dim] &&
             size[dim] <= spec.shape[dim] - offset[dim];
  }
  if (inside) return;
  throw ShapeError(fmt::format("the box at [{}] of size [{}] must lie inside {} [{}]",
                               fmt::join(offset, ", "), fmt::join(size, ", "), spec.name,
                               fmt::join(spec.shape, ", ")));
}

/// Calls `visit(part of out, flat index in the whole tensor)` for each run that is contiguous in
/// both.
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
    for (std::size_t dim = 0; dim < shape.size(); ++dim)
      flat = flat * shape[dim] + offset[dim] + (dim < run_dim ? index[dim] : 0);
    visit(out.subspan(written, static_cast<std::size_t>(run)), static_cast<std::uint64_t>(flat));
    for (std::size_t dim = run_dim; dim-- > 0;) {
      if (++index[dim] < size[dim]) break;
      index[dim] = 0;
    }
  }
}

/// -1, 0 or 1 by (seed, name, flat index), the half of them 0.
void fill_signs(std::span<float> out, const RandomStream& stream, std::uint64_t first_index) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::uint64_t bits = stream.bits(first_index + i);
    out[i] = (bits & 1) == 0 ? 0.0F : (bits & 2) == 0 ? 1.0F : -1.0F;
  }
}

/// The entries of one row: the k-th non-zero one lies at a place and has a sign that depend on
/// (seed, name, row, k).
void set_row(std::span<float> row, const RandomStream& stream, std::uint64_t row_index,
             std::int64_t nonzeros) {
  const auto columns = static_cast<std::uint64_t>(row.size());
  std::uint64_t column = 0;
  for (std::int64_t k = 0; k < nonzeros; ++k) {
    const std::uint64_t bits = stream.bits(row_index * static_cast<std::uint64_t>(nonzeros) +
                                           static_cast<std::uint64_t>(k));
    column = k == 0 ? (bits >> 1) % columns : (column + 1 + (bits >> 1) % (columns - 1)) % columns;
    while (row[column] != 0) column = (column + 1) % columns;
    row[column] = (bits & 1) == 0 ? 1.0F : -1.0F;
  }
}

at::Tensor sparse_rows(const ParameterSpec& spec, const Shape& offset, const Shape& size,
                       std::uint64_t seed) {
  if (spec.shape.size() != 2 || spec.row_nonzeros < 1 || spec.row_nonzeros > spec.shape[1]) {
    throw ShapeError(
        fmt::format("{} [{}] must have rows of at least {} entries, its number of non-zero ones",
                    spec.name, fmt::join(spec.shape, ", "), spec.row_nonzeros));
  }
  const RandomStream stream(seed, spec.name);
  at::Tensor rows = at::zeros({size[0], spec.shape[1]}, at::kFloat);
  auto* data = rows.mutable_data_ptr<float>();
  const auto columns = static_cast<std::size_t>(spec.shape[1]);
  for (std::int64_t row = 0; row < size[0]; ++row) {
    set_row({data + static_cast<std::size_t>(row) * columns, columns}, stream,
            static_cast<std::uint64_t>(offset[0] + row), spec.row_nonzeros);
  }
  return rows.narrow(1, offset[1], size[1]).contiguous();
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
    case ParamInit::kSigns:
    case ParamInit::kSparseRows:
      break;  // no distribution of this kind
  }
  throw ShapeError(fmt::format("{} has no initialization rule", spec.name));
}

}  // namespace

at::Tensor WeightSource::read_as(at::ScalarType type, const ParameterSpec& spec,
                                 const Shape& offset, const Shape& size) const {
  if (numel_of(size) <= kElementsAtOnce || type == at::kFloat)
    return read(spec, offset, size).to(type);
  at::Tensor result = at::empty(size, at::TensorOptions().dtype(type));
  read_into(result, spec, offset, size);
  return result;
}

void WeightSource::read_into(const at::Tensor& result, const ParameterSpec& spec,
                             const Shape& offset, const Shape& size) const {
  const std::int64_t numel = numel_of(size);
  if (numel == 0) return;
  const std::int64_t rows = size.front(),
                     step = std::max<std::int64_t>(1, kElementsAtOnce / (numel / rows));
  Shape part_offset = offset, part_size = size;
  for (std::int64_t first = 0; first < rows; first += step) {
    part_offset.front() = offset.front() + first;
    part_size.front() = std::min(step, rows - first);
    result.narrow(0, first, part_size.front()).copy_(read(spec, part_offset, part_size));
  }
}

at::Tensor InitialWeights::read(const ParameterSpec& spec, const Shape& offset,
                                const Shape& size) const {
  check_box(spec, offset, size);
  if (spec.init == ParamInit::kSparseRows) return sparse_rows(spec, offset, size, seed_);
  if (spec.init == ParamInit::kSigns) {
    at::Tensor signs = at::empty(size, at::kFloat);
    const std::span<float> out(signs.mutable_data_ptr<float>(),
                               static_cast<std::size_t>(signs.numel()));
    const RandomStream stream(seed_, spec.name);
    for_each_run(spec.shape, offset, size, out, [&](std::span<float> run, std::uint64_t first) {
      fill_signs(run, stream, first);
    });
    return signs;
  }
  const auto [mean, std] = distribution_of(spec, std_, generic_);
  if (std == 0) return at::full(size, mean, at::kFloat);
  at::Tensor result = at::empty(size, at::kFloat);
  const std::span<float> out(result.mutable_data_ptr<float>(),
                             static_cast<std::size_t>(result.numel()));
  for_each_run(spec.shape, offset, size, out,
               [&, m = mean, s = std](std::span<float> run, std::uint64_t first_index) {
                 fill_normal(run, seed_, spec.name, first_index, m, s);
               });
  return result;
}

}  // namespace isoshard
