// SPDX-License-Identifier: Apache-2.0
/// The figure of a folder of loss curves: the losses, their differences from the baseline, the
/// gradient norms.
#pragma once
#include <filesystem>
#include <span>
#include <string>

#include "harness/curve/curve.h"
#include "harness/plot/canvas.h"

namespace isoshard {

inline constexpr int kFigureWidth = 1000, kFigureHeight = 1260;

/// Three panels over the steps. In each one line a curve, named "loss: DDP (TP=1, DP=2)" and so on;
/// the baseline (baseline_of) has no line among the differences. A step whose number is not finite
/// has no point: the line ends before it and continues after it.
void draw_losses(Canvas& canvas, std::span<const Curve> curves);

/// The whole file, as its name says: .svg or .png.   Errors   UsageError for another ending.
[[nodiscard]] std::string figure_file(const std::filesystem::path& path,
                                      std::span<const Curve> curves);

}  // namespace isoshard
