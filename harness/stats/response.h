// SPDX-License-Identifier: Apache-2.0
/// How far the reference itself moves when its weights move by one ulp.
#pragma once

namespace isoshard {

/// The largest movement of one record over the perturbed runs of the reference.
struct Response {
  double relative_error = 0;  ///< Frobenius, relative to the reference
  double scale_error = 0;     ///< abs(best-fit scale - 1)
  double absolute_norm = 0;   ///< Frobenius norm of the difference
  double max_abs = 0;
  double reference_norm = 0;     ///< of the elements compared
  double reference_max_abs = 0;  ///< largest magnitude among them
  int runs = 0;
};

}  // namespace isoshard
