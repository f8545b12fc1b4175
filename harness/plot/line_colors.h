// SPDX-License-Identifier: Apache-2.0
/// The colors of figures.
#pragma once
#include <array>

#include "harness/plot/canvas.h"

namespace isoshard {

inline constexpr Color kAxisColor{0, 0, 0}, kGridColor{221, 221, 221};
/// Told apart by the color-blind, too (Okabe and Ito).
inline constexpr std::array<Color, 7> kLineColors{{{0, 114, 178},
                                                   {213, 94, 0},
                                                   {0, 158, 115},
                                                   {204, 121, 167},
                                                   {86, 180, 233},
                                                   {230, 159, 0},
                                                   {90, 90, 90}}};

}  // namespace isoshard
