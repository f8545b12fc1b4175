// SPDX-License-Identifier: Apache-2.0
/// Steps that are functions of a matrix as a whole, such as Muon's orthogonalized gradient.
#include <algorithm>
#include <cmath>
#include <vector>

#include "harness/causes/run_causes.h"
#include "harness/trace/masked_steps.h"

namespace isoshard::detail {
namespace {

/// The share of a^T b, two matrices of one shape, that is not symmetric: 0 if it is symmetric, and
/// about 1 if a and b have nothing to do with each other.
///
/// It is 0 for each b that has the singular vectors of a, and for their columns alone.
double asymmetry(const Values& a, const Values& b) {
  const std::int64_t rows = a.size(0), columns = a.size(1);
  const auto x = a.flat(), y = b.flat();
  std::vector<double> product(static_cast<std::size_t>(columns * columns), 0.0);
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto of_x = x.subspan(static_cast<std::size_t>(row * columns));
    const auto of_y = y.subspan(static_cast<std::size_t>(row * columns));
    for (std::size_t i = 0; i < static_cast<std::size_t>(columns); ++i)
      for (std::size_t j = 0; j < static_cast<std::size_t>(columns); ++j)
        product[i * static_cast<std::size_t>(columns) + j] += of_x[i] * of_y[j];
  }
  double squares = 0, differences = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(columns); ++i) {
    for (std::size_t j = 0; j < static_cast<std::size_t>(columns); ++j) {
      const double here = product[i * static_cast<std::size_t>(columns) + j];
      const double there = product[j * static_cast<std::size_t>(columns) + i];
      squares += here * here;
      differences += (here - there) * (here - there);
    }
  }
  return squares > 0 ? std::sqrt(differences / squares) / 2 : 1;
}

/// Of both products, so that rows and columns of a part are looked at.
double asymmetry_of_both(const Values& gradient, const Values& step) {
  const Values g = gradient.contiguous(), s = step.contiguous();
  return std::max(asymmetry(g, s),
                  asymmetry(g.transposed().contiguous(), s.transposed().contiguous()));
}

}  // namespace

Cause cause_of_own_matrices(const Evidence& e) {
  constexpr double kSymmetric = 0.01, kClearlyNot = 0.1;
  constexpr std::int64_t kMostMultiplied = std::int64_t{1} << 28;
  const Shape& shape = e.wanted.layout.global_shape;
  if (stage_of(e.wanted.key) != Stage::kParameterAfterStep || shape.size() != 2 ||
      std::min(shape[0], shape[1]) < 2 ||
      shape[0] * shape[1] * std::max(shape[0], shape[1]) > kMostMultiplied)
    return {};
  const RecordKey read = before_step(e.wanted.key);
  const RecordKey made{e.wanted.key.step, RecordKind::kGrad, e.wanted.key.name, 0};
  const std::vector<const View*> bad = e.bad_views();
  if (bad.empty() || e.reference.find(read) == nullptr || e.reference.find(made) == nullptr)
    return {};
  const Values before = e.reference_value(read), gradient = e.reference_value(made);
  if (before.shape() != shape || gradient.shape() != shape) return {};
  if (asymmetry_of_both(gradient, e.whole - before) > kSymmetric) return {};
  bool differs = false;
  for (const View* const view : bad) {
    const Box& box = view->box;
    if (box.size == shape || std::min(box.size[0], box.size[1]) < 2) return {};
    const Values own = gradient.cut(box.global_offset, box.size);
    const Values old = before.cut(box.global_offset, box.size);
    if (asymmetry_of_both(own, view->actual - old) > kSymmetric) return {};
    differs = differs || asymmetry_of_both(own, view->expected - old) > kClearlyNot;
  }
  return differs ? make_cause(CauseId::kStepOfOwnMatrix, {e.on_bad_ranks()}) : Cause();
}

}  // namespace isoshard::detail
