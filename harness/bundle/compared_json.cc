// SPDX-License-Identifier: Apache-2.0
// Statistics as JSON: integers as they are, numbers in fp64 as hex floats.
#include "harness/bundle/compared_json.h"

#include <fmt/format.h>

#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string_view>

#include "core/base/error.h"
#include "core/base/hex_float.h"
#include "core/base/sha256.h"
#include "harness/bundle/bundle_form.h"
#include "harness/bundle/bundle_json.h"
#include "harness/bundle/redrawn_json.h"

namespace isoshard::detail {
namespace {

using nlohmann::json;

struct Count {
  const char* name;
  std::int64_t Stats::*field;
};
constexpr Count kCounts[] = {{"numel", &Stats::numel},
                             {"unequal_bits", &Stats::unequal_bits},
                             {"unequal_values", &Stats::unequal_values},
                             {"nan_reference", &Stats::nan_reference},
                             {"nan_actual", &Stats::nan_actual},
                             {"inf_reference", &Stats::inf_reference},
                             {"inf_actual", &Stats::inf_actual},
                             {"nonfinite_mismatch", &Stats::nonfinite_mismatch}};
struct Number {
  const char* name;
  double Stats::*field;
};
constexpr Number kNumbers[] = {{"max_abs", &Stats::max_abs},
                               {"max_ulp", &Stats::max_ulp},
                               {"sum_sq_reference", &Stats::sum_sq_reference},
                               {"sum_sq_actual", &Stats::sum_sq_actual},
                               {"sum_sq_diff", &Stats::sum_sq_diff},
                               {"dot", &Stats::dot},
                               {"sum_abs_diff", &Stats::sum_abs_diff},
                               {"max_abs_reference", &Stats::max_abs_reference},
                               {"sum_diff", &Stats::sum_diff}};
struct Place {
  const char* name;
  std::int64_t Stats::*field;
};
/// Left out where it is -1.
constexpr Place kPlaces[] = {{"first_unequal", &Stats::first_unequal}, {"worst", &Stats::worst}};

double number_field(const json& part, const char* name, const Record& record,
                    const std::filesystem::path& file) {
  if (!part.contains(name)) return 0;
  std::optional<double> value;
  if (part.at(name).is_number()) value = part.at(name).get<double>();
  if (part.at(name).is_string()) value = parse_hex(part.at(name).get<std::string>());
  if (!value.has_value() || std::isnan(*value))
    refuse_form(file, fmt::format("\"{}\" of the statistics of {} must be a number", name,
                                  describe(record.key)));
  return *value;
}

json statistics_json(const PartStats& part) {
  json j = {{"digest", fmt::format("{:016x}", part.digest)}};
  for (const Count& count : kCounts) {
    if (part.stats.*count.field != 0) j[count.name] = part.stats.*count.field;
  }
  for (const Number& number : kNumbers) {
    if (part.stats.*number.field != 0) j[number.name] = to_hex(part.stats.*number.field);
  }
  for (const Place& place : kPlaces) {
    if (part.stats.*place.field >= 0) j[place.name] = part.stats.*place.field;
  }
  if (part.untouched != 0) j["untouched"] = part.untouched;
  if (part.broken != 0) j["broken"] = part.broken;
  if (part.first_broken >= 0) j["first_broken"] = part.first_broken;
  return j;
}

std::uint64_t digest_field(const json& part, const Record& record,
                           const std::filesystem::path& file) {
  const auto text = field<std::string>(part, "digest", file);
  if (text.size() != 16 || text.find_first_not_of("0123456789abcdef") != std::string::npos)
    refuse_form(file,
                fmt::format("\"digest\" of the statistics of {} must be 16 hexadecimal digits",
                            describe(record.key)));
  return std::stoull(text, nullptr, 16);
}

}  // namespace

json statistics_json(const Record& record) {
  json list = json::array();
  for (const PartStats& part : record.parts) list.push_back(statistics_json(part));
  return list;
}

void fill_statistics(Record& record, const json& list, const std::filesystem::path& file) {
  if (!list.is_array() || list.size() != record.parts.size())
    refuse_form(file, fmt::format("\"compared\" of {} must list the statistics of its {} parts",
                                  describe(record.key), record.parts.size()));
  for (std::size_t i = 0; i < list.size(); ++i) {
    PartStats& part = record.parts[i];
    part.digest = digest_field(list[i], record, file);
    for (const Count& count : kCounts)
      part.stats.*count.field = field_or<std::int64_t>(list[i], count.name, 0, file);
    for (const Number& number : kNumbers)
      part.stats.*number.field = number_field(list[i], number.name, record, file);
    for (const Place& place : kPlaces)
      part.stats.*place.field = field_or<std::int64_t>(list[i], place.name, -1, file);
    part.untouched = field_or<std::int64_t>(list[i], "untouched", 0, file);
    part.broken = field_or<std::int64_t>(list[i], "broken", 0, file);
    part.first_broken = field_or<std::int64_t>(list[i], "first_broken", -1, file);
  }
}

std::string sample_name(const RecordKey& key) {
  return "sample/" + tensor_name(key);
}

std::string digest_of_manifest(const json& manifest) {
  std::string text;
  for (const auto& [name, hash] : manifest.at("files").items()) {
    if (name.starts_with("step")) text += name + " " + hash.dump() + "\n";
  }
  for (const char* name : {"run", "mesh", "settings"}) {
    if (manifest.contains(name)) text += manifest.at(name).dump() + "\n";
  }
  return sha256_hex(std::as_bytes(std::span(text.data(), text.size())));
}

std::optional<ComparedWith> compared_with_of(const json& manifest,
                                             const std::filesystem::path& file) {
  if (!manifest.contains("compared_with")) return std::nullopt;
  const json& with = manifest.at("compared_with");
  return ComparedWith{text_field(with, "digest", file),
                      with.contains("responses") ? text_field(with, "responses", file) : ""};
}

std::optional<Filtered> filtered_of(const json& manifest, const std::filesystem::path& file) {
  if (!manifest.contains("filtered")) return std::nullopt;
  const json& j = manifest.at("filtered");
  if (!j.is_object()) refuse_form(file, "the field \"filtered\" has the wrong type");
  Filtered filtered;
  for (const json& pattern : field_or<json>(j, "only", json::array(), file))
    filtered.only.push_back(text_field({{"pattern", pattern}}, "pattern", file));
  filtered.steps = field_or<std::vector<std::int64_t>>(j, "steps", {}, file);
  filtered.records = field_or<std::int64_t>(j, "records", 0, file);
  if (filtered.records < 0)
    refuse_form(file, "\"filtered\" must count records, got a negative number");
  return filtered;
}

}  // namespace isoshard::detail
