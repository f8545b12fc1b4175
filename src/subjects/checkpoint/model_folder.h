// SPDX-License-Identifier: Apache-2.0
/// Hugging Face model folders.
#pragma once
#include <filesystem>
#include <string>

#include "subjects/model/config/config.h"

namespace isoshard {

/// What a path to a model names.
struct ModelFolder {
  ModelConfig config;
  std::string weights_path;  ///< model.safetensors; empty if there is none
  std::string name;          ///< the folder's own name
};

/// Reads a folder with config.json (and model.safetensors), or that config.json itself.
/// Errors   FileError: no such path, no or a malformed config.json, weights in a pickle (*.bin,
///          *.pt, *.pth) or in several files.
[[nodiscard]] ModelFolder load_model_folder(const std::filesystem::path& path);

}  // namespace isoshard
