// SPDX-License-Identifier: Apache-2.0
// SVG 1.1 by hand: cairo's would turn text into outlines of a font of this machine.
#include <fmt/format.h>

#include "core/base/printable.h"
#include "harness/plot/canvas.h"

namespace isoshard {
namespace {

std::string escaped(std::string_view words) {
  std::string result;
  for (const char c : words) {
    if (const std::string_view entity = entity_of(c); !entity.empty()) {
      result += entity;
    } else {
      result += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
    }
  }
  return result;
}

std::string_view name_of(Anchor anchor) {
  return anchor == Anchor::kStart ? "start" : anchor == Anchor::kMiddle ? "middle" : "end";
}

}  // namespace

SvgCanvas::SvgCanvas(int width, int height)
    : text_(fmt::format("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<svg "
                        "xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" "
                        "viewBox=\"0 0 {0} {1}\" font-family=\"DejaVu Sans, Helvetica, Arial, "
                        "sans-serif\">\n<rect width=\"{0}\" "
                        "height=\"{1}\" fill=\"white\"/>\n",
                        width, height)) {}

void SvgCanvas::polyline(const std::vector<Point>& points, Color color, double width,
                         std::string_view name) {
  std::string places;
  for (const Point& p : points)
    places += fmt::format("{}{:.2f},{:.2f}", places.empty() ? "" : " ", p.x, p.y);
  const std::string series = name.empty() ? "" : fmt::format(" data-series=\"{}\"", escaped(name));
  text_ += fmt::format(
      "<polyline{} fill=\"none\" stroke=\"#{:02x}{:02x}{:02x}\" stroke-width=\"{:.2f}\" "
      "points=\"{}\"/>\n",
      series, color.red, color.green, color.blue, width, places);
}

void SvgCanvas::text(Point at, std::string_view words, Anchor anchor, double size) {
  text_ += fmt::format(
      "<text x=\"{:.2f}\" y=\"{:.2f}\" font-size=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", at.x,
      at.y, size, name_of(anchor), escaped(words));
}

std::string SvgCanvas::finish() {
  return std::move(text_) + "</svg>\n";
}

}  // namespace isoshard
