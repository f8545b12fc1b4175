// SPDX-License-Identifier: Apache-2.0
/// Shares from 0 to 100 % over a few named places, one line a series.
#pragma once
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace isoshard {

struct ShareLine {
  std::string name = {};
  std::vector<std::optional<double>> shares = {};  ///< from 0 to 1, one a place; none: no point
};

struct SharePanel {
  std::string title = {};
  std::vector<std::string> places = {};  ///< at equal distances, from left to right
  std::vector<ShareLine> lines = {};
};

/// The panels one below the other, as the text of an SVG file: a legend, and of each line its
/// points, named "TITLE: NAME".
[[nodiscard]] std::string share_figure(std::span<const SharePanel> panels,
                                       const std::string& axis_title);

}  // namespace isoshard
