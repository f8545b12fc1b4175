// SPDX-License-Identifier: Apache-2.0
/// One rank's input of one micro-batch: named tensors and the ids of the samples in it.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace isoshard {

/// Shapes   "input_ids" and "labels" int64 [B,S]; labels of -100 are not counted; labels are not
///          shifted yet. "position_ids" int64 [B,S] of packed documents; else there is none, and
///          positions are 0 to S - 1.
struct Batch {
  std::map<std::string, at::Tensor, std::less<>> tensors;
  std::vector<std::int64_t> sample_ids;  ///< [B], global sample numbers
};

}  // namespace isoshard
