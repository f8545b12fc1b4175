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

constexpr double kLeft = 70, kRight = 640, kPanelHeight = 300, kFirstTop = 50, kPanelDistance = 390;
constexpr double kTitleSize = 15, kTextSize = 12;
constexpr int kWidth = 960, kMargin = 80;

class Panel {
 public:
  Panel(SvgCanvas& canvas, int number, const SharePanel& panel)
      : canvas_(canvas), panel_(panel), top_(kFirstTop + number * kPanelDistance) {}

  void draw(const std::string& axis_title) const {
    canvas_.text({(kLeft + kRight) / 2, top_ - 14}, panel_.title, Anchor::kMiddle, kTitleSize);
    draw_axes(axis_title);
    for (std::size_t i = 0; i < panel_.lines.size(); ++i) draw_line(i);
  }

 private:
  [[nodiscard]] double x_of(std::size_t place) const {
    const auto gaps = static_cast<double>(std::max<std::size_t>(panel_.places.size(), 2) - 1);
    return kLeft + 20 + static_cast<double>(place) / gaps * (kRight - kLeft - 40);
  }
  [[nodiscard]] double y_of(double share) const { return top_ + (1 - share) * kPanelHeight; }

  void draw_axes(const std::string& axis_title) const {
    constexpr int kTicks = 5;
    for (int i = 0; i <= kTicks; ++i) {
      const double share = static_cast<double>(i) / kTicks;
      canvas_.polyline({{kLeft, y_of(share)}, {kRight, y_of(share)}}, kGridColor, 1, "");
      canvas_.text({kLeft - 8, y_of(share) + 4}, fmt::format("{:.0f} %", 100 * share), Anchor::kEnd,
                   kTextSize);
    }
    for (std::size_t i = 0; i < panel_.places.size(); ++i)
      canvas_.text({x_of(i), y_of(0) + 18}, panel_.places[i], Anchor::kMiddle, kTextSize);
    canvas_.polyline({{kLeft, y_of(1)},
                      {kRight, y_of(1)},
                      {kRight, y_of(0)},
                      {kLeft, y_of(0)},
                      {kLeft, y_of(1)}},
                     kAxisColor, 1, "");
    canvas_.text({(kLeft + kRight) / 2, y_of(0) + 38}, axis_title, Anchor::kMiddle, kTextSize);
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
    canvas_.polyline({{kRight + 14, legend - 4}, {kRight + 40, legend - 4}}, color, width, "");
    canvas_.text({kRight + 48, legend}, line.name, Anchor::kStart, kTextSize);
  }

  SvgCanvas& canvas_;
  const SharePanel& panel_;
  double top_;
};

}  // namespace

std::string share_figure(std::span<const SharePanel> panels, const std::string& axis_title) {
  SvgCanvas canvas(kWidth, static_cast<int>(static_cast<double>(panels.size()) * kPanelDistance) +
                               kMargin - static_cast<int>(kFirstTop));
  int number = 0;
  for (const SharePanel& panel : panels) Panel(canvas, number++, panel).draw(axis_title);
  return canvas.finish();
}

}  // namespace isoshard
