// SPDX-License-Identifier: Apache-2.0
/// The canvases that figures are drawn on: SVG text of our own, or pixels by cairo.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace isoshard {

/// In pixels from the upper left corner.
struct Point {
  double x = 0, y = 0;
};
struct Color {
  std::uint8_t red = 0, green = 0, blue = 0;
};
enum class Anchor : std::uint8_t { kStart, kMiddle, kEnd };

/// Determinism   the same calls give the same bytes (pixels of text depend on the fonts of the
///               machine).
class Canvas {
 public:
  virtual ~Canvas() = default;
  /// `name` says what the line shows ("loss: DDP (TP=1, DP=2)"); empty: an axis or a grid line.
  virtual void polyline(const std::vector<Point>& points, Color color, double width,
                        std::string_view name) = 0;
  /// On the base line `at`; sizes in pixels.
  virtual void text(Point at, std::string_view words, Anchor anchor, double size) = 0;
};

/// Guarantees   well-formed XML; lines are <polyline> with the name as data-series, text is <text>,
///              any installed fonts.
class SvgCanvas final : public Canvas {
 public:
  SvgCanvas(int width, int height);
  void polyline(const std::vector<Point>& points, Color color, double width,
                std::string_view name) override;
  void text(Point at, std::string_view words, Anchor anchor, double size) override;
  /// Returns the whole file. Call it last: nothing may be drawn afterwards.
  [[nodiscard]] std::string finish();

 private:
  std::string text_;
};

/// Errors   InfrastructureError if cairo cannot draw (no memory).
class PngCanvas final : public Canvas {
 public:
  PngCanvas(int width, int height);
  PngCanvas(const PngCanvas&) = delete;
  PngCanvas& operator=(const PngCanvas&) = delete;
  ~PngCanvas() override;
  void polyline(const std::vector<Point>& points, Color color, double width,
                std::string_view name) override;
  void text(Point at, std::string_view words, Anchor anchor, double size) override;
  /// The whole file.
  [[nodiscard]] std::string finish();

 private:
  void* surface_;  ///< cairo's types are in the source only
  void* context_;
};

}  // namespace isoshard
