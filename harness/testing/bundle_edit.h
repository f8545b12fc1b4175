// SPDX-License-Identifier: Apache-2.0
/// Test helper: edits a bundle on disk as its author could, and seals it again.
#pragma once
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/sha256.h"
#include "harness/testing/test_folder.h"
#include "harness/trace/numbers.h"

namespace isoshard::bundle_edit {

inline void edit_json(const std::filesystem::path& path,
                      const std::function<void(nlohmann::json&)>& edit) {
  nlohmann::json content = nlohmann::json::parse(content_of(path));
  edit(content);
  std::ofstream(path) << content.dump();
}

/// Lists every file that is there now in manifest.json, with its hash: no defense against an
/// author.
inline void seal(const std::filesystem::path& bundle) {
  nlohmann::json files = nlohmann::json::object();
  for (const auto& entry : std::filesystem::recursive_directory_iterator(bundle)) {
    const std::string name = entry.path().lexically_relative(bundle).generic_string();
    if (!entry.is_regular_file() || name == "manifest.json") continue;
    files[name] = sha256_hex_of_file(entry.path());
  }
  edit_json(bundle / "manifest.json", [&](nlohmann::json& manifest) { manifest["files"] = files; });
}

/// Calls `edit` with the rank of each description of a rank's step, and the description.
inline void edit_ranks(const std::filesystem::path& bundle,
                       const std::function<void(int rank, nlohmann::json& description)>& edit) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(bundle)) {
    if (entry.path().extension() != ".json" || entry.path().parent_path() == bundle) continue;
    edit_json(entry.path(), [&](nlohmann::json& description) {
      edit(description.at("rank").get<int>(), description);
    });
  }
}

/// "grad/model.norm.weight/0", as a tensor is named in its file.
inline std::string name_of(const nlohmann::json& record) {
  return record.at("kind").get<std::string>() + "/" + record.at("name").get<std::string>() + "/" +
         std::to_string(record.at("call").get<int>());
}

/// Calls `edit` for each record, with its name.
inline void edit_records(
    const std::filesystem::path& bundle,
    const std::function<void(int rank, const std::string& name, nlohmann::json& record)>& edit) {
  edit_ranks(bundle, [&](int rank, nlohmann::json& description) {
    for (nlohmann::json& record : description.at("records")) edit(rank, name_of(record), record);
  });
}

/// Calls `edit` with the numbers of each tensor of floating-point type; they are written back.
/// Returns how many tensors have changed.
inline int edit_values(const std::filesystem::path& bundle,
                       const std::function<void(int rank, const std::string& name,
                                                std::vector<double>& values)>& edit) {
  int changed = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(bundle)) {
    if (entry.path().extension() != ".safetensors") continue;
    std::string content = content_of(entry.path());
    std::uint64_t length = 0;
    std::memcpy(&length, content.data(), sizeof(length));
    const auto header = nlohmann::json::parse(content.substr(sizeof(length), length));
    const int rank = std::stoi(entry.path().stem().string().substr(4));
    for (const auto& [name, info] : header.items()) {
      const std::string type = info.value("dtype", "");
      const Dtype dtype = type == "F64"    ? Dtype::kFloat64
                          : type == "F32"  ? Dtype::kFloat32
                          : type == "BF16" ? Dtype::kBFloat16
                                           : Dtype::kInt64;
      if (!is_floating(dtype)) continue;
      const auto begin = info.at("data_offsets")[0].get<std::size_t>() + sizeof(length) + length;
      const auto end = info.at("data_offsets")[1].get<std::size_t>() + sizeof(length) + length;
      const std::string before = content.substr(begin, end - begin);
      const auto numel = static_cast<std::int64_t>(before.size() / size_of(dtype));
      std::vector<double> values = numbers_of(
          {dtype, {numel}, std::as_bytes(std::span(before.data(), before.size())), nullptr});
      edit(rank, name, values);
      const std::vector<std::byte> after = bytes_of(values, dtype);
      if (std::memcmp(before.data(), after.data(), after.size()) == 0) continue;
      std::memcpy(content.data() + begin, after.data(), after.size());
      ++changed;
    }
    std::ofstream(entry.path(), std::ios::binary) << content;
  }
  return changed;
}

}  // namespace isoshard::bundle_edit
