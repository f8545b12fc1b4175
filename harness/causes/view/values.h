// SPDX-License-Identifier: Apache-2.0
/// Tensors of fp64 numbers: the few operations that a diagnosis needs, without ATen.
///
/// Sizes   shapes follow NumPy: a size of 1, or a missing leading dim, is repeated to fit the other
///         operand. Other sizes must agree.
/// Errors  ShapeError where shapes do not fit, or a dim, a place or the only number is not there.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/base/host_tensor.h"
#include "core/mesh/layout.h"

namespace isoshard::detail {

/// A tensor of doubles. Copies, and narrow, movedim and transpose, are views of the same numbers,
/// which nobody changes.
class Values {
 public:
  /// Undefined: no shape and no numbers.
  Values() = default;
  Values(Shape shape, std::vector<double> numbers);
  explicit Values(const HostTensor& tensor);
  [[nodiscard]] static Values zeros(Shape shape);

  [[nodiscard]] bool defined() const noexcept { return numbers_ != nullptr; }
  [[nodiscard]] const Shape& shape() const noexcept { return shape_; }
  [[nodiscard]] std::int64_t dim() const noexcept {
    return static_cast<std::int64_t>(shape_.size());
  }
  /// -1 is the last dim.
  [[nodiscard]] std::int64_t size(std::int64_t dim) const;
  [[nodiscard]] std::int64_t numel() const noexcept { return numel_of(shape_); }
  /// The only number.
  [[nodiscard]] double item() const;
  /// In row-major order. Valid as long as this object, if it is contiguous(), lives.
  [[nodiscard]] std::span<const double> flat() const;
  [[nodiscard]] bool is_contiguous() const noexcept;
  /// The same numbers in row-major order, copied only if they are not.
  [[nodiscard]] Values contiguous() const;

  [[nodiscard]] Values narrow(std::int64_t dim, std::int64_t begin, std::int64_t length) const;
  /// The part of a box.
  [[nodiscard]] Values cut(const Shape& offset, const Shape& size) const;
  /// One size may be -1: what is left.
  [[nodiscard]] Values reshape(Shape shape) const;
  [[nodiscard]] Values flattened() const { return reshape({-1}); }
  /// [..., n] as a matrix [..., n].
  [[nodiscard]] Values rows() const { return reshape({-1, size(-1)}); }
  /// Moves `dim` to the front.
  [[nodiscard]] Values to_front(std::int64_t dim) const;
  /// Of a matrix.
  [[nodiscard]] Values transposed() const { return to_front(1); }
  /// Rows of dim 0, one after the other.
  [[nodiscard]] Values take(std::span<const std::int64_t> rows) const;

  [[nodiscard]] double sum() const;
  [[nodiscard]] double mean() const { return sum() / static_cast<double>(numel()); }
  /// Sums over one dim, which goes.
  [[nodiscard]] Values sum(std::int64_t dim) const;
  [[nodiscard]] Values mean(std::int64_t dim) const;
  [[nodiscard]] double min() const;
  [[nodiscard]] double max() const;
  [[nodiscard]] Values sorted() const;  ///< as a vector
  template <class Predicate>
  [[nodiscard]] bool all(Predicate&& is_so) const {
    const Values own = contiguous();
    return std::ranges::all_of(own.flat(), is_so);
  }
  template <class Predicate>
  [[nodiscard]] bool any(Predicate&& is_so) const {
    const Values own = contiguous();
    return std::ranges::any_of(own.flat(), is_so);
  }
  template <class Function>
  [[nodiscard]] Values map(Function&& function) const {
    const Values own = contiguous();
    std::vector<double> numbers(own.flat().begin(), own.flat().end());
    for (double& number : numbers) number = function(number);
    return {shape_, std::move(numbers)};
  }

 private:
  friend class Walk;
  Shape shape_, stride_;
  std::int64_t offset_ = 0;
  std::shared_ptr<const std::vector<double>> numbers_;
};

[[nodiscard]] Values operator+(const Values& a, const Values& b);
[[nodiscard]] Values operator-(const Values& a, const Values& b);
[[nodiscard]] Values operator*(const Values& a, const Values& b);
[[nodiscard]] Values operator/(const Values& a, const Values& b);
[[nodiscard]] Values operator-(const Values& a, double b);
[[nodiscard]] Values operator*(double a, const Values& b);
[[nodiscard]] Values operator/(const Values& a, double b);

/// A number rounded to so many significant bits, the leading one counted; ties to even. A dtype's
/// largest and smallest numbers are not known.
[[nodiscard]] double rounded_to(double value, int bits);

/// Inputs of floating point that were recorded as their bits, as the numbers that they are;
/// undefined for anything else.
[[nodiscard]] Values floats_in_bits(const Values& recorded, Dtype dtype);

/// Logarithms of sums of exponentials over the last dim, which goes.
[[nodiscard]] Values log_sum_exp(const Values& values);

/// Same shape and same numbers: -0 equals 0, a NaN equals nothing.
[[nodiscard]] bool equal(const Values& a, const Values& b);
/// Frobenius norm.
[[nodiscard]] double norm_of(const Values& values);
/// Of a - b, which is not made.
[[nodiscard]] double distance(const Values& a, const Values& b);
/// Sum of products of two tensors of one shape.
[[nodiscard]] double dot(const Values& a, const Values& b);

[[nodiscard]] Values concatenated(std::span<const Values> parts, std::int64_t dim = 0);
/// Vectors as the rows of a matrix.
[[nodiscard]] Values stacked(std::span<const Values> rows);

/// Of matrices [m, k] and [k, n].
[[nodiscard]] Values product(const Values& a, const Values& b);
/// The weights with which the matrix's rows, added up, come nearest to the target; of equally good
/// ones the smallest.
[[nodiscard]] std::vector<double> best_weights(const Values& rows, const Values& target);
/// The rows with these weights added up.
[[nodiscard]] Values weighted_sum(const Values& rows, std::span<const double> weights);
/// For each row of a matrix, the number of the row in the other one that is nearest; the first of
/// equally near ones.
[[nodiscard]] std::vector<std::int64_t> nearest_rows(const Values& rows, const Values& among);

}  // namespace isoshard::detail
