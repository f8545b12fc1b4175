// SPDX-License-Identifier: Apache-2.0
// Pixels by cairo.
#include <cairo.h>
#include <fmt/format.h>

#include "core/base/error.h"
#include "harness/plot/canvas.h"

namespace isoshard {
namespace {

cairo_t* context_of(void* context) {
  return static_cast<cairo_t*>(context);
}

void require_good(cairo_status_t status) {
  if (status != CAIRO_STATUS_SUCCESS)
    throw InfrastructureError(fmt::format("cairo cannot draw: {}", cairo_status_to_string(status)));
}

void set_color(cairo_t* context, Color color) {
  constexpr double kFull = 255;
  cairo_set_source_rgb(context, color.red / kFull, color.green / kFull, color.blue / kFull);
}

}  // namespace

PngCanvas::PngCanvas(int width, int height)
    : surface_(cairo_image_surface_create(CAIRO_FORMAT_RGB24, width, height)),
      context_(cairo_create(static_cast<cairo_surface_t*>(surface_))) {
  set_color(context_of(context_), {255, 255, 255});
  cairo_paint(context_of(context_));
  cairo_select_font_face(context_of(context_), "DejaVu Sans", CAIRO_FONT_SLANT_NORMAL,
                         CAIRO_FONT_WEIGHT_NORMAL);
}

PngCanvas::~PngCanvas() {
  cairo_destroy(context_of(context_));
  cairo_surface_destroy(static_cast<cairo_surface_t*>(surface_));
}

void PngCanvas::polyline(const std::vector<Point>& points, Color color, double width,
                         std::string_view) {
  cairo_t* const context = context_of(context_);
  set_color(context, color);
  cairo_set_line_width(context, width);
  cairo_set_line_join(context, CAIRO_LINE_JOIN_ROUND);
  cairo_set_line_cap(context, CAIRO_LINE_CAP_ROUND);
  cairo_new_path(context);  // text leaves a point behind
  for (const Point& p : points) cairo_line_to(context, p.x, p.y);
  if (points.size() == 1) cairo_line_to(context, points.front().x, points.front().y);  // a dot
  cairo_stroke(context);
}

void PngCanvas::text(Point at, std::string_view words, Anchor anchor, double size) {
  cairo_t* const context = context_of(context_);
  set_color(context, {});
  cairo_set_font_size(context, size);
  const std::string word(words);
  cairo_text_extents_t extents{};
  cairo_text_extents(context, word.c_str(), &extents);
  const double share = anchor == Anchor::kStart ? 0 : anchor == Anchor::kMiddle ? 0.5 : 1;
  cairo_move_to(context, at.x - share * extents.x_advance, at.y);
  cairo_show_text(context, word.c_str());
}

std::string PngCanvas::finish() {
  require_good(cairo_status(context_of(context_)));
  std::string bytes;
  const auto append = [](void* closure, const unsigned char* data, unsigned int length) {
    static_cast<std::string*>(closure)->append(reinterpret_cast<const char*>(data), length);
    return CAIRO_STATUS_SUCCESS;
  };
  require_good(
      cairo_surface_write_to_png_stream(static_cast<cairo_surface_t*>(surface_), append, &bytes));
  return bytes;
}

}  // namespace isoshard
