// SPDX-License-Identifier: Apache-2.0
// The table of readers.
#include "fuzz/readers.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include "app/options/torchtitan_config.h"
#include "core/base/error.h"
#include "core/io/json.h"
#include "core/io/safetensors_header.h"
#include "fuzz/bundle_reader.h"
#include "harness/bundle/bundle_json.h"
#include "harness/bundle/run_settings.h"
#include "harness/curve/curve.h"
#include "harness/golden/golden.h"
#include "subjects/parallel/nd/schedule/pipeline_schedule.h"
#include "subjects/parallel/nd/schedule/schedule_check.h"
#include "subjects/parallel/nd/schedule/schedule_text.h"

namespace isoshard {
namespace {

constexpr std::string_view kOrigin = "input";

void require(bool holds, std::string_view what) {
  if (!holds) throw std::logic_error(std::string(what));
}

/// Calls `read`, of which `Allowed` may come.
template <class... Allowed, class Read>
void expect_only(const Read& read) {
  try {
    read();
  } catch (const Error& error) {
    const bool is_allowed = ((dynamic_cast<const Allowed*>(&error) != nullptr) || ...);
    if (!is_allowed) throw;
    require(!std::string_view(error.what()).empty(), "an error must say something");
  }
}

void read_json(std::string_view bytes) {
  expect_only<FileError>([&] {
    const nlohmann::json json = parse_json(bytes, kOrigin);
    require(parse_json(json.dump(), kOrigin) == json, "JSON that is written must be read alike");
  });
}

void read_safetensors(std::string_view bytes) {
  expect_only<FileError>([&] {
    const auto file = std::as_bytes(std::span(bytes.data(), bytes.size()));
    const detail::SafetensorsHeader header = detail::parse_safetensors_header(file, kOrigin);
    require(header.data_begin <= bytes.size(), "data must begin in the file");
  });
}

void read_settings(std::string_view bytes) {
  expect_only<FileError>([&] { (void)step_rule_of(parse_run_settings(bytes, kOrigin)); });
}

void read_golden(std::string_view bytes) {
  expect_only<GoldenError>([&] {
    const std::string text = golden_text(parse_golden(bytes, kOrigin));
    require(golden_text(parse_golden(text, kOrigin)) == text,
            "a golden that is written must be read alike");
  });
}

void read_curve_text(std::string_view bytes) {
  expect_only<FileError>([&] {
    const std::string text = curve_text(parse_curve(bytes, kOrigin));
    require(curve_text(parse_curve(text, kOrigin)) == text,
            "a curve that is written must be read alike");
  });
}

// A table that the checker takes is drawn.
void read_schedule(std::string_view bytes) {
  expect_only<FileError, UsageError>([&] {
    const PipelineSpec spec = spec_of_csv(bytes, kOrigin);
    const PipelineSchedule schedule = schedule_from_csv(spec, bytes, kOrigin);
    require_sound(schedule);
    require(!picture(schedule).empty(), "a sound table must have a picture");
  });
}

void read_toml(std::string_view bytes) {
  expect_only<FileError>([&] { (void)parse_torchtitan_config(bytes, kOrigin); });
}

// What a rank's file, a manifest and responses hold, without the files around them.
void read_bundle_json(std::string_view bytes) {
  expect_only<FileError>([&] {
    const nlohmann::json json = parse_json(bytes, kOrigin);
    if (json.contains("mesh")) (void)detail::mesh_of(json["mesh"], kOrigin);
    if (json.contains("responses")) {
      int runs = 0;
      (void)detail::responses_of(json, kOrigin, runs);
    }
    if (!json.contains("records") || !json["records"].is_array()) return;
    for (const nlohmann::json& record : json["records"])
      (void)detail::record_of(record, {}, kOrigin);
  });
}

void read_bundle_files(std::string_view bytes) {
  expect_only<FileError, UsageError, InfrastructureError, VacuousError>(
      [&] { judge_changed_bundle(bytes); });
}

constexpr std::array kReaders = {
    Reader{"bundle", read_bundle_files, "fixtures/frameworks/ddp/right/step0000/*"},
    Reader{"bundle_json", read_bundle_json, "fixtures/frameworks/*/right/*/*.json"},
    Reader{"curve", read_curve_text, "fuzz/seeds/loss_*.json"},
    Reader{"golden", read_golden, "golden/*.json"},
    Reader{"json", read_json, "fixtures/frameworks/*/right/manifest.json"},
    Reader{"safetensors", read_safetensors, "fixtures/frameworks/*/right/*/*.safetensors"},
    Reader{"schedule", read_schedule, "fixtures/oracle/pipeline_schedules/*.csv"},
    Reader{"settings", read_settings, "fuzz/seeds/settings_*.json"},
    Reader{"toml", read_toml, "fuzz/seeds/*.toml"}};

}  // namespace

std::span<const Reader> readers() {
  return kReaders;
}

const Reader& find_reader(std::string_view name) {
  const auto found = std::ranges::find(kReaders, name, &Reader::name);
  if (found != kReaders.end()) return *found;
  std::string names;
  for (const Reader& reader : kReaders) names += fmt::format(" {}", reader.name);
  throw std::invalid_argument(fmt::format("the reader must be one of{}, got '{}'", names, name));
}

}  // namespace isoshard
