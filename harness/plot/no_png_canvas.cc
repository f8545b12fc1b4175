// SPDX-License-Identifier: Apache-2.0
// Stands in for cairo in a program that must not need it.
#include "core/base/error.h"
#include "harness/plot/canvas.h"

namespace isoshard {

PngCanvas::PngCanvas(int /*width*/, int /*height*/) : surface_(nullptr), context_(nullptr) {
  throw NotBuiltError(
      "PNG figures are not part of this program, which needs no cairo; give the output a name that "
      "ends with .svg");
}
PngCanvas::~PngCanvas() = default;

void PngCanvas::polyline(const std::vector<Point>& /*points*/, Color /*color*/, double /*width*/,
                         std::string_view /*name*/) {}
void PngCanvas::text(Point /*at*/, std::string_view /*words*/, Anchor /*anchor*/, double /*size*/) {
}
std::string PngCanvas::finish() {
  return {};
}

}  // namespace isoshard
