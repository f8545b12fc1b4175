// SPDX-License-Identifier: Apache-2.0
// Panels of shares.
#include "harness/plot/share_figure.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>

#include "harness/plot/canvas.h"
#include "harness/plot/line_colors.h"

namespace isoshard {
namespace {

constexpr double kShareLeft = 70, kShareRight = 640, kSharePanelHeight = 300, kShareFirstTop = 50,
                 kSharePanelDistance = 390;
constexpr double kShareTitleSize = 15, kShareTextSize = 12;
constexpr int kShareWidth = 960, kShareMargin = 80;

class ShareDrawing {
 public:
  ShareDrawing(SvgCanvas& canvas, int number, const SharePanel& panel)
      : canvas_(canvas), panel_(panel), top_(kShareFirstTop + number * kSharePanelDistance) {}

  void draw(const std::string& axis_title) const {
    canvas_.text({(kShareLeft + kShareRight) / 2, top_ - 14}, panel_.title, Anchor::kMiddle,
                 kShareTitleSize);
    draw_axes(axis_title);
    for (std::size_t i = 0; i < panel_.lines.size(); ++i) draw_line(i);
  }

 private:
  [[nodiscard]] double x_of(std::size_t place) const {
    const auto gaps = static_cast<double>(std::max<std::size_t>(panel_.places.size(), 2) - 1);
    return kShareLeft + 20 + static_cast<double>(place) / gaps * (kShareRight - kShareLeft - 40);
  }
  [[nodiscard]] double y_of(double share) const { return top_ + (1 - share) * kSharePanelHeight; }

  void draw_axes(const std::string& axis_title) const {
    constexpr int kTicks = 5;
    for (int i = 0; i <= kTicks; ++i) {
      const double share = static_cast<double>(i) / kTicks;
      canvas_.polyline({{kShareLeft, y_of(share)}, {kShareRight, y_of(share)}}, kGridColor, 1, "");
      canvas_.text({kShareLeft - 8, y_of(share) + 4}, fmt::format("{:.0f} %", 100 * share),
                   Anchor::kEnd, kShareTextSize);
    }
    for (std::size_t i = 0; i < panel_.places.size(); ++i)
      canvas_.text({x_of(i), y_of(0) + 18}, panel_.places[i], Anchor::kMiddle, kShareTextSize);
    canvas_.polyline({{kShareLeft, y_of(1)},
                      {kShareRight, y_of(1)},
                      {kShareRight, y_of(0)},
                      {kShareLeft, y_of(0)},
                      {kShareLeft, y_of(1)}},
                     kAxisColor, 1, "");
    canvas_.text({(kShareLeft + kShareRight) / 2, y_of(0) + 38}, axis_title, Anchor::kMiddle,
                 kShareTextSize);
  }

  void draw_line(std::size_t number) const {
    const ShareLine& line = panel_.lines[number];
    const Color color = kLineColors.at(number % kLineColors.size());
    // lines that lie on each other are seen all the same: the later, the thinner
    const double width = std::max(1.2, 5.0 - 0.7 * static_cast<double>(number));
    std::vector<Point> points;
    for (std::size_t i = 0; i < line.shares.size(); ++i)
      if (line.shares[i].has_value()) points.push_back({x_of(i), y_of(*line.shares[i])});
    if (!points.empty())
      canvas_.polyline(points, color, width, fmt::format("{}: {}", panel_.title, line.name));
    const double legend = top_ + 12 + 19 * static_cast<double>(number);
    canvas_.polyline({{kShareRight + 14, legend - 4}, {kShareRight + 40, legend - 4}}, color, width,
                     "");
    canvas_.text({kShareRight + 48, legend}, line.name, Anchor::kStart, kShareTextSize);
  }

  SvgCanvas& canvas_;
  const SharePanel& panel_;
  double top_;
};

}  // namespace

std::string share_figure(std::span<const SharePanel> panels, const std::string& axis_title) {
  SvgCanvas canvas(kShareWidth,
                   static_cast<int>(static_cast<double>(panels.size()) * kSharePanelDistance) +
                       kShareMargin - static_cast<int>(kShareFirstTop));
  int number = 0;
  for (const SharePanel& panel : panels) ShareDrawing(canvas, number++, panel).draw(axis_title);
  return canvas.finish();
}

}  // namespace isoshard
