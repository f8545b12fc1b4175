// SPDX-License-Identifier: Apache-2.0
// Panels, axes, lines.
#include "harness/plot/loss_figure.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "harness/curve/curve_statistics.h"
#include "harness/plot/line_colors.h"

namespace isoshard {
namespace {

constexpr double kLeft = 110, kRight = 970, kPanelHeight = 320, kFirstTop = 70,
                 kPanelDistance = 405;
constexpr double kTitleSize = 16, kTextSize = 12;

struct Series {
  std::string name;
  std::size_t color = 0;
  std::vector<double> values;  // by step
};

struct Range {
  double low = 0, high = 1;
  [[nodiscard]] double share(double value) const { return (value - low) / (high - low); }
};

Range range_of(const std::vector<Series>& series) {
  Range range{std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()};
  for (const Series& s : series) {
    for (const double value : s.values) {
      if (!std::isfinite(value)) continue;
      range.low = std::min(range.low, value);
      range.high = std::max(range.high, value);
    }
  }
  if (!(range.low <= range.high)) return {};
  const double width = range.high - range.low,
               scale = std::max(std::fabs(range.low), std::fabs(range.high));
  // All the same, or as good as: room for a line in the middle.
  constexpr double kMargin = 0.05, kSmallest = 1e-12;
  const double margin = width > kSmallest * scale ? kMargin * width
                        : scale > 0               ? kMargin * scale
                                                  : 1;
  return {range.low - margin, range.high + margin};
}

/// Round numbers in the range, about five.
std::vector<double> ticks_of(const Range& range) {
  constexpr double kTicks = 5;
  const double rough = (range.high - range.low) / kTicks,
               power = std::pow(10, std::floor(std::log10(rough)));
  const double step = power * (rough < 1.5 * power   ? 1
                               : rough < 3.5 * power ? 2
                               : rough < 7.5 * power ? 5
                                                     : 10);
  std::vector<double> ticks;
  for (double i = std::ceil(range.low / step); i * step <= range.high; ++i)
    ticks.push_back(i * step);
  return ticks;
}

class Panel {
 public:
  Panel(Canvas& canvas, int place, std::string quantity, std::size_t num_steps)
      : canvas_(canvas),
        quantity_(std::move(quantity)),
        top_(kFirstTop + place * kPanelDistance),
        steps_{0, std::max(1.0, static_cast<double>(num_steps) - 1)} {}

  void draw(const std::string& title, const std::vector<Series>& series) {
    values_ = range_of(series);
    canvas_.text({(kLeft + kRight) / 2, top_ - 12}, title, Anchor::kMiddle, kTitleSize);
    draw_axes();
    double legend = top_ + 18;
    for (std::size_t i = 0; i < series.size(); ++i) {
      // Lines that lie on each other are seen all the same: the later, the thinner.
      const double width = std::max(1.2, 4.5 - 0.9 * static_cast<double>(i));
      draw_line(series[i], width);
      canvas_.polyline({{kRight - 250, legend - 4}, {kRight - 225, legend - 4}},
                       kLineColors.at(series[i].color % kLineColors.size()), width, "");
      canvas_.text({kRight - 217, legend}, series[i].name, Anchor::kStart, kTextSize);
      legend += 17;
    }
  }

 private:
  [[nodiscard]] double x_of(double step) const {
    return kLeft + steps_.share(step) * (kRight - kLeft);
  }
  [[nodiscard]] double y_of(double value) const {
    return top_ + (1 - values_.share(value)) * kPanelHeight;
  }

  void draw_axes() {
    const double bottom = top_ + kPanelHeight;
    for (const double value : ticks_of(values_)) {
      canvas_.polyline({{kLeft, y_of(value)}, {kRight, y_of(value)}}, kGridColor, 1, "");
      const double shown = std::fabs(value) < 1e-9 * (values_.high - values_.low) ? 0 : value;
      canvas_.text({kLeft - 8, y_of(value) + 4}, fmt::format("{:.6g}", shown), Anchor::kEnd,
                   kTextSize);
    }
    for (const double step : ticks_of(steps_)) {
      if (step != std::floor(step)) continue;
      canvas_.polyline({{x_of(step), top_}, {x_of(step), bottom}}, kGridColor, 1, "");
      canvas_.text({x_of(step), bottom + 17}, fmt::format("{:g}", step), Anchor::kMiddle,
                   kTextSize);
    }
    canvas_.polyline(
        {{kLeft, top_}, {kRight, top_}, {kRight, bottom}, {kLeft, bottom}, {kLeft, top_}},
        kAxisColor, 1, "");
    canvas_.text({(kLeft + kRight) / 2, bottom + 36}, "step", Anchor::kMiddle, kTextSize);
  }

  void draw_line(const Series& series, double width) {
    std::vector<Point> points;
    const auto end_line = [&] {
      if (!points.empty())
        canvas_.polyline(points, kLineColors.at(series.color % kLineColors.size()), width,
                         fmt::format("{}: {}", quantity_, series.name));
      points.clear();
    };
    for (std::size_t i = 0; i < series.values.size(); ++i) {
      if (std::isfinite(series.values[i])) {
        points.push_back({x_of(static_cast<double>(i)), y_of(series.values[i])});
      } else {
        end_line();
      }
    }
    end_line();
  }

  Canvas& canvas_;
  std::string quantity_;
  double top_;
  Range steps_, values_;
};

template <class Value>
std::vector<Series> series_of(std::span<const Curve> curves, Value value) {
  std::vector<Series> series;
  for (std::size_t c = 0; c < curves.size(); ++c) {
    Series& s = series.emplace_back();
    s.name = label_of(curves[c]);
    s.color = c;
    for (const CurveStep& step : curves[c].steps) s.values.push_back(value(step));
  }
  return series;
}

std::vector<Series> differences_of(std::span<const Curve> curves, const Curve& baseline) {
  std::vector<Series> series;
  for (std::size_t c = 0; c < curves.size(); ++c) {
    if (&curves[c] == &baseline) continue;
    Series& s = series.emplace_back();
    s.name = label_of(curves[c]);
    s.color = c;
    const std::size_t steps = std::min(curves[c].steps.size(), baseline.steps.size());
    for (std::size_t i = 0; i < steps; ++i)
      s.values.push_back(curves[c].steps[i].loss - baseline.steps[i].loss);
  }
  return series;
}

}  // namespace

void draw_losses(Canvas& canvas, std::span<const Curve> curves) {
  const Curve& baseline = baseline_of(curves);
  std::size_t num_steps = 0;
  for (const Curve& curve : curves) num_steps = std::max(num_steps, curve.steps.size());
  Panel(canvas, 0, "loss", num_steps).draw("Loss", series_of(curves, [](const CurveStep& step) {
                                             return step.loss;
                                           }));
  Panel(canvas, 1, "difference", num_steps)
      .draw(fmt::format("Difference of the loss from {}", label_of(baseline)),
            differences_of(curves, baseline));
  Panel(canvas, 2, "grad_norm", num_steps)
      .draw("Gradient norm before clipping",
            series_of(curves, [](const CurveStep& step) { return step.grad_norm; }));
}

std::string figure_file(const std::filesystem::path& path, std::span<const Curve> curves) {
  if (path.extension() == ".svg") {
    SvgCanvas canvas(kFigureWidth, kFigureHeight);
    draw_losses(canvas, curves);
    return canvas.finish();
  }
  if (path.extension() == ".png") {
    PngCanvas canvas(kFigureWidth, kFigureHeight);
    draw_losses(canvas, curves);
    return canvas.finish();
  }
  throw UsageError(fmt::format("{}: a figure must be a .svg or a .png file", path.string()));
}

}  // namespace isoshard
