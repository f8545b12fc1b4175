// SPDX-License-Identifier: Apache-2.0
// Whether parts cover a tensor exactly once.
//
// Overlap is found by a sweep: boxes are sorted by their begin on the dim with most distinct
// begins, and each is compared with those that begin before it ends. Without overlap, a gap exists
// exactly if the volumes add up to less than the whole; only then is it located, by descending dim
// by dim into the first slab whose volume is short.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <span>
#include <tuple>

#include "core/base/error.h"
#include "core/mesh/layout.h"

namespace isoshard {
namespace {

std::string words_of(const Box& box) {
  return fmt::format("offset [{}] size [{}]", fmt::join(box.global_offset, ", "),
                     fmt::join(box.size, ", "));
}

void require_inside(const Shape& global_shape, const Box& box) {
  bool inside =
      box.global_offset.size() == global_shape.size() && box.size.size() == global_shape.size();
  for (std::size_t d = 0; inside && d < global_shape.size(); ++d) {
    inside = box.global_offset[d] >= 0 && box.size[d] >= 0 &&
             box.global_offset[d] <= global_shape[d] &&
             box.size[d] <= global_shape[d] - box.global_offset[d];
  }
  if (!inside)
    throw MeshError(fmt::format("the box {} must lie inside the tensor [{}]", words_of(box),
                                fmt::join(global_shape, ", ")));
}

bool lexicographic_less(const Box& a, const Box& b) {
  return std::tie(a.global_offset, a.size) < std::tie(b.global_offset, b.size);
}
bool same_place(const Box& a, const Box& b) {
  return a.global_offset == b.global_offset && a.size == b.size;
}

/// Sorted, without replicas and without boxes that hold no element.
std::vector<Box> distinct_boxes(const Shape& global_shape, const std::vector<Box>& parts) {
  std::vector<Box> boxes;
  for (const Box& box : parts) {
    require_inside(global_shape, box);
    if (numel_of(box.size) > 0) boxes.push_back(box);
  }
  std::sort(boxes.begin(), boxes.end(), lexicographic_less);
  boxes.erase(std::unique(boxes.begin(), boxes.end(), same_place), boxes.end());
  return boxes;
}

std::size_t dim_with_most_begins(const std::vector<Box>& boxes, std::size_t num_dims) {
  std::size_t best = 0, best_count = 0;
  for (std::size_t d = 0; d < num_dims; ++d) {
    std::vector<std::int64_t> begins;
    for (const Box& box : boxes) begins.push_back(box.global_offset[d]);
    std::sort(begins.begin(), begins.end());
    const auto count =
        static_cast<std::size_t>(std::unique(begins.begin(), begins.end()) - begins.begin());
    if (count > best_count) std::tie(best, best_count) = std::tuple(d, count);
  }
  return best;
}

/// The first common element, or nothing.
std::optional<Shape> common_element(const Box& a, const Box& b) {
  Shape element(a.size.size());
  for (std::size_t d = 0; d < element.size(); ++d) {
    element[d] = std::max(a.global_offset[d], b.global_offset[d]);
    if (element[d] >= std::min(a.global_offset[d] + a.size[d], b.global_offset[d] + b.size[d]))
      return std::nullopt;
  }
  return element;
}

std::string overlap_problem(std::vector<Box> boxes, std::size_t num_dims) {
  if (num_dims == 0 || boxes.size() < 2) return "";
  const std::size_t d = dim_with_most_begins(boxes, num_dims);
  std::stable_sort(boxes.begin(), boxes.end(), [d](const Box& a, const Box& b) {
    return a.global_offset[d] < b.global_offset[d];
  });
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const std::int64_t end = boxes[i].global_offset[d] + boxes[i].size[d];
    for (std::size_t j = i + 1; j < boxes.size() && boxes[j].global_offset[d] < end; ++j) {
      if (const auto element = common_element(boxes[i], boxes[j])) {
        return fmt::format("overlap: the boxes {} and {} both hold element [{}]",
                           words_of(boxes[i]), words_of(boxes[j]), fmt::join(*element, ", "));
      }
    }
  }
  return "";
}

std::int64_t volume_from(std::span<const std::int64_t> sizes) noexcept {
  std::int64_t product = 1;
  for (const std::int64_t size : sizes) product *= size;
  return product;
}

/// The first element (row-major) that no box holds, given that no two of them overlap and that
/// there is one.
Shape first_gap(const Shape& global_shape, std::vector<const Box*> boxes) {
  Shape element(global_shape.size(), 0);
  for (std::size_t d = 0; d < global_shape.size(); ++d) {
    std::vector<std::int64_t> edges{0};
    for (const Box* box : boxes) {
      edges.push_back(box->global_offset[d]);
      edges.push_back(box->global_offset[d] + box->size[d]);
    }
    std::sort(edges.begin(), edges.end());
    edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
    const std::int64_t whole = volume_from(std::span(global_shape).subspan(d + 1));
    for (const std::int64_t edge : edges) {
      std::vector<const Box*> slab;
      std::int64_t held = 0;
      for (const Box* box : boxes) {
        if (edge < box->global_offset[d] || edge >= box->global_offset[d] + box->size[d]) continue;
        slab.push_back(box);
        held += volume_from(std::span(box->size).subspan(d + 1));
      }
      if (edge >= global_shape[d] || held == whole) continue;
      element[d] = edge;
      boxes = std::move(slab);
      break;
    }
  }
  return element;
}

}  // namespace

std::string tiling_problem(const Shape& global_shape, const std::vector<Box>& parts) {
  const std::vector<Box> boxes = distinct_boxes(global_shape, parts);
  if (std::string problem = overlap_problem(boxes, global_shape.size()); !problem.empty())
    return problem;
  std::int64_t held = 0;
  for (const Box& box : boxes) held += numel_of(box.size);
  if (held == numel_of(global_shape)) return "";
  std::vector<const Box*> pointers;
  for (const Box& box : boxes) pointers.push_back(&box);
  return fmt::format("gap: no rank holds element [{}]; {} of {} elements are held",
                     fmt::join(first_gap(global_shape, std::move(pointers)), ", "), held,
                     numel_of(global_shape));
}

std::string tiling_problem(const Shape& global_shape, const std::vector<FlatRange>& parts) {
  const std::int64_t numel = numel_of(global_shape);
  std::vector<FlatRange> ranges;
  for (const FlatRange& range : parts) {
    if (range.global_begin < 0 || range.count < 0 || range.global_begin > numel ||
        range.count > numel - range.global_begin) {
      throw MeshError(fmt::format(
          "the flat range begin {} count {} must lie inside the tensor [{}] of {} elements",
          range.global_begin, range.count, fmt::join(global_shape, ", "), numel));
    }
    if (range.count > 0) ranges.push_back(range);
  }
  const auto place = [](const FlatRange& range) {
    return std::tuple(range.global_begin, range.count);
  };
  std::sort(ranges.begin(), ranges.end(),
            [&](const FlatRange& a, const FlatRange& b) { return place(a) < place(b); });
  ranges.erase(
      std::unique(ranges.begin(), ranges.end(),
                  [&](const FlatRange& a, const FlatRange& b) { return place(a) == place(b); }),
      ranges.end());
  std::int64_t covered = 0;
  const FlatRange* previous = nullptr;
  for (const FlatRange& range : ranges) {
    if (range.global_begin > covered) break;
    if (range.global_begin < covered) {
      return fmt::format("overlap: the flat ranges [{}, {}) and [{}, {}) both hold element {}",
                         previous->global_begin, covered, range.global_begin,
                         range.global_begin + range.count, range.global_begin);
    }
    covered += range.count;
    previous = &range;
  }
  if (covered < numel)
    return fmt::format("gap: no rank holds flat element {} of {}", covered, numel);
  return "";
}

}  // namespace isoshard
