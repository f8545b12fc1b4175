// SPDX-License-Identifier: Apache-2.0
// Goldens as JSON and back.
#include "harness/golden/golden.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <utility>

#include "core/base/error.h"
#include "core/base/hex_float.h"
#include "core/base/sha256.h"
#include "core/io/json.h"

namespace isoshard {
namespace {

using Json = nlohmann::ordered_json;
using Texts = std::map<std::string, std::string>;

// 1 had neither projections nor copies; its goldens are read.
constexpr int kSchema = 2, kOldestSchema = 1;
constexpr JsonLimits kLimits{
    .max_bytes = std::size_t{64} << 20, .max_depth = 16, .max_values = std::size_t{1} << 21};
constexpr std::size_t kDigestDigits = 16, kShaDigits = 64;

Json line_json(const GoldenLine& line) {
  Json json;
  json["name"] = line.name;
  if (!line.digest.empty()) json["digest"] = line.digest;
  if (!line.same_as.empty()) json["same_as"] = line.same_as;
  if (!line.copies.empty()) json["copies"] = line.copies;
  if (line.numbers.empty()) return json;
  Json& numbers = json["numbers"] = Json::object();
  for (const GoldenNumber& number : line.numbers)
    numbers[number.name] = {to_hex(number.value), to_hex(number.drift)};
  if (!line.projections.has_value()) return json;
  Json steps = Json::array();
  for (const double value : line.projections->values)
    steps.push_back(static_cast<std::int64_t>(value / step_of(line.projections->allowed)));
  json["projections"] = {to_hex(line.projections->allowed), std::move(steps)};
  return json;
}

/// Reads values of one file and names file and place in errors.
class Reader {
 public:
  explicit Reader(const std::filesystem::path& origin) : origin_(origin) {}

  [[noreturn]] void refuse(std::string_view what) const {
    throw GoldenError(fmt::format("{}: {}", origin_.string(), what));
  }

  const Json& member(const Json& object, const std::string& key, const std::string& at) const {
    if (!object.is_object()) refuse(fmt::format("{} must be an object", at));
    const auto found = object.find(key);
    if (found == object.end()) refuse(fmt::format("{} has no \"{}\"", at, key));
    return *found;
  }
  std::string text(const Json& object, const std::string& key, const std::string& at) const {
    const Json& value = member(object, key, at);
    if (!value.is_string())
      refuse(fmt::format("{}.{} must be a string, got {}", at, key, value.dump()));
    return value.get<std::string>();
  }
  std::string hex_digits(const Json& object, const std::string& key, const std::string& at,
                         std::size_t count) const {
    std::string value = text(object, key, at);
    const bool all_hex = value.find_first_not_of("0123456789abcdef") == std::string::npos;
    if (value.size() != count || !all_hex)
      refuse(fmt::format("{}.{} must have {} hex digits, got '{}'", at, key, count, value));
    return value;
  }
  Texts texts(const Json& object, const std::string& key) const {
    const Json& all = member(object, key, "the file");
    if (!all.is_object()) refuse(fmt::format("{} must be an object", key));
    Texts result;
    for (const auto& [name, value] : all.items()) result[name] = text(all, name, key);
    return result;
  }
  double number(const Json& word, const std::string& at) const {
    const std::optional<double> value =
        word.is_string() ? parse_hex(word.get<std::string>()) : std::nullopt;
    if (!value.has_value()) refuse(fmt::format("{} must be a hex float, got {}", at, word.dump()));
    return *value;
  }

 private:
  const std::filesystem::path& origin_;
};

StoredProjections read_projections(const Reader& reader, const Json& json, const std::string& at) {
  if (!json.is_array() || json.size() != 2 || !json[1].is_array() || json[1].size() != kProjections)
    reader.refuse(fmt::format("{} must be what is allowed and {} whole numbers, got {}", at,
                              kProjections, json.dump()));
  StoredProjections read{{}, reader.number(json[0], at + "[0]")};
  if (!(read.allowed > 0) || !std::isfinite(read.allowed))
    reader.refuse(fmt::format("{}[0] must be finite and above 0, got {}", at, read.allowed));
  for (std::size_t j = 0; j < kProjections; ++j) {
    if (!json[1][j].is_number_integer())
      reader.refuse(
          fmt::format("{}[1][{}] must be a whole number, got {}", at, j, json[1][j].dump()));
    read.values[j] = json[1][j].get<double>() * step_of(read.allowed);
  }
  return read;
}

/// What a line says of another one must fit it.
void require_same_lines(const Reader& reader, const Golden& golden) {
  std::map<std::string, std::string> digests;
  for (const GoldenLine& line : golden.lines) {
    const auto found = digests.find(line.same_as);
    if (!line.same_as.empty() && (found == digests.end() || found->second != line.digest))
      reader.refuse(
          fmt::format("{}: same_as must name an earlier line with the same digest, got '{}'",
                      line.name, line.same_as));
    digests.emplace(line.name, line.digest);
  }
}

GoldenLine read_line(const Reader& reader, const Json& json, const std::string& at) {
  GoldenLine line;
  line.name = reader.text(json, "name", at);
  if (json.contains("digest")) line.digest = reader.hex_digits(json, "digest", at, kDigestDigits);
  if (json.contains("same_as")) line.same_as = reader.text(json, "same_as", at);
  if (json.contains("copies")) line.copies = reader.text(json, "copies", at);
  if (json.contains("projections"))
    line.projections = read_projections(reader, json.at("projections"), at + ".projections");
  if (!json.contains("numbers")) {
    if (line.digest.empty()) reader.refuse(fmt::format("{} must have a digest or numbers", at));
    return line;
  }
  const Json& numbers = json.at("numbers");
  if (!numbers.is_object() || numbers.empty())
    reader.refuse(
        fmt::format("{}.numbers must be an object with numbers, got {}", at, numbers.dump()));
  for (const auto& [name, pair] : numbers.items()) {
    const std::string there = fmt::format("{}.numbers.{}", at, name);
    if (!pair.is_array() || pair.size() != 2)
      reader.refuse(fmt::format("{} must be a value and its drift, got {}", there, pair.dump()));
    line.numbers.push_back(
        {name, reader.number(pair[0], there), reader.number(pair[1], there + ", the drift")});
    if (line.numbers.back().drift < 0)
      reader.refuse(fmt::format("{}: the drift must be at least 0, got {}", there,
                                line.numbers.back().drift));
  }
  return line;
}

Golden golden_of(const Json& json, const std::filesystem::path& origin) {
  const Reader reader(origin);
  const std::string at = "the file";
  const Json& schema = reader.member(json, "schema", at);
  if (schema != kSchema && schema != kOldestSchema)
    reader.refuse(fmt::format("the schema must be {} or {}, which this program reads, got {}",
                              kOldestSchema, kSchema, schema.dump()));
  if (reader.text(json, "kind", at) != "golden") reader.refuse("is not a golden");
  Golden golden;
  golden.name = reader.text(json, "name", at);
  golden.config = reader.texts(json, "config");
  golden.weights_sha256 = reader.hex_digits(json, "weights_sha256", at, kShaDigits);
  golden.inputs_sha256 = reader.hex_digits(json, "inputs_sha256", at, kShaDigits);
  golden.fingerprint = reader.texts(json, "fingerprint");
  golden.arithmetic = reader.hex_digits(json, "arithmetic", at, kDigestDigits);
  golden.drift_rule = reader.text(json, "drift_rule", at);
  const Json &parity = reader.member(json, "parity", at), &build = reader.member(json, "build", at);
  const Json& holds = reader.member(parity, "holds", "parity");
  if (!holds.is_boolean())
    reader.refuse(fmt::format("parity.holds must be true or false, got {}", holds.dump()));
  golden.parity = {holds.get<bool>(), reader.text(parity, "text", "parity")};
  golden.build = {reader.text(build, "commit", "build"), reader.text(build, "state", "build"),
                  reader.text(build, "sanitizers", "build")};
  golden.recorded = reader.text(json, "recorded", at);
  const std::string hash = reader.hex_digits(json, "config_sha256", at, kShaDigits);
  if (hash != config_sha256(golden)) reader.refuse("config_sha256 must be the SHA-256 of config");
  const Json &count = reader.member(json, "count", at), &lines = reader.member(json, "lines", at);
  if (!lines.is_array() || lines.empty()) reader.refuse("has no lines");
  if (count != lines.size())
    reader.refuse(
        fmt::format("count must be the number of lines, {}, got {}", lines.size(), count.dump()));
  for (std::size_t i = 0; i < lines.size(); ++i)
    golden.lines.push_back(read_line(reader, lines[i], fmt::format("lines[{}]", i)));
  require_same_lines(reader, golden);
  return golden;
}

}  // namespace

std::string config_sha256(const Golden& golden) {
  const std::string text = nlohmann::json(golden.config).dump();
  return sha256_hex(std::as_bytes(std::span(text.data(), text.size())));
}

std::string non_finite_number(const Golden& golden) {
  for (const GoldenLine& line : golden.lines) {
    for (const GoldenNumber& number : line.numbers) {
      if (!std::isfinite(number.value))
        return fmt::format("{} of {} is {}", number.name, line.name, number.value);
      if (!std::isfinite(number.drift))
        return fmt::format("{} of {} may drift by {}", number.name, line.name, number.drift);
    }
  }
  return "";
}

std::string broken_copy(const std::string& golden, const std::string& actual) {
  if (golden.empty()) return "";
  if (golden.size() != actual.size())
    return fmt::format("of {} ranks, here {}", golden.size(), actual.size());
  for (std::size_t i = 0; i < golden.size(); ++i) {
    if ((golden[i] == '-') != (actual[i] == '-'))
      return fmt::format("rank {} holds it {}", i, golden[i] == '-' ? "here only" : "no more");
    const std::size_t first = golden.find(golden[i]);
    if (actual[first] != actual[i]) return fmt::format("ranks {} and {}", first, i);
  }
  return "";
}

std::string golden_file_name(std::string_view name) {
  return fmt::format("{}.json", name);
}

std::string golden_text(const Golden& golden) {
  Json json;
  json["schema"] = kSchema;
  json["kind"] = "golden";
  json["name"] = golden.name;
  json["config"] = golden.config;
  json["config_sha256"] = config_sha256(golden);
  json["weights_sha256"] = golden.weights_sha256;
  json["inputs_sha256"] = golden.inputs_sha256;
  json["fingerprint"] = golden.fingerprint;
  json["arithmetic"] = golden.arithmetic;
  json["drift_rule"] = golden.drift_rule;
  json["parity"] = {{"holds", golden.parity.holds}, {"text", golden.parity.text}};
  json["build"] = {{"commit", golden.build.commit},
                   {"state", golden.build.state},
                   {"sanitizers", golden.build.sanitizers}};
  json["recorded"] = golden.recorded;
  json["count"] = golden.lines.size();
  // One line of text each, so that a changed number is one changed line under version control.
  std::string text = json.dump(1);
  text.resize(text.rfind('\n'));
  text += ",\n \"lines\": [";
  for (std::size_t i = 0; i < golden.lines.size(); ++i)
    text += (i == 0 ? "\n  " : ",\n  ") + line_json(golden.lines[i]).dump();
  return text + "\n ]\n}\n";
}

Golden parse_golden(std::string_view text, const std::filesystem::path& origin) {
  try {
    // strict; the order of numbers is kept by the one below
    (void)parse_json(text, origin, kLimits);
    return golden_of(Json::parse(text), origin);
  } catch (const FileError& error) {
    throw GoldenError(error.what());
  }
}

}  // namespace isoshard
