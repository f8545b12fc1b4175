// SPDX-License-Identifier: Apache-2.0
// Masks run by run of consecutive elements.
#include "subjects/model/ops/rng_streams.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <span>
#include <string>

#include "core/base/error.h"
#include "core/random/keep_bits.h"

namespace isoshard {
namespace {

void check(const MaskPart& part) {
  bool fits = !part.size.empty() && part.offset.size() == part.size.size() &&
              part.global_shape.size() == part.size.size();
  for (std::size_t d = 0; fits && d < part.size.size(); ++d) {
    fits = part.offset[d] >= 0 && part.size[d] >= 0 &&
           (d == 0 || part.offset[d] + part.size[d] <= part.global_shape[d]);
  }
  if (fits && part.rate >= 0 && part.rate < 1) return;
  throw ShapeError(
      fmt::format("the mask of {} must have a rate in [0, 1) and a part inside [{}], got rate {} "
                  "and the part [{}] at [{}]",
                  part.site, fmt::join(part.global_shape, ", "), part.rate,
                  fmt::join(part.size, ", "), fmt::join(part.offset, ", ")));
}

// The dims from this one on are whole in the part, so that their elements follow each other in the
// whole tensor.
std::size_t first_whole_dim(const MaskPart& part) {
  std::size_t d = part.size.size();
  while (d > 1 && part.size[d - 1] == part.global_shape[d - 1]) --d;
  return d;
}

}  // namespace

at::Tensor RngStreams::keep_mask(const MaskPart& part) const {
  check(part);
  const std::string stream = fmt::format("dropout {} step {}", part.site, part.step);
  at::Tensor mask = at::empty(part.size, at::TensorOptions().dtype(at::kBool));
  const std::size_t dims = part.size.size(), run_dim = first_whole_dim(part) - 1;
  std::vector<std::uint64_t> strides(dims, 1);
  for (std::size_t d = dims - 1; d > 0; --d)
    strides[d - 1] = strides[d] * static_cast<std::uint64_t>(part.global_shape[d]);
  const std::size_t run = static_cast<std::size_t>(part.size[run_dim]) * strides[run_dim];
  auto* const out = static_cast<std::uint8_t*>(mask.mutable_data_ptr());
  std::vector<std::int64_t> place(run_dim, 0);
  for (std::size_t done = 0; run > 0 && done < static_cast<std::size_t>(mask.numel());
       done += run) {
    std::uint64_t first = static_cast<std::uint64_t>(part.offset[run_dim]) * strides[run_dim];
    for (std::size_t d = 0; d < run_dim; ++d)
      first += static_cast<std::uint64_t>(part.offset[d] + place[d]) * strides[d];
    fill_keep(std::span(out + done, run), seed_, stream, first, part.rate);
    for (std::size_t d = run_dim; d-- > 0 && ++place[d] == part.size[d];) place[d] = 0;
  }
  return mask;
}

}  // namespace isoshard
