// SPDX-License-Identifier: Apache-2.0
// Naive reductions.
#include "suite/emulation/emulated_reduction.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

#include "core/base/error.h"

namespace isoshard {
namespace {

using Order = std::vector<std::size_t>;

Order order_of(const ReductionPoint& point, std::size_t size) {
  Order order(size);
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (point.addends.empty()) return order;
  const Order given(point.addends.begin(), point.addends.end());
  if (!std::is_permutation(given.begin(), given.end(), order.begin(), order.end())) {
    throw UsageError(fmt::format(
        "a group of {} cannot add its ranks in the order [{}]; name each of 0 to {} once", size,
        fmt::join(point.addends, ", "), size - 1));
  }
  return given;
}

// The reduction of tensors of T, added as A, a block of elements at a time.
template <class T, class A>
class Elements {
 public:
  Elements(std::span<const at::Tensor> parts, at::Tensor& out)
      : count_(out.numel()), out_(out.mutable_data_ptr<T>()) {
    for (const at::Tensor& part : parts) sources_.push_back(part.const_data_ptr<T>());
  }

  void reduce(const ReductionPoint& point) {
    average_ = point.reduction == Reduction::kAvg;
    maximum_ = point.reduction == Reduction::kMax;
    before_ = point.before;
    after_ = point.after;
    switch (point.order) {
      case ReductionOrder::kOrdered:
        return for_blocks(0, count_,
                          [this, order = order_of(point, sources_.size()), &point](
                              std::int64_t begin, std::int64_t size) {
                            add_in_order(order, point.rounds_every_add, begin, size);
                          });
      case ReductionOrder::kRing:
        return along_ring(point.chunks);
      case ReductionOrder::kTree:
        return for_blocks(0, count_, [this](std::int64_t begin, std::int64_t size) {
          add_in_pairs(begin, size);
        });
      case ReductionOrder::kNative:
        throw UsageError(
            "the order native is whatever a library does and cannot be written out; use ordered, "
            "ring or tree");
    }
  }

 private:
  static constexpr std::int64_t kBlock = 1024;
  using Block = std::array<A, kBlock>;

  template <class Visit>
  static void for_blocks(std::int64_t begin, std::int64_t end, Visit visit) {
    for (std::int64_t first = begin; first < end; first += kBlock)
      visit(first, std::min(kBlock, end - first));
  }

  static A rounded(A value) { return static_cast<A>(static_cast<T>(value)); }

  static A scaled(A value, const ReductionFactor& factor) {
    if (factor.value == 1) return value;
    const A number = static_cast<A>(factor.value);
    return rounded(factor.divides ? value / number : value * number);
  }

  // A maximum keeps NaN; of two equal values it keeps the first.
  [[nodiscard]] A combined(A sum, A value) const {
    if (maximum_) return value > sum || value != value ? value : sum;
    return sum + value;
  }

  // Chunk c of n starts on rank c + 1 and ends on rank c.
  void along_ring(const std::vector<std::int64_t>& chunks) {
    const auto ranks = static_cast<std::int64_t>(sources_.size());
    const std::int64_t equal = (count_ + ranks - 1) / ranks;
    std::int64_t first = 0;
    for (std::int64_t c = 0; c < ranks; ++c) {
      Order order;
      for (std::int64_t k = 0; k < ranks; ++k)
        order.push_back(static_cast<std::size_t>((c + 1 + k) % ranks));
      const std::int64_t last =
          std::min(count_, first + (chunks.empty() ? equal : chunks[static_cast<std::size_t>(c)]));
      for_blocks(first, last, [&](std::int64_t begin, std::int64_t size) {
        add_in_order(order, true, begin, size);
      });
      first = last;
    }
  }

  [[nodiscard]] A loaded(T value) const { return scaled(static_cast<A>(value), before_); }

  void load(std::size_t rank, std::int64_t begin, std::int64_t size, Block& values) const {
    for (std::int64_t i = 0; i < size; ++i)
      values[static_cast<std::size_t>(i)] = loaded(sources_[rank][begin + i]);
  }

  void store(const Block& sums, std::int64_t begin, std::int64_t size) {
    const A divisor = average_ ? static_cast<A>(sources_.size()) : A(1);
    for (std::int64_t i = 0; i < size; ++i) {
      const A reduced = rounded(sums[static_cast<std::size_t>(i)] / divisor);
      out_[begin + i] = static_cast<T>(scaled(reduced, after_));
    }
  }

  void add_in_order(const Order& order, bool rounds, std::int64_t begin, std::int64_t size) {
    Block sums;
    load(order[0], begin, size, sums);
    for (std::size_t k = 1; k < order.size(); ++k) {
      const T* const source = sources_[order[k]] + begin;
      for (std::int64_t i = 0; i < size; ++i) {
        A& sum = sums[static_cast<std::size_t>(i)];
        sum = combined(sum, loaded(source[i]));
        if (rounds) sum = rounded(sum);
      }
    }
    store(sums, begin, size);
  }

  void add_in_pairs(std::int64_t begin, std::int64_t size) {
    const std::size_t n = sources_.size();
    blocks_.resize(n);
    for (std::size_t r = 0; r < n; ++r) load(r, begin, size, blocks_[r]);
    for (std::size_t distance = 1; distance < n; distance *= 2) {
      for (std::size_t r = 0; r + distance < n; r += 2 * distance) {
        for (std::size_t i = 0; i < static_cast<std::size_t>(size); ++i)
          blocks_[r][i] = rounded(combined(blocks_[r][i], blocks_[r + distance][i]));
      }
    }
    store(blocks_[0], begin, size);
  }

  std::int64_t count_;
  T* out_;
  bool average_ = false, maximum_ = false;
  ReductionFactor before_, after_;
  std::vector<const T*> sources_;
  std::vector<Block> blocks_;  // of a tree
};

template <class T, class A>
void reduce_elements(std::span<const at::Tensor> parts, const ReductionPoint& point,
                     at::Tensor& out) {
  Elements<T, A>(parts, out).reduce(point);
}

void check_parts(std::span<const at::Tensor> parts) {
  if (parts.empty()) throw ShapeError("a reduction of nothing");
  for (const at::Tensor& part : parts) {
    if (part.sizes() != parts[0].sizes() || part.scalar_type() != parts[0].scalar_type()) {
      throw ShapeError(
          fmt::format("emulated ranks reduce different tensors: {} [{}] and {} [{}]",
                      at::toString(parts[0].scalar_type()), fmt::join(parts[0].sizes(), ", "),
                      at::toString(part.scalar_type()), fmt::join(part.sizes(), ", ")));
    }
  }
}

void check_point(const ReductionPoint& point, std::span<const at::Tensor> parts) {
  if (!point.chunks.empty() && (point.chunks.size() != parts.size() ||
                                std::accumulate(point.chunks.begin(), point.chunks.end(),
                                                std::int64_t{0}) != parts[0].numel())) {
    throw UsageError(
        fmt::format("a declared arithmetic cuts {} elements of {} ranks into chunks of {}",
                    parts[0].numel(), parts.size(), fmt::join(point.chunks, ", ")));
  }
  if (point.reduction == Reduction::kMin) {
    throw UsageError(
        fmt::format("a declared arithmetic cannot reduce by {}; sum, avg and max are written out",
                    name_of(point.reduction)));
  }
}

at::Tensor reduced(std::span<const at::Tensor> parts, const ReductionPoint& point) {
  at::Tensor out = at::empty(parts[0].sizes(), at::TensorOptions().dtype(parts[0].scalar_type()));
  switch (parts[0].scalar_type()) {
    case at::kDouble:
      reduce_elements<double, double>(parts, point, out);
      return out;
    case at::kFloat:
      reduce_elements<float, float>(parts, point, out);
      return out;
    case at::kBFloat16:
      reduce_elements<at::BFloat16, float>(parts, point, out);
      return out;
    case at::kHalf:
      reduce_elements<at::Half, float>(parts, point, out);
      return out;
    case at::kLong:
      reduce_elements<std::int64_t, std::int64_t>(parts, point, out);
      return out;
    default:
      throw ShapeError(
          fmt::format("an emulated reduction of {}: only floats and int64 are written out",
                      at::toString(parts[0].scalar_type())));
  }
}

}  // namespace

at::ScalarType float_type_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64:
      return at::kDouble;
    case Dtype::kFloat32:
      return at::kFloat;
    case Dtype::kBFloat16:
      return at::kBFloat16;
    case Dtype::kFloat16:
      return at::kHalf;
    default:
      throw ShapeError(fmt::format("a declared arithmetic in {}: give a float", name_of(dtype)));
  }
}

at::Tensor fp64_tensor(const std::vector<double>& values) {
  return at::tensor(at::ArrayRef<double>(values.data(), values.size()), at::kDouble);
}

at::Tensor emulated_reduction(std::span<const at::Tensor> parts, const ReductionPoint& point) {
  check_parts(parts);
  check_point(point, parts);
  const at::NoGradGuard no_grad;
  if (parts.size() == 1) return parts[0].detach().clone(at::MemoryFormat::Contiguous);
  const at::ScalarType own = parts[0].scalar_type();
  const at::ScalarType added_in = point.dtype.has_value() ? float_type_of(*point.dtype) : own;
  std::vector<at::Tensor> contiguous;
  for (const at::Tensor& part : parts)
    contiguous.push_back(part.detach().to(at::kCPU, added_in).contiguous());
  return reduced(contiguous, point).to(parts[0].device(), own);
}

}  // namespace isoshard
