// SPDX-License-Identifier: Apache-2.0
// Curves as JSON and back.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "core/base/hex_float.h"
#include "core/base/reference_name.h"
#include "core/io/json.h"
#include "harness/curve/curve.h"
#include "harness/ids/rule.h"

namespace isoshard {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kSchema = 1;
constexpr JsonLimits kLimits{
    .max_bytes = std::size_t{256} << 20, .max_depth = 64, .max_values = std::size_t{1} << 22};

// JSON has no NaN: the hex float beside it says which.
Json decimal(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

void put(Json& object, const std::string& key, double value) {
  object[key] = decimal(value);
  object[key + "_hex"] = to_hex(value);
}

void put(Json& object, const std::string& key, const std::vector<double>& values) {
  Json decimals = Json::array(), hex = Json::array();
  for (const double value : values) {
    decimals.push_back(decimal(value));
    hex.push_back(to_hex(value));
  }
  object[key] = std::move(decimals);
  object[key + "_hex"] = std::move(hex);
}

Json step_json(const Curve& curve, std::size_t i) {
  const CurveStep& step = curve.steps[i];
  Json json;
  json["step"] = step.step;
  put(json, "loss", step.loss);
  put(json, "rank_losses", step.rank_losses);
  put(json, "grad_norm", step.grad_norm);
  put(json, "learning_rate", step.learning_rate);
  if (curve.spreads.empty()) return json;
  const CurveSpread& spread = curve.spreads.at(i);
  Json& there = json["spread"];
  put(there, "loss", spread.loss);
  put(there, "rank_loss", spread.rank_loss);
  put(there, "grad_norm", spread.grad_norm);
  return json;
}

/// Reads values of one file and names file and place in errors.
class Reader {
 public:
  explicit Reader(const std::filesystem::path& origin) : origin_(origin) {}

  [[noreturn]] void refuse(std::string_view what) const {
    isoshard::refuse(origin_, RuleId::kFileForm, {NamedValue::words("problem", what)});
  }

  const nlohmann::json& member(const nlohmann::json& object, const std::string& key,
                               const std::string& at) const {
    if (!object.is_object()) refuse(fmt::format("{} must be an object", at));
    const auto found = object.find(key);
    if (found == object.end()) refuse(fmt::format("{} has no \"{}\"", at, key));
    return *found;
  }
  std::string text(const nlohmann::json& object, const std::string& key,
                   const std::string& at) const {
    const nlohmann::json& value = member(object, key, at);
    if (!value.is_string())
      refuse(fmt::format("{}.{} must be a string, got {}", at, key, value.dump()));
    return value.get<std::string>();
  }
  int count(const nlohmann::json& value, const std::string& at, int least = 0) const {
    if (!value.is_number_integer() || value < least || value > std::numeric_limits<int>::max())
      refuse(
          fmt::format("{} must be a whole number of at least {}, got {}", at, least, value.dump()));
    return value.get<int>();
  }
  /// A key that no curve has is a key that was meant otherwise.
  void only(const nlohmann::json& object, std::span<const std::string_view> known,
            const std::string& at) const {
    for (const auto& [key, value] : object.items()) {
      if (std::ranges::find(known, key) == known.end())
        refuse(
            fmt::format("{} must not have \"{}\"; known are {}", at, key, fmt::join(known, ", ")));
    }
  }
  double number(const nlohmann::json& object, const std::string& key, const std::string& at) const {
    return hex(member(object, key + "_hex", at), member(object, key, at),
               fmt::format("{}.{}", at, key));
  }
  std::vector<double> numbers(const nlohmann::json& object, const std::string& key,
                              const std::string& at) const {
    const nlohmann::json &words = member(object, key + "_hex", at),
                         &decimals = member(object, key, at);
    if (!words.is_array() || !decimals.is_array() || words.size() != decimals.size())
      refuse(fmt::format("{}.{} and its _hex must be lists of the same length", at, key));
    std::vector<double> values;
    for (std::size_t i = 0; i < words.size(); ++i)
      values.push_back(hex(words[i], decimals[i], fmt::format("{}.{}[{}]", at, key, i)));
    return values;
  }

 private:
  double hex(const nlohmann::json& word, const nlohmann::json& decimal,
             const std::string& at) const {
    const std::optional<double> value =
        word.is_string() ? parse_hex(word.get<std::string>()) : std::nullopt;
    if (!value.has_value())
      refuse(fmt::format("{}_hex must be a hex float, got {}", at, word.dump()));
    const bool agrees = std::isfinite(*value)
                            ? decimal.is_number() && decimal.get<double>() == *value
                            : decimal.is_null();
    if (!agrees)
      refuse(fmt::format("{} must equal its hex float {} = {}, got {}", at, word.get<std::string>(),
                         *value, decimal.dump()));
    return *value;
  }

  const std::filesystem::path& origin_;
};

constexpr std::array<std::string_view, 10> kCurveKeys{
    "schema", "kind",     "subject",     "title",          "case",
    "mesh",   "settings", "fingerprint", "perturbed_runs", "steps"};
constexpr std::array<std::string_view, 10> kStepKeys{
    "step",      "loss",          "loss_hex",      "rank_losses",       "rank_losses_hex",
    "grad_norm", "grad_norm_hex", "learning_rate", "learning_rate_hex", "spread"};

void read_step(const Reader& reader, const nlohmann::json& json, Curve& curve) {
  const std::string at = fmt::format("steps[{}]", curve.steps.size());
  if (json.is_object()) reader.only(json, kStepKeys, at);
  CurveStep step;
  step.step = reader.count(reader.member(json, "step", at), at + ".step");
  // A run that was resumed begins where it went on.
  if (!curve.steps.empty() && step.step != curve.steps.back().step + 1)
    reader.refuse(
        fmt::format("{} is step {}: a step is missing, repeated or out of order", at, step.step));
  step.loss = reader.number(json, "loss", at);
  step.rank_losses = reader.numbers(json, "rank_losses", at);
  step.grad_norm = reader.number(json, "grad_norm", at);
  step.learning_rate = reader.number(json, "learning_rate", at);
  if (!curve.steps.empty() && curve.steps.front().rank_losses.size() != step.rank_losses.size())
    reader.refuse(fmt::format("{} must have {} rank losses, as the first step, got {}", at,
                              curve.steps.front().rank_losses.size(), step.rank_losses.size()));
  if (step.rank_losses.empty())
    reader.refuse(fmt::format("{} must have the loss of each dp rank, got none", at));
  const bool has_spread = json.contains("spread");
  if (has_spread != (curve.perturbed_runs > 0))
    reader.refuse(fmt::format("{} {} a spread, but there are {} perturbed runs", at,
                              has_spread ? "has" : "lacks", curve.perturbed_runs));
  if (has_spread) {
    const nlohmann::json& spread = json.at("spread");
    const std::string there = at + ".spread";
    curve.spreads.push_back({reader.number(spread, "loss", there),
                             reader.number(spread, "rank_loss", there),
                             reader.number(spread, "grad_norm", there)});
    const CurveSpread& last = curve.spreads.back();
    for (const double value : {last.loss, last.rank_loss, last.grad_norm}) {
      if (!(std::isfinite(value) && value >= 0))
        reader.refuse(fmt::format("{} must be finite and at least 0, got {}", there, value));
    }
  }
  curve.steps.push_back(std::move(step));
}

Curve curve_of(const nlohmann::json& json, const std::filesystem::path& origin) {
  const Reader reader(origin);
  const std::string at = "the file";
  const nlohmann::json& schema = reader.member(json, "schema", at);
  if (schema != kSchema)
    reader.refuse(fmt::format("the schema must be {}, which this program reads, got {}", kSchema,
                              schema.dump()));
  if (reader.text(json, "kind", at) != "curve") reader.refuse("is not a curve");
  Curve curve;
  curve.subject = reader.text(json, "subject", at);
  curve.title = reader.text(json, "title", at);
  curve.case_slug = reader.text(json, "case", at);
  reader.only(json, kCurveKeys, at);
  for (const auto& [key, value] :
       {std::pair("subject", curve.subject), std::pair("title", curve.title),
        std::pair("case", curve.case_slug)}) {
    if (value.empty()) reader.refuse(fmt::format("\"{}\" must not be empty", key));
  }
  const nlohmann::json &mesh = reader.member(json, "mesh", at),
                       &fingerprint = reader.member(json, "fingerprint", at);
  if (!mesh.is_object() || !fingerprint.is_object())
    reader.refuse("mesh and fingerprint must be objects");
  for (const auto& [axis, degree] : mesh.items())
    curve.mesh[axis] = reader.count(degree, "mesh." + axis, 1);
  for (const char* const axis : {"dp", "tp"}) {
    if (!curve.mesh.contains(axis))
      reader.refuse(fmt::format("mesh must have the degree of \"{}\"", axis));
  }
  for (const auto& [key, value] : fingerprint.items())
    curve.fingerprint[key] = reader.text(fingerprint, key, "fingerprint");
  const nlohmann::json& settings = reader.member(json, "settings", at);
  if (!settings.is_object()) reader.refuse("settings must be an object");
  curve.settings = settings.dump();
  curve.perturbed_runs = reader.count(reader.member(json, "perturbed_runs", at), "perturbed_runs");
  const nlohmann::json& steps = reader.member(json, "steps", at);
  if (!steps.is_array() || steps.empty()) reader.refuse("must have steps");
  for (const nlohmann::json& step : steps) read_step(reader, step, curve);
  const int losses = static_cast<int>(curve.steps.front().rank_losses.size());
  const std::optional<int> expected = num_rank_losses(curve);
  if (expected.has_value() && losses != *expected)
    reader.refuse(fmt::format("must have the losses of the {} dp ranks of its {}, got {}",
                              *expected, curve.subject == kReferenceName ? "settings" : "mesh",
                              losses));
  if (curve.subject != kReferenceName && curve.mesh.at("dp") != losses)
    reader.refuse(
        fmt::format("mesh.dp must be the {} of its settings, got {}", losses, curve.mesh.at("dp")));
  return curve;
}

}  // namespace

std::string curve_text(const Curve& curve) {
  Json json;
  json["schema"] = kSchema;
  json["kind"] = "curve";
  json["subject"] = curve.subject;
  json["title"] = curve.title;
  json["case"] = curve.case_slug;
  json["mesh"] = curve.mesh;
  json["settings"] = Json::parse(curve.settings);
  json["fingerprint"] = curve.fingerprint;
  json["perturbed_runs"] = curve.perturbed_runs;
  json["steps"] = Json::array();
  for (std::size_t i = 0; i < curve.steps.size(); ++i) json["steps"].push_back(step_json(curve, i));
  return json.dump(1) + "\n";
}

Curve parse_curve(std::string_view text, const std::filesystem::path& origin) {
  return curve_of(parse_json(text, origin, kLimits), origin);
}

Curve read_curve(const std::filesystem::path& path) {
  return curve_of(read_json_file(path, kLimits), path);
}

}  // namespace isoshard
