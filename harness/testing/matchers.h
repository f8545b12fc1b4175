// SPDX-License-Identifier: Apache-2.0
/// GoogleMock matchers over runs and tensors, with a full report when they do not match.
#pragma once
#include <ATen/core/Tensor.h>
#include <gmock/gmock.h>

#include "harness/verdict/verdict.h"

namespace isoshard {

/// Matches a Trace that conforms to `reference` under judge(); explains a mismatch with the whole
/// report. An incomplete or vacuous run does not match.
///
///     EXPECT_THAT(actual, conforms_to(reference));
[[nodiscard]] testing::Matcher<const Trace&> conforms_to(Reference reference,
                                                         JudgePolicy options = {});

/// Matches a tensor of the same shape and dtype whose bytes are equal: +0 is not -0, and a NaN
/// equals the same NaN. Explains a mismatch with the first differing element.
///
///     EXPECT_THAT(local, bit_equal_to(whole.narrow(0, 4, 4)));
[[nodiscard]] testing::Matcher<const at::Tensor&> bit_equal_to(at::Tensor expected);

}  // namespace isoshard
