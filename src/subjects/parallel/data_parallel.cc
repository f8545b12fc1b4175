// SPDX-License-Identifier: Apache-2.0
// Runs of flattened tensors as flat ranges of the whole one.
#include "subjects/parallel/data_parallel.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace isoshard {
namespace {

// Row-major distances between neighbors along each dim.
Shape strides_of(const Shape& shape) {
  Shape strides(shape.size(), 1);
  for (std::size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * shape[d];
  return strides;
}

// The rows of a box along the last dim, each as a range; `add` gets them in row-major order.
template <class Add>
void for_each_row(const Box& box, const Shape& local, const Shape& whole, Add&& add) {
  const Shape local_strides = strides_of(local), whole_strides = strides_of(whole);
  const std::size_t dims = box.size.size();
  const std::int64_t row = dims == 0 ? 1 : box.size[dims - 1];
  std::int64_t rows = 1;
  for (std::size_t d = 0; d + 1 < dims; ++d) rows *= box.size[d];
  if (row == 0) return;
  for (std::int64_t i = 0; i < rows; ++i) {
    FlatRange range{0, 0, row};
    std::int64_t rest = i;
    for (std::size_t d = dims; d-- > 0;) {
      const bool is_last = d + 1 == dims;
      const std::int64_t at = is_last ? 0 : rest % box.size[d];
      if (!is_last) rest /= box.size[d];
      range.local_begin += (box.local_offset[d] + at) * local_strides[d];
      range.global_begin += (box.global_offset[d] + at) * whole_strides[d];
    }
    add(range);
  }
}

}  // namespace

NamedTensors gradients_of(const NamedTensors& leaves) {
  const at::NoGradGuard no_grad;
  NamedTensors gradients;
  for (const auto& [name, leaf] : leaves)
    gradients[name] = leaf.grad().defined() ? leaf.grad() : at::zeros_like(leaf).detach();
  return gradients;
}

Layout layout_of_run(const Layout& part, const Shape& local, const MeshShape& mesh, int rank,
                     std::int64_t begin, std::int64_t count) {
  std::vector<FlatRange> cuts;
  for (const Box& box : boxes_of(part, mesh, rank)) {
    for_each_row(box, local, part.global_shape, [&](const FlatRange& row) {
      const std::int64_t first = std::max(row.local_begin, begin),
                         last = std::min(row.local_begin + row.count, begin + count);
      if (first < last)
        cuts.push_back({first - begin, row.global_begin + first - row.local_begin, last - first});
    });
  }
  // Rows of boxes that stand beside each other come by turns.
  std::sort(cuts.begin(), cuts.end(),
            [](const FlatRange& a, const FlatRange& b) { return a.local_begin < b.local_begin; });
  Layout run = replicated(part.global_shape);
  run.explicit_parts = true;
  for (const FlatRange& cut : cuts) {
    FlatRange* before = run.flat.empty() ? nullptr : &run.flat.back();
    const bool joins = before != nullptr &&
                       before->local_begin + before->count == cut.local_begin &&
                       before->global_begin + before->count == cut.global_begin;
    if (joins) {
      before->count += cut.count;
    } else {
      run.flat.push_back(cut);
    }
  }
  return run;
}

}  // namespace isoshard
