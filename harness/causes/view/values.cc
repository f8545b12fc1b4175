// SPDX-License-Identifier: Apache-2.0
/// Strided loops over one or two tensors, and products by Eigen.
#include "harness/causes/view/values.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <Eigen/Core>
#include <Eigen/Eigenvalues>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/base/error.h"
#include "harness/trace/numbers.h"

namespace isoshard::detail {
namespace {

[[noreturn]] void refuse(std::string_view what, const Shape& a, const Shape& b) {
  throw ShapeError(fmt::format("{} of values: shapes must fit, got [{}] and [{}]", what,
                               fmt::join(a, ", "), fmt::join(b, ", ")));
}

Shape contiguous_stride(const Shape& shape) {
  Shape stride(shape.size(), 1);
  for (std::size_t d = shape.size(); d-- > 1;) stride[d - 1] = stride[d] * shape[d];
  return stride;
}

Shape broadcast_shape(const Shape& a, const Shape& b) {
  Shape shape(std::max(a.size(), b.size()), 1);
  for (std::size_t d = 0; d < shape.size(); ++d) {
    const std::int64_t own = d < a.size() ? a[a.size() - 1 - d] : 1;
    const std::int64_t other = d < b.size() ? b[b.size() - 1 - d] : 1;
    if (own != other && own != 1 && other != 1) refuse("an operation", a, b);
    shape[shape.size() - 1 - d] = own == 1 ? other : own;
  }
  return shape;
}

}  // namespace

/// The runs of numbers in which two tensors can be walked together: dims that lie one after the
/// other in both are one.
class Walk {
 public:
  Walk(const Shape& shape, const Values& a, const Values& b)
      : a_(a.numbers_->data() + a.offset_), b_(b.numbers_->data() + b.offset_) {
    const Shape stride_a = repeated(a, shape), stride_b = repeated(b, shape);
    for (std::size_t d = 0; d < shape.size(); ++d) {
      if (shape[d] == 0) is_empty_ = true;
      if (shape[d] == 1) continue;
      const Dim dim{shape[d], stride_a[d], stride_b[d]};
      if (!dims_.empty() && dims_.back().a == dim.a * dim.size &&
          dims_.back().b == dim.b * dim.size) {
        dims_.back() = {dims_.back().size * dim.size, dim.a, dim.b};
      } else {
        dims_.push_back(dim);
      }
    }
    if (dims_.empty()) dims_.push_back({1, 0, 0});
  }

  /// Calls visit(a, step of a, b, step of b, count) for each run, in row-major order.
  template <class Visit>
  void runs(Visit&& visit) const {
    if (is_empty_) return;
    const Dim& inner = dims_.back();
    Shape index(dims_.size() - 1, 0);
    std::int64_t at_a = 0, at_b = 0;
    while (true) {
      visit(a_ + at_a, inner.a, b_ + at_b, inner.b, inner.size);
      std::size_t d = index.size();
      while (d > 0) {
        const Dim& dim = dims_[d - 1];
        at_a += dim.a;
        at_b += dim.b;
        if (++index[d - 1] < dim.size) break;
        at_a -= dim.a * dim.size;
        at_b -= dim.b * dim.size;
        index[--d] = 0;
      }
      if (d == 0) return;
    }
  }

 private:
  struct Dim {
    std::int64_t size, a, b;
  };

  static Shape repeated(const Values& values, const Shape& shape) {
    Shape stride(shape.size(), 0);
    const std::size_t missing = shape.size() - values.shape_.size();
    for (std::size_t d = 0; d < values.shape_.size(); ++d)
      stride[missing + d] = values.shape_[d] == 1 ? 0 : values.stride_[d];
    return stride;
  }

  const double *a_, *b_;
  std::vector<Dim> dims_;
  bool is_empty_ = false;
};

namespace {

template <class Operation>
Values combined(const Values& a, const Values& b, Operation&& operation) {
  Shape shape = broadcast_shape(a.shape(), b.shape());
  std::vector<double> numbers(static_cast<std::size_t>(numel_of(shape)));
  double* to = numbers.data();
  Walk(shape, a, b)
      .runs([&](const double* x, std::int64_t step_x, const double* y, std::int64_t step_y,
                std::int64_t count) {
        if (step_x == 1 && step_y == 1) {
          for (std::int64_t i = 0; i < count; ++i) to[i] = operation(x[i], y[i]);
        } else {
          for (std::int64_t i = 0; i < count; ++i) to[i] = operation(x[i * step_x], y[i * step_y]);
        }
        to += count;
      });
  return {std::move(shape), std::move(numbers)};
}

/// Sum of what `term` makes of each pair of numbers, in eight lanes and blocks, so that it is quick
/// and its rounding error small.
template <class Term>
double reduced(const Values& a, const Values& b, Term&& term) {
  constexpr std::int64_t kLanes = 8, kBlock = 1024;
  const Shape shape = broadcast_shape(a.shape(), b.shape());
  double total = 0;
  Walk(shape, a, b)
      .runs([&](const double* x, std::int64_t step_x, const double* y, std::int64_t step_y,
                std::int64_t count) {
        for (std::int64_t begin = 0; begin < count; begin += kBlock) {
          const std::int64_t end = std::min(count, begin + kBlock);
          std::array<double, kLanes> lanes{};
          std::int64_t i = begin;
          if (step_x == 1 && step_y == 1) {
            for (; i + kLanes <= end; i += kLanes) {
              for (std::int64_t lane = 0; lane < kLanes; ++lane)
                lanes[static_cast<std::size_t>(lane)] += term(x[i + lane], y[i + lane]);
            }
          }
          for (; i < end; ++i) lanes[0] += term(x[i * step_x], y[i * step_y]);
          total += std::accumulate(lanes.begin(), lanes.end(), 0.0);
        }
      });
  return total;
}

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Vector = Eigen::VectorXd;

Eigen::Map<const Matrix> matrix_of(const Values& contiguous) {
  return {contiguous.flat().data(), contiguous.size(0), contiguous.size(1)};
}

}  // namespace

Values::Values(Shape shape, std::vector<double> numbers)
    : shape_(std::move(shape)),
      stride_(contiguous_stride(shape_)),
      numbers_(std::make_shared<const std::vector<double>>(std::move(numbers))) {
  if (numel() != static_cast<std::int64_t>(numbers_->size()))
    refuse("numbers", shape_, {static_cast<std::int64_t>(numbers_->size())});
}

Values::Values(const HostTensor& tensor) : Values(tensor.shape, numbers_of(tensor)) {}

Values Values::zeros(Shape shape) {
  std::vector<double> numbers(static_cast<std::size_t>(numel_of(shape)));
  return {std::move(shape), std::move(numbers)};
}

std::int64_t Values::size(std::int64_t dim) const {
  const std::int64_t at = dim < 0 ? dim + this->dim() : dim;
  if (at < 0 || at >= this->dim()) refuse("a size", shape_, {dim});
  return shape_[static_cast<std::size_t>(at)];
}

double Values::item() const {
  if (!defined() || numel() != 1) refuse("the only number", shape_, {1});
  return (*numbers_)[static_cast<std::size_t>(offset_)];
}

bool Values::is_contiguous() const noexcept {
  std::int64_t step = 1;
  for (std::size_t d = shape_.size(); d-- > 0;) {
    if (shape_[d] != 1 && stride_[d] != step) return false;
    step *= shape_[d];
  }
  return true;
}

std::span<const double> Values::flat() const {
  if (!defined() || !is_contiguous()) refuse("a row of numbers", shape_, stride_);
  return {numbers_->data() + offset_, static_cast<std::size_t>(numel())};
}

Values Values::contiguous() const {
  if (is_contiguous()) return *this;
  return combined(*this, *this, [](double a, double) { return a; });
}

Values Values::narrow(std::int64_t dim, std::int64_t begin, std::int64_t length) const {
  if (begin < 0 || length < 0 || begin + length > size(dim))
    refuse("a part", shape_, {dim, begin, length});
  Values part = *this;
  const auto d = static_cast<std::size_t>(dim < 0 ? dim + this->dim() : dim);
  part.offset_ += begin * stride_[d];
  part.shape_[d] = length;
  return part;
}

Values Values::cut(const Shape& offset, const Shape& size) const {
  Values part = *this;
  for (std::size_t d = 0; d < size.size(); ++d)
    part = part.narrow(static_cast<std::int64_t>(d), offset[d], size[d]);
  return part;
}

Values Values::reshape(Shape shape) const {
  std::int64_t known = 1;
  for (const std::int64_t size : shape) known *= size == -1 ? 1 : size;
  for (std::int64_t& size : shape) {
    if (size == -1) size = known == 0 ? 0 : numel() / known;
  }
  if (numel_of(shape) != numel()) refuse("a new shape", shape_, shape);
  Values result = contiguous();
  result.stride_ = contiguous_stride(shape);
  result.shape_ = std::move(shape);
  return result;
}

Values Values::to_front(std::int64_t dim) const {
  (void)size(dim);
  Values moved = *this;
  const auto end = static_cast<std::ptrdiff_t>(dim) + 1;
  std::rotate(moved.shape_.begin(), moved.shape_.begin() + end - 1, moved.shape_.begin() + end);
  std::rotate(moved.stride_.begin(), moved.stride_.begin() + end - 1, moved.stride_.begin() + end);
  return moved;
}

Values Values::take(std::span<const std::int64_t> rows) const {
  std::vector<Values> parts;
  for (const std::int64_t row : rows) parts.push_back(narrow(0, row, 1));
  return concatenated(parts);
}

double Values::sum() const {
  return reduced(*this, *this, [](double a, double) { return a; });
}

Values Values::sum(std::int64_t dim) const {
  const Values front = to_front(dim);
  Shape shape(front.shape_.begin() + 1, front.shape_.end());
  std::vector<double> sums(static_cast<std::size_t>(numel_of(shape)));
  for (std::int64_t i = 0; i < front.size(0); ++i) {
    const Values slice = front.narrow(0, i, 1).contiguous();
    const std::span<const double> numbers = slice.flat();
    for (std::size_t k = 0; k < sums.size(); ++k) sums[k] += numbers[k];
  }
  return {std::move(shape), std::move(sums)};
}

Values Values::mean(std::int64_t dim) const {
  return sum(dim) / static_cast<double>(size(dim));
}

double Values::min() const {
  const Values own = contiguous();
  return own.numel() == 0 ? 0 : std::ranges::min(own.flat());
}

double Values::max() const {
  const Values own = contiguous();
  return own.numel() == 0 ? 0 : std::ranges::max(own.flat());
}

Values Values::sorted() const {
  const Values own = contiguous();
  std::vector<double> numbers(own.flat().begin(), own.flat().end());
  std::sort(numbers.begin(), numbers.end());
  return {{own.numel()}, std::move(numbers)};
}

Values operator+(const Values& a, const Values& b) {
  return combined(a, b, [](double x, double y) { return x + y; });
}
Values operator-(const Values& a, const Values& b) {
  return combined(a, b, [](double x, double y) { return x - y; });
}
Values operator*(const Values& a, const Values& b) {
  return combined(a, b, [](double x, double y) { return x * y; });
}
Values operator/(const Values& a, const Values& b) {
  return combined(a, b, [](double x, double y) { return x / y; });
}
Values operator-(const Values& a, double b) {
  return a.map([b](double x) { return x - b; });
}
Values operator*(double a, const Values& b) {
  return b.map([a](double x) { return a * x; });
}
Values operator/(const Values& a, double b) {
  return a.map([b](double x) { return x / b; });
}

bool equal(const Values& a, const Values& b) {
  if (a.shape() != b.shape()) return false;
  bool is_equal = true;
  Walk(a.shape(), a, b)
      .runs([&](const double* x, std::int64_t step_x, const double* y, std::int64_t step_y,
                std::int64_t count) {
        for (std::int64_t i = 0; i < count && is_equal; ++i)
          is_equal = x[i * step_x] == y[i * step_y];
      });
  return is_equal;
}

double norm_of(const Values& values) {
  return std::sqrt(dot(values, values));
}

double distance(const Values& a, const Values& b) {
  return std::sqrt(reduced(a, b, [](double x, double y) { return (x - y) * (x - y); }));
}

double dot(const Values& a, const Values& b) {
  return reduced(a, b, [](double x, double y) { return x * y; });
}

Values concatenated(std::span<const Values> parts, std::int64_t dim) {
  Shape shape = parts.front().to_front(dim).shape();
  const Shape rest(shape.begin() + 1, shape.end());
  shape[0] = 0;
  std::vector<double> numbers;
  for (const Values& part : parts) {
    const Values own = part.to_front(dim).contiguous();
    if (Shape(own.shape().begin() + 1, own.shape().end()) != rest)
      refuse("one after the other", parts.front().shape(), part.shape());
    shape[0] += own.size(0);
    numbers.insert(numbers.end(), own.flat().begin(), own.flat().end());
  }
  const Values front(shape, std::move(numbers));
  if (dim == 0) return front;
  // Back to its place: the dims before it come first again.
  Values result = front;
  for (std::int64_t d = 0; d < dim; ++d) result = result.to_front(dim);
  return result;
}

Values stacked(std::span<const Values> rows) {
  std::vector<double> numbers;
  for (const Values& row : rows) {
    const Values own = row.contiguous();
    if (own.numel() != rows.front().numel()) refuse("rows", rows.front().shape(), row.shape());
    numbers.insert(numbers.end(), own.flat().begin(), own.flat().end());
  }
  return {{static_cast<std::int64_t>(rows.size()), rows.front().numel()}, std::move(numbers)};
}

Values product(const Values& a, const Values& b) {
  if (a.dim() != 2 || b.dim() != 2 || a.size(1) != b.size(0))
    refuse("a product", a.shape(), b.shape());
  const Values left = a.contiguous(), right = b.contiguous();
  std::vector<double> numbers(static_cast<std::size_t>(a.size(0) * b.size(1)));
  Eigen::Map<Matrix>(numbers.data(), a.size(0), b.size(1)).noalias() =
      matrix_of(left) * matrix_of(right);
  return {{a.size(0), b.size(1)}, std::move(numbers)};
}

std::vector<double> best_weights(const Values& rows, const Values& target) {
  const Values own = rows.contiguous(), wanted = target.flattened();
  const auto matrix = matrix_of(own);
  const Eigen::Map<const Vector> vector(wanted.flat().data(), wanted.numel());
  // The pseudo-inverse of the symmetric matrix of the rows' products.
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(matrix * matrix.transpose());
  const double negligible = solver.eigenvalues().cwiseAbs().maxCoeff() *
                            static_cast<double>(own.size(0)) *
                            std::numeric_limits<double>::epsilon();
  const Vector inverse = solver.eigenvalues().unaryExpr(
      [negligible](double value) { return std::fabs(value) > negligible ? 1 / value : 0.0; });
  const Vector weights =
      solver.eigenvectors() *
      (inverse.asDiagonal() * (solver.eigenvectors().transpose() * (matrix * vector)));
  return {weights.data(), weights.data() + weights.size()};
}

Values weighted_sum(const Values& rows, std::span<const double> weights) {
  const Values own(Shape{1, rows.size(0)}, {weights.begin(), weights.end()});
  return product(own, rows).flattened();
}

std::vector<std::int64_t> nearest_rows(const Values& rows, const Values& among) {
  if (rows.dim() != 2 || among.dim() != 2 || rows.size(1) != among.size(1))
    refuse("nearest rows", rows.shape(), among.shape());
  const Values own = rows.contiguous(), others = among.contiguous();
  const auto width = static_cast<std::size_t>(rows.size(1));
  std::vector<std::int64_t> nearest;
  for (std::int64_t i = 0; i < own.size(0); ++i) {
    const double* a = own.flat().data() + static_cast<std::size_t>(i) * width;
    double best = std::numeric_limits<double>::infinity();
    std::int64_t found = 0;
    for (std::int64_t j = 0; j < others.size(0); ++j) {
      const double* b = others.flat().data() + static_cast<std::size_t>(j) * width;
      std::array<double, 8> lanes{};
      std::size_t k = 0;
      for (; k + lanes.size() <= width; k += lanes.size()) {
        for (std::size_t lane = 0; lane < lanes.size(); ++lane)
          lanes[lane] += (a[k + lane] - b[k + lane]) * (a[k + lane] - b[k + lane]);
      }
      for (; k < width; ++k) lanes[0] += (a[k] - b[k]) * (a[k] - b[k]);
      const double squares = std::accumulate(lanes.begin(), lanes.end(), 0.0);
      if (squares >= best) continue;
      best = squares;
      found = j;
    }
    nearest.push_back(found);
  }
  return nearest;
}

double rounded_to(double value, int bits) {
  int exponent = 0;
  const double fraction = std::frexp(value, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(fraction, bits)), exponent - bits);
}

Values floats_in_bits(const Values& recorded, Dtype dtype) {
  // ids and labels are much smaller than the bits of a normal number
  constexpr double kMostIds = 0x1p24, kLargestInput = 1e9, kSmallestInput = 1e-30;
  const double most = dtype == Dtype::kInt64 ? 0x1p63 : 0x1p31;
  if (!recorded.defined() || (dtype != Dtype::kInt32 && dtype != Dtype::kInt64)) return {};
  std::int64_t large = 0, zero = 0;
  const Values own = recorded.contiguous();
  for (const double number : own.flat()) {
    if (number == 0) ++zero;
    if (std::fabs(number) > kMostIds) ++large;
    if (!(std::fabs(number) < most)) return {};
  }
  if (2 * large <= own.numel() - zero) return {};
  Values numbers = own.map([dtype](double bits) -> double {
    const auto whole = static_cast<std::int64_t>(bits);
    return dtype == Dtype::kInt64 ? std::bit_cast<double>(whole)
                                  : std::bit_cast<float>(static_cast<std::int32_t>(whole));
  });
  const bool are_inputs = numbers.all([](double number) {
    return number == 0 || (std::fabs(number) > kSmallestInput && std::fabs(number) < kLargestInput);
  });
  return are_inputs ? numbers : Values();
}

Values log_sum_exp(const Values& values) {
  const Values rows = values.rows();
  const auto width = static_cast<std::size_t>(rows.size(1));
  std::vector<double> results;
  for (std::int64_t row = 0; row < rows.size(0); ++row) {
    const std::span<const double> own =
        rows.flat().subspan(static_cast<std::size_t>(row) * width, width);
    const double largest = std::ranges::max(own);
    double sum = 0;
    for (const double value : own) sum += std::exp(value - largest);
    results.push_back(std::isinf(largest) ? largest : largest + std::log(sum));
  }
  return {Shape(values.shape().begin(), values.shape().end() - 1), std::move(results)};
}

}  // namespace isoshard::detail
