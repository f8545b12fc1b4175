// SPDX-License-Identifier: Apache-2.0
/// What the trusted run is called wherever runs are named: in traces, bundles and curves.
#pragma once
#include <string_view>

namespace isoshard {

inline constexpr std::string_view kReferenceName = "reference";
/// The subject whose runs others are drawn and printed beside: whole replicas, which split nothing.
inline constexpr std::string_view kBaselineName = "ddp";

}  // namespace isoshard
