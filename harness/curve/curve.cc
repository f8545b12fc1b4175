// SPDX-License-Identifier: Apache-2.0
// Names of curves, and folders of them.
#include "harness/curve/curve.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/base/reference_name.h"
#include "harness/ids/rule.h"

namespace isoshard {
namespace {

constexpr std::string_view kPrefix = "loss_", kSuffix = ".json";

bool is_curve_name(const std::string& name) {
  return name.starts_with(kPrefix) && name.ends_with(kSuffix) &&
         name.size() > kPrefix.size() + kSuffix.size();
}

int degree_of(const Curve& curve, const std::string& axis) {
  const auto found = curve.mesh.find(axis);
  return found == curve.mesh.end() ? 1 : found->second;
}

}  // namespace

bool is_finite(const CurveStep& step) noexcept {
  return std::isfinite(step.loss) && std::isfinite(step.grad_norm);
}

std::optional<int> num_rank_losses(const Curve& curve) {
  const nlohmann::json settings = nlohmann::json::parse(curve.settings, nullptr, false);
  if (settings.is_object() && settings.contains("data") && settings.at("data").is_object() &&
      settings.at("data").contains("dp") && settings.at("data").at("dp").is_number_integer())
    return settings.at("data").at("dp").get<int>();
  const auto degree = curve.mesh.find("dp");
  if (curve.subject == kReferenceName || degree == curve.mesh.end()) return std::nullopt;
  return degree->second;
}

std::string label_of(const Curve& curve) {
  std::string degrees = fmt::format("TP={}, DP={}", degree_of(curve, "tp"), degree_of(curve, "dp"));
  for (const auto& [axis, degree] : curve.mesh) {
    if (axis == "tp" || axis == "dp" || degree == 1) continue;
    std::string name = axis;
    for (char& c : name) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    degrees += fmt::format(", {}={}", name, degree);
  }
  return fmt::format("{} ({})", curve.title.empty() ? curve.subject : curve.title, degrees);
}

std::string curve_file_name(const Curve& curve) {
  return fmt::format("{}{}{}", kPrefix, curve.subject, kSuffix);
}

void write_curve(const std::filesystem::path& path, const Curve& curve) {
  write_file_atomically(path, curve_text(curve));
}

std::vector<Curve> read_curves(const std::filesystem::path& folder) {
  std::error_code error;
  std::vector<std::filesystem::path> paths;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    if (is_curve_name(it->path().filename().string())) paths.push_back(it->path());
  }
  if (error)
    throw FileError(
        fmt::format("{}: cannot be read as a folder: {}", folder.string(), error.message()));
  if (paths.empty()) refuse(folder, RuleId::kNoCurves, {{"folder", folder.string()}});
  std::sort(paths.begin(), paths.end());
  std::vector<Curve> curves;
  for (const auto& path : paths) {
    curves.push_back(read_curve(path));
    for (std::size_t i = 0; i + 1 < curves.size(); ++i) {
      if (curves[i].subject == curves.back().subject)
        refuse(path, RuleId::kCurveTwice,
               {{"subject", curves[i].subject}, {"other", paths[i].string()}});
    }
  }
  std::stable_partition(curves.begin(), curves.end(),
                        [](const Curve& curve) { return curve.subject == kReferenceName; });
  return curves;
}

bool is_curve_file(const std::filesystem::path& path) {
  std::error_code ignored;
  return path.extension() == kSuffix && std::filesystem::is_regular_file(path, ignored);
}

}  // namespace isoshard
