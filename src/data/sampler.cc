// SPDX-License-Identifier: Apache-2.0
// The contiguous split of a global batch over dp.
#include "data/sampler.h"

#include <fmt/format.h>

#include "base/error.h"

namespace isoshard {

SampleRange samples_of(int step, int dp_degree, int dp_coordinate, std::int64_t batch_size) {
  if (step < 0 || dp_degree < 1 || dp_coordinate < 0 || dp_coordinate >= dp_degree || batch_size < 1) {
    throw UsageError(
        fmt::format("no samples for step {}, dp coordinate {} of {}, batch size {}: the batch size must be at least 1 and the "
                    "coordinate below the degree",
                    step, dp_coordinate, dp_degree, batch_size));
  }
  return {(static_cast<std::int64_t>(step) * dp_degree + dp_coordinate) * batch_size, batch_size};
}

}  // namespace isoshard
