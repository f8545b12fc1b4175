// SPDX-License-Identifier: Apache-2.0
/// Which samples a data-parallel rank takes.
#pragma once
#include <cstdint>

namespace isoshard {

/// Samples `first` to `first + count - 1`, by global number.
struct SampleRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
  friend bool operator==(const SampleRange&, const SampleRange&) = default;
};

/// The contiguous split: in step s the global batch is samples s * dp * batch_size and on; coordinate d takes the d-th run of
/// batch_size. tp ranks of one dp coordinate take the same samples.
/// Errors   UsageError for a batch size or degree < 1 or a coordinate outside the degree.
[[nodiscard]] SampleRange samples_of(int step, int dp_degree, int dp_coordinate, std::int64_t batch_size);

}  // namespace isoshard
