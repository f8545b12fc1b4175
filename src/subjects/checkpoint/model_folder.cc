// SPDX-License-Identifier: Apache-2.0
// Finding config and weights of a Hugging Face model.
#include "subjects/checkpoint/model_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "core/base/error.h"
#include "core/io/json.h"

namespace isoshard {
namespace {

constexpr std::string_view kWeightsName = "model.safetensors";

std::filesystem::path config_path_of(const std::filesystem::path& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    const std::filesystem::path config = path / "config.json";
    if (std::filesystem::exists(config, ignored)) return config;
    throw FileError(fmt::format(
        "{}: this folder has no config.json; name a Hugging Face model folder or a config.json",
        path.string()));
  }
  if (!std::filesystem::exists(path, ignored)) {
    throw FileError(fmt::format(
        "{}: there is no such file or folder; name a Hugging Face model folder or a config.json",
        path.string()));
  }
  if (path.extension() != ".json") {
    throw FileError(fmt::format("{}: is neither a folder nor a config.json", path.string()));
  }
  return path;
}

// torch.save writes a zip archive, before PyTorch 1.6 a bare pickle; token ids are kept in .bin
// files, too.
bool is_pickled(const std::filesystem::path& file) {
  const std::string extension = file.extension().string();
  if (extension == ".pt" || extension == ".pth") return true;
  if (extension != ".bin") return false;
  if (file.filename().string().starts_with("pytorch_model")) return true;
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(file, ignored)) return false;  // a FIFO would not open
  std::ifstream stream(file, std::ios::binary);
  char first[2] = {};
  stream.read(first, sizeof first);
  return (first[0] == 'P' && first[1] == 'K') ||
         (first[0] == '\x80' && first[1] >= 2 && first[1] <= 5);
}

// A folder without model.safetensors is fine (weights are drawn); one whose weights cannot be read
// here is not.
std::string weights_in(const std::filesystem::path& folder) {
  std::error_code error;
  const std::filesystem::path weights = folder / kWeightsName;
  if (std::filesystem::exists(weights, error)) return weights.string();
  std::filesystem::directory_iterator entries(folder, error);
  if (error)
    throw FileError(fmt::format("{}: cannot be listed: {}", folder.string(), error.message()));
  std::vector<std::filesystem::path> files;
  for (const auto& entry : entries) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  for (const std::filesystem::path& file : files) {
    if (is_pickled(file)) {
      throw FileError(fmt::format(
          "{}: pickled weights are not read, because they can run code; convert them to {}",
          file.string(), kWeightsName));
    }
    if (file.filename() == "model.safetensors.index.json") {
      throw FileError(
          fmt::format("{}: weights in several files are not read yet; join them into one {}",
                      file.string(), kWeightsName));
    }
  }
  return {};
}

}  // namespace

ModelFolder load_model_folder(const std::filesystem::path& path) {
  const std::filesystem::path config_path = config_path_of(path);
  const std::filesystem::path folder =
      std::filesystem::absolute(config_path).lexically_normal().parent_path();
  ModelFolder result;
  result.config = parse_model_config(read_json_file(config_path), config_path.string());
  result.weights_path = weights_in(folder);
  result.name = folder.filename().string();
  return result;
}

}  // namespace isoshard
