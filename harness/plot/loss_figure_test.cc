// SPDX-License-Identifier: Apache-2.0
// Figures show every point of every curve.
#include "harness/plot/loss_figure.h"

#include <cairo.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <regex>

#include "core/base/error.h"

namespace isoshard {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr int kSteps = 50;

Curve curve_of(const std::string& subject, double shift) {
  Curve curve;
  curve.subject = subject;
  curve.mesh = {{"dp", 2}, {"tp", subject == "autotp" ? 2 : 1}};
  for (int i = 0; i < kSteps; ++i)
    curve.steps.push_back({i, 10 - 0.1 * i + shift * i, {}, 1 + 0.01 * i, 1e-3});
  return curve;
}

std::vector<Curve> three_curves() {
  return {curve_of("reference", 0), curve_of("ddp", 0.001), curve_of("autotp", -0.002)};
}

/// Number of points of each named line; lines of one name are added up.
std::map<std::string, int> points_by_series(const std::string& svg) {
  static const std::regex line("<polyline data-series=\"([^\"]*)\"[^>]* points=\"([^\"]*)\"/>");
  std::map<std::string, int> points;
  for (std::sregex_iterator it(svg.begin(), svg.end(), line), end; it != end; ++it) {
    const std::string places = (*it)[2];
    points[(*it)[1]] += static_cast<int>(std::count(places.begin(), places.end(), ','));
  }
  return points;
}

TEST(LossFigure, SvgHasEveryPointOfEverySeries) {
  const std::string svg = figure_file("curves.svg", three_curves());

  const std::map<std::string, int> expected = {
      {"loss: reference (TP=1, DP=2)", kSteps},    {"loss: ddp (TP=1, DP=2)", kSteps},
      {"loss: autotp (TP=2, DP=2)", kSteps},       {"difference: reference (TP=1, DP=2)", kSteps},
      {"difference: autotp (TP=2, DP=2)", kSteps}, {"grad_norm: reference (TP=1, DP=2)", kSteps},
      {"grad_norm: ddp (TP=1, DP=2)", kSteps},     {"grad_norm: autotp (TP=2, DP=2)", kSteps}};
  EXPECT_EQ(points_by_series(svg), expected);
  EXPECT_THAT(svg, HasSubstr(">Difference of the loss from ddp (TP=1, DP=2)</text>"));
  EXPECT_THAT(svg, HasSubstr(">autotp (TP=2, DP=2)</text>"));
}

TEST(LossFigure, StepsOfTheRisingCurveRise) {
  const std::string svg = figure_file("curves.svg", std::vector<Curve>{curve_of("ddp", 0)});

  // The first and last point of the loss, which falls, and so goes down the page.
  std::smatch found;
  ASSERT_TRUE(std::regex_search(
      svg, found,
      std::regex(
          "data-series=\"loss: ddp[^>]*points=\"([0-9.]+),([0-9.]+) .* ([0-9.]+),([0-9.]+)\"/>")));
  EXPECT_LT(std::stod(found[1]), std::stod(found[3]));
  EXPECT_LT(std::stod(found[2]), std::stod(found[4]));
}

TEST(LossFigure, NanHasNoPoint) {
  std::vector<Curve> curves = three_curves();
  curves[1].steps[20].loss = std::numeric_limits<double>::quiet_NaN();

  const std::string svg = figure_file("curves.svg", curves);

  EXPECT_EQ(points_by_series(svg)["loss: ddp (TP=1, DP=2)"], kSteps - 1);
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
}

TEST(LossFigure, SvgIsWellFormed) {
  std::vector<Curve> curves = three_curves();
  curves[2].title = "A <&> \"B\"";

  const std::string svg = figure_file("curves.svg", curves);

  EXPECT_THAT(svg, HasSubstr("A &lt;&amp;&gt; &quot;B&quot; (TP=2, DP=2)"));
  const std::regex tag("<[^<>]*>");
  EXPECT_THAT(std::regex_replace(svg, tag, ""),
              Not(testing::AnyOf(HasSubstr("<"), HasSubstr(">"))));
  EXPECT_TRUE(svg.starts_with("<?xml") && svg.ends_with("</svg>\n"));
}

/// A decoded picture.
struct Picture {
  std::unique_ptr<cairo_surface_t, decltype(&cairo_surface_destroy)> surface;
  [[nodiscard]] int count_of(std::uint32_t rgb) const {
    int count = 0;
    const int stride = cairo_image_surface_get_stride(surface.get());
    for (int y = 0; y < cairo_image_surface_get_height(surface.get()); ++y) {
      for (int x = 0; x < cairo_image_surface_get_width(surface.get()); ++x) {
        std::uint32_t pixel = 0;
        std::memcpy(&pixel, cairo_image_surface_get_data(surface.get()) + y * stride + 4 * x, 4);
        if ((pixel & 0xFFFFFFU) == rgb) ++count;
      }
    }
    return count;
  }
};

Picture decoded(const std::string& png) {
  std::string_view rest = png;
  const auto read = [](void* closure, unsigned char* data, unsigned int length) {
    auto& bytes = *static_cast<std::string_view*>(closure);
    if (bytes.size() < length) return CAIRO_STATUS_READ_ERROR;
    std::memcpy(data, bytes.data(), length);
    bytes.remove_prefix(length);
    return CAIRO_STATUS_SUCCESS;
  };
  return {{cairo_image_surface_create_from_png_stream(read, &rest), cairo_surface_destroy}};
}

TEST(LossFigure, PngHasItsSizeAndTheColorsOfTheLines) {
  const std::string png = figure_file("curves.png", three_curves());

  ASSERT_GT(png.size(), 24U);
  EXPECT_EQ(png.substr(0, 8), "\x89PNG\r\n\x1a\n");
  const Picture picture = decoded(png);
  ASSERT_EQ(cairo_surface_status(picture.surface.get()), CAIRO_STATUS_SUCCESS);
  EXPECT_EQ(cairo_image_surface_get_width(picture.surface.get()), kFigureWidth);
  EXPECT_EQ(cairo_image_surface_get_height(picture.surface.get()), kFigureHeight);
  for (const std::uint32_t color : {0x0072B2U, 0xD55E00U, 0x009E73U})
    EXPECT_GT(picture.count_of(color), 300) << std::hex << color;
  EXPECT_GT(picture.count_of(0xFFFFFFU), kFigureWidth * kFigureHeight / 2);
}

TEST(LossFigure, SameCurvesGiveTheSameBytes) {
  for (const char* name : {"curves.svg", "curves.png"})
    EXPECT_EQ(figure_file(name, three_curves()), figure_file(name, three_curves())) << name;
}

TEST(LossFigure, FlatCurvesAndSingleStepsAreDrawn) {
  Curve flat = curve_of("ddp", 0.1), single = curve_of("autotp", 0);
  for (CurveStep& step : flat.steps) step.loss = 0;
  single.steps.resize(1);

  const std::string svg = figure_file("curves.svg", std::vector<Curve>{flat, single});

  EXPECT_EQ(points_by_series(svg)["loss: ddp (TP=1, DP=2)"], kSteps);
  EXPECT_EQ(points_by_series(svg)["difference: autotp (TP=2, DP=2)"], 1);
  EXPECT_THAT(svg, Not(HasSubstr("inf")));
}

TEST(LossFigure, OtherEndingsAreRefused) {
  EXPECT_THROW((void)figure_file("curves.pdf", three_curves()), UsageError);
  EXPECT_THROW((void)figure_file("curves", three_curves()), UsageError);
}

}  // namespace
}  // namespace isoshard
