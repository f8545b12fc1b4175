// SPDX-License-Identifier: Apache-2.0
// Parts of parameters by the declared cuts and runs.
#include "suite/emulation/emulated_parts.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace isoshard {

const ParameterCut* cut_of(const TensorNumerics& tensor, std::string_view parameter) {
  const auto found = tensor.cuts.find(parameter);
  return found == tensor.cuts.end() ? nullptr : &found->second;
}

const std::vector<Range>& ranges_of(const ParameterCut& cut, int tp_rank) {
  return cut.by_rank.at(static_cast<std::size_t>(tp_rank));
}

at::Tensor part_of(const at::Tensor& whole, const ParameterCut* cut, int tp_rank) {
  if (cut == nullptr) return whole.detach();
  std::vector<at::Tensor> pieces;
  std::int64_t size = 0;
  for (const Range& range : ranges_of(*cut, tp_rank)) {
    pieces.push_back(whole.narrow(cut->dim, range.begin, range.count));
    size += range.count;
  }
  if (size < cut->padded_size) {
    std::vector<std::int64_t> padding = whole.sizes().vec();
    padding[static_cast<std::size_t>(cut->dim)] = cut->padded_size - size;
    pieces.push_back(at::zeros(padding, whole.options()));
  }
  return at::cat(pieces, cut->dim).contiguous();
}

bool is_first_holder(const ParameterCut& cut, int tp_rank) {
  const auto own = cut.by_rank.begin() + tp_rank;
  return std::find(cut.by_rank.begin(), own, *own) == own;
}

Layout layout_of_part(const TensorNumerics& tensor, const ParameterSpec& spec, int tp_rank) {
  Layout layout = replicated(spec.shape);
  const ParameterCut* cut = cut_of(tensor, spec.name);
  if (cut == nullptr) return layout;
  const auto dim = static_cast<std::size_t>(cut->dim);
  std::int64_t local = 0;
  for (const Range& range : ranges_of(*cut, tp_rank)) {
    Box box{Shape(spec.shape.size(), 0), Shape(spec.shape.size(), 0), spec.shape};
    box.local_offset[dim] = local;
    box.global_offset[dim] = range.begin;
    box.size[dim] = range.count;
    local += range.count;
    layout.boxes.push_back(std::move(box));
  }
  layout.explicit_parts = true;
  return layout;
}

// Along the dim that is cut ranges follow each other, and behind them is padding; each is a stretch
// of both tensors.
Layout layout_of_runs(const TensorNumerics& tensor, const ParameterSpec& spec, int tp_rank,
                      const Shape& part, const std::vector<Range>& runs) {
  const ParameterCut* cut = cut_of(tensor, spec.name);
  const auto dim = static_cast<std::size_t>(cut == nullptr ? 0 : cut->dim);
  const std::vector<Range> ranges =
      cut == nullptr ? std::vector<Range>{{0, spec.shape[0]}} : ranges_of(*cut, tp_rank);
  const std::int64_t outer =
      numel_of(Shape(part.begin(), part.begin() + static_cast<std::ptrdiff_t>(dim)));
  const std::int64_t inner =
      numel_of(Shape(part.begin() + static_cast<std::ptrdiff_t>(dim) + 1, part.end()));

  Layout layout = replicated(spec.shape);
  layout.explicit_parts = true;
  const auto add = [&](const Range& run, std::int64_t before_run, std::int64_t local,
                       std::int64_t global, std::int64_t count) {
    const std::int64_t first = std::max(local, run.begin),
                       last = std::min(local + count, run.begin + run.count);
    if (first >= last) return;
    const FlatRange next{before_run + first - run.begin, global + first - local, last - first};
    FlatRange* before = layout.flat.empty() ? nullptr : &layout.flat.back();
    if (before != nullptr && before->local_begin + before->count == next.local_begin &&
        before->global_begin + before->count == next.global_begin) {
      before->count += next.count;
    } else {
      layout.flat.push_back(next);
    }
  };
  std::int64_t before_run = 0;
  for (const Range& run : runs) {
    for (std::int64_t o = 0; o < outer; ++o) {
      std::int64_t local = o * part[dim] * inner;
      for (const Range& range : ranges) {
        add(run, before_run, local, (o * spec.shape[dim] + range.begin) * inner,
            range.count * inner);
        local += range.count * inner;
      }
    }
    before_run += run.count;
  }
  return layout;
}

}  // namespace isoshard
