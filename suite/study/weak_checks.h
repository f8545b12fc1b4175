// SPDX-License-Identifier: Apache-2.0
/// What people usually compare, on a run that was recorded whole.
#pragma once
#include <array>
#include <cstdint>
#include <string_view>

#include "fixtures/cases/case.h"
#include "harness/curve/curve.h"
#include "harness/trace/reference.h"

namespace isoshard {

/// kFirstLoss: the loss of step 0 is within 0.001 (the published limit of initial losses). kCurve:
/// the losses of all steps are within 1 %. kForward: every activation of step 0 is close by the
/// default tolerances of torch.testing.assert_close. kGradients: every gradient of a parameter of
/// step 0 is. kFirstElements: the first 100 elements of each listed module's output in step 0 are
/// within the published absolute limits, 1e-3 in fp32 and 0.15 in bf16.
enum class WeakCheck : std::uint8_t { kFirstLoss, kCurve, kForward, kGradients, kFirstElements };
inline constexpr std::array kWeakChecks = {WeakCheck::kFirstLoss, WeakCheck::kCurve,
                                           WeakCheck::kForward, WeakCheck::kGradients,
                                           WeakCheck::kFirstElements};
/// "first loss within 0.001", "100-step curve within 1 %", ...: for tables and figures.
[[nodiscard]] std::string_view name_of(WeakCheck check) noexcept;

/// By WeakCheck: whether it raises an alarm.
using WeakAlarms = std::array<bool, kWeakChecks.size()>;

/// Relative and absolute tolerances of torch.testing.assert_close for equal dtypes, torch 2.11.
struct TorchTolerance {
  double relative = 0, absolute = 0;
};
[[nodiscard]] TorchTolerance torch_tolerance(Dtype dtype);

/// What the checks say of a run and of its training curve. A NaN on one side is an alarm of every
/// check that looks at it; a curve that ends early is one, too.
///
/// Requires   the run has kept everything.
[[nodiscard]] WeakAlarms weak_alarms(const Reference& reference, const Trace& run,
                                     const Curve& reference_curve, const Curve& curve, Dtype dtype);

}  // namespace isoshard
