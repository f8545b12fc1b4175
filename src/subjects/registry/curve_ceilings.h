// SPDX-License-Identifier: Apache-2.0
/// How far a subject's loss may be from the reference's after training, where that is less than for
/// all subjects. Without ATen: programs that only judge read it, too.
#pragma once
#include <array>
#include <string_view>
#include <utility>

namespace isoshard {

/// Subject, and its largest relative difference of the loss (seeds/001).
inline constexpr std::array<std::pair<std::string_view, double>, 1> kCurveCeilings{
    {{"fsdp_tp", 0.02}}};

/// Subject, and what the largest and the mean absolute difference of its losses must be below
/// (seeds/001, "Loss Curve Matching").
struct PublishedCurveLimits {
  std::string_view subject;
  double largest, mean;
};
inline constexpr std::array<PublishedCurveLimits, 2> kPublishedCurveLimits{
    {{"fsdp_tp", 0.02, 0.001}, {"autotp", 0.5, 0.15}}};

}  // namespace isoshard
