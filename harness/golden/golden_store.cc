// SPDX-License-Identifier: Apache-2.0
// Reading what was accepted, and accepting.
#include "harness/golden/golden_store.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <span>
#include <system_error>
#include <utility>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/base/mapped_file.h"
#include "core/base/sha256.h"
#include "core/io/json.h"
#include "harness/golden/golden_mode.h"

namespace isoshard {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kManifest = "manifest.json";
constexpr int kManifestSchema = 1;

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string sha256_of(std::string_view text) {
  return sha256_hex(std::as_bytes(std::span(text.data(), text.size())));
}

bool is_blank(std::string_view text) {
  return text.find_first_not_of(" \t\r\n") == std::string_view::npos;
}

std::map<std::string, GoldenEntry> entries_of(const nlohmann::json& json) {
  if (json.at("schema") != kManifestSchema)
    throw GoldenError(
        fmt::format("the schema must be {}, got {}", kManifestSchema, json.at("schema").dump()));
  std::map<std::string, GoldenEntry> entries;
  for (const auto& [name, entry] : json.at("goldens").items()) {
    const auto text = [&entry = entry](const char* key) {
      return entry.at(key).get<std::string>();
    };
    entries[name] = {text("file"), text("sha256"), text("reason"), text("recorded"),
                     text("accepted")};
    // A name with a slash in it would leave the folder.
    if (entries[name].file != golden_file_name(name) || name.find('/') != std::string::npos)
      throw GoldenError(fmt::format("the file of {} must be {}, got {}", name,
                                    golden_file_name(name), entries[name].file));
  }
  return entries;
}

}  // namespace

GoldenStore::GoldenStore(std::filesystem::path folder) : folder_(std::move(folder)) {
  const std::filesystem::path path = folder_ / kManifest;
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return;
  try {
    entries_ = entries_of(read_json_file(path));
  } catch (const std::exception& error) {
    throw GoldenError(fmt::format(
        "{}: is not a manifest of goldens ({}); restore the committed file: git checkout -- {}",
        path.string(), error.what(), path.string()));
  }
}

Golden GoldenStore::read(const std::string& name) const {
  const auto entry = entries_.find(name);
  if (entry == entries_.end())
    throw GoldenError(fmt::format("{}: there is no golden of that name in {}; create it: {}", name,
                                  folder_.string(), command_to_create(name)));
  const std::filesystem::path path = folder_ / entry->second.file;
  std::string text;
  try {
    const MappedFile file(path);
    text = text_of(file.bytes());
  } catch (const FileError& error) {
    throw GoldenError(fmt::format("{}; {} lists it: git checkout -- {}, or create it: {}",
                                  error.what(), kManifest, path.string(), command_to_create(name)));
  }
  const std::string sha256 = sha256_of(text);
  if (sha256 != entry->second.sha256)
    throw GoldenError(fmt::format(
        "{}: was edited after it was accepted: computed SHA-256 {}, accepted {}; restore it: git "
        "checkout -- {}, or record "
        "and accept a new one: {}",
        path.string(), sha256, entry->second.sha256, path.string(), command_to_create(name)));
  try {
    Golden golden = parse_golden(text, path);
    if (golden.name != name)
      throw GoldenError(
          fmt::format("{}: must hold the golden {}, got {}", path.string(), name, golden.name));
    if (const std::string number = non_finite_number(golden); !number.empty())
      throw GoldenError(
          fmt::format("{}: {}, and nothing can be compared with that", path.string(), number));
    return golden;
  } catch (const GoldenError& error) {
    throw GoldenError(
        fmt::format("{}; create it again: {}", error.what(), command_to_create(name)));
  }
}

std::vector<std::string> GoldenStore::unlisted_files() const {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder_, error), end; !error && it != end;
       it.increment(error)) {
    const std::string name = it->path().filename().string();
    const bool is_listed =
        it->path().extension() == ".json" && entries_.contains(it->path().stem().string());
    if (!is_listed && name != kManifest && !name.starts_with('.')) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

void GoldenStore::accept(const Golden& pending, const std::string& reason, const std::string& now) {
  refuse_in_ci("to accept a golden");
  const auto refuse = [&](const std::string& why) {
    throw GoldenError(fmt::format("{}: was not accepted: {}", pending.name, why));
  };
  if (is_blank(reason))
    refuse("a reason must be given; say what changed the numbers: --reason TEXT");
  if (const std::string number = non_finite_number(pending); !number.empty()) refuse(number);
  if (!pending.parity.holds)
    refuse(fmt::format("in the run that recorded it the parity check failed: {}",
                       pending.parity.text));
  if (const std::string why = unfit_for_goldens(pending.build); !why.empty()) refuse(why);
  const std::string text = golden_text(pending);
  const std::string file = golden_file_name(pending.name);
  std::filesystem::create_directories(folder_);
  write_file_atomically(folder_ / file, text);
  entries_[pending.name] = {file, sha256_of(text), reason, pending.recorded, now};
  write_manifest();
}

void GoldenStore::remove(const std::string& name, const std::string& reason) {
  refuse_in_ci("to remove a golden");
  const auto entry = entries_.find(name);
  if (entry == entries_.end())
    throw GoldenError(fmt::format("{}: is not listed in {}", name, (folder_ / kManifest).string()));
  if (is_blank(reason))
    throw GoldenError(
        fmt::format("{}: was not removed: a reason must be given (--reason TEXT)", name));
  std::error_code ignored;
  std::filesystem::remove(folder_ / entry->second.file, ignored);
  entries_.erase(entry);
  write_manifest();
}

void GoldenStore::write_manifest() const {
  Json json;
  json["schema"] = kManifestSchema;
  Json& goldens = json["goldens"] = Json::object();
  for (const auto& [name, entry] : entries_) {
    goldens[name] = {{"file", entry.file},
                     {"sha256", entry.sha256},
                     {"reason", entry.reason},
                     {"recorded", entry.recorded},
                     {"accepted", entry.accepted}};
  }
  write_file_atomically(folder_ / kManifest, json.dump(1) + "\n");
}

std::string command_to_create(std::string_view name) {
  return fmt::format(
      "isoshard golden record {0} && isoshard golden review {0} && isoshard golden accept {0} "
      "--reason TEXT",
      name);
}

std::map<std::string, Golden> read_pending(const std::filesystem::path& folder) {
  std::map<std::string, Golden> pending;
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    if (it->path().extension() != ".json") continue;
    const MappedFile file(it->path());
    Golden golden = parse_golden(text_of(file.bytes()), it->path());
    if (golden_file_name(golden.name) != it->path().filename().string())
      throw GoldenError(fmt::format("{}: the file of the golden {} must be named {}",
                                    it->path().string(), golden.name,
                                    golden_file_name(golden.name)));
    pending.emplace(golden.name, std::move(golden));
  }
  return pending;
}

void write_pending(const std::filesystem::path& folder, const Golden& golden) {
  refuse_in_ci("to record a golden");
  std::filesystem::create_directories(folder);
  write_file_atomically(folder / golden_file_name(golden.name), golden_text(golden));
}

std::string time_now() {
  const auto now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(now));
}

}  // namespace isoshard
