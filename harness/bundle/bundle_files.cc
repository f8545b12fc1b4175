// SPDX-License-Identifier: Apache-2.0
/// Hashes on the way to and from the disk.
#include "harness/bundle/bundle_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <system_error>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/base/mapped_file.h"
#include "core/base/printable.h"
#include "core/base/sha256.h"
#include "core/io/json.h"
#include "core/io/safetensors_header.h"
#include "harness/bundle/bundle_folder.h"
#include "harness/bundle/bundle_form.h"

namespace isoshard::detail {
namespace {

namespace fs = std::filesystem;

constexpr const char* kManifest = "manifest.json";
constexpr std::size_t kHexDigits = 64;
constexpr JsonLimits kLimits{
    .max_bytes = std::size_t{1} << 30, .max_depth = 16, .max_values = std::size_t{1} << 24};

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

/// A path below the folder that nothing can lead out of.
bool is_plain(const std::string& name) {
  if (name.empty() || name.find('\\') != std::string::npos || !name_problem(name).empty())
    return false;
  const fs::path path(name);
  return !path.is_absolute() && path.lexically_normal() == path && path.filename() != "" &&
         std::none_of(path.begin(), path.end(),
                      [](const fs::path& part) { return part == ".." || part == "."; });
}

bool is_sha256(const std::string& text) {
  return text.size() == kHexDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

/// Relative names of all regular files below the folder.
std::set<std::string> files_below(const fs::path& directory) {
  std::set<std::string> names;
  std::error_code error;
  fs::recursive_directory_iterator at(directory, error);
  for (; !error && at != fs::recursive_directory_iterator(); at.increment(error)) {
    const fs::file_status status = at->symlink_status(error);
    if (error || fs::is_directory(status)) continue;
    if (!fs::is_regular_file(status)) {
      refuse_form(at->path(),
                  fmt::format("must be a regular file or a folder, got {}; a bundle holds "
                              "its files itself",
                              fs::is_symlink(status) ? "a symbolic link" : "neither"));
    }
    names.insert(at->path().lexically_relative(directory).generic_string());
  }
  if (error) refuse_form(directory, fmt::format("cannot be listed: {}", error.message()));
  return names;
}

}  // namespace

void SealingWriter::write(const std::string& name, std::string_view text) {
  write_file_atomically(directory_ / name, text);
  hashes_[name] = sha256_hex(bytes_of(text));
}

void SealingWriter::write(const std::string& name, std::span<const SafetensorsEntry> tensors) {
  Sha256 hash;
  write_safetensors(directory_ / name, tensors, {}, &hash);
  hashes_[name] = hash.hex_digest();
}

SealedFiles::SealedFiles(fs::path directory, const nlohmann::json& manifest)
    : directory_(std::move(directory)), is_sealed_(true) {
  const fs::path file = directory_ / kManifest;
  if (!manifest.contains("files") || !manifest.at("files").is_object())
    refuse_form(file, "the field \"files\" must be an object of paths and SHA-256 hashes");
  for (const auto& [name, hash] : manifest.at("files").items()) {
    if (!is_plain(name) || name == kManifest)
      refuse_form(file, fmt::format("\"files\" must name files below the bundle's folder, got '{}'",
                                    printable(name)));
    if (!hash.is_string() || !is_sha256(hash.get<std::string>()))
      refuse_form(file, fmt::format("\"files\" of {} must be a SHA-256 in 64 lower-case hex digits",
                                    printable(name)));
    hashes_[name] = hash.get<std::string>();
  }
  std::set<std::string> there = files_below(directory_);
  there.erase(kManifest);
  for (const auto& [name, hash] : hashes_) {
    if (there.erase(name) == 0) refuse(path_of(name), RuleId::kFileMissing);
  }
  if (there.contains(std::string(kBundleMarker))) refuse(directory_, RuleId::kWriterKilled);
  if (!there.empty()) refuse(path_of(*there.begin()), RuleId::kFileTooMany);
}

bool SealedFiles::contains(const std::string& name) const {
  if (is_sealed_) return hashes_.contains(name);
  std::error_code ignored;
  return fs::exists(path_of(name), ignored);
}

void SealedFiles::check(const std::string& name, std::span<const std::byte> bytes) {
  if (!is_sealed_) return;
  const auto found = hashes_.find(name);
  if (found == hashes_.end()) refuse(path_of(name), RuleId::kFileNotListed);
  if (sha256_hex(bytes) != found->second) refuse(path_of(name), RuleId::kFileChanged);
  checked_.insert(name);
}

std::string SealedFiles::text(const std::string& name) {
  const MappedFile file(path_of(name));
  check(name, file.bytes());
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

nlohmann::json SealedFiles::json(const std::string& name) {
  const MappedFile file(path_of(name));
  check(name, file.bytes());
  return parse_json({reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()},
                    path_of(name), kLimits);
}

SafetensorsFile SealedFiles::tensors(const std::string& name) {
  SafetensorsFile file = SafetensorsFile::open(path_of(name));
  check(name, file.file_bytes());
  return file;
}

void SealedFiles::check_rest() {
  for (const auto& [name, hash] : hashes_) {
    if (!checked_.contains(name)) check(name, MappedFile(path_of(name)).bytes());
  }
}

}  // namespace isoshard::detail
