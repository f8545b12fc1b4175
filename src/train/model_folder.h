// SPDX-License-Identifier: Apache-2.0
/// Hugging Face model folders: config.json and model.safetensors.
#pragma once
#include <filesystem>
#include <memory>
#include <string>

#include "model/config.h"
#include "model/weights.h"

namespace isoshard {

struct ModelFolder {
  ModelConfig config;
  std::string weights_path;   ///< empty when the folder has none
  std::string name;           ///< for slugs: letters, digits and _ of the folder's name
};

/// Reads a folder, or a config.json alone (its neighbour model.safetensors is used if there).
/// Errors   FileError that names file and field; a folder with only pytorch_model.bin or *.pt is refused ("pickle is never loaded").
[[nodiscard]] ModelFolder load_model_folder(const std::filesystem::path& path);

/// Checks that the file holds exactly the parameters of the config, with these shapes; tensors of layers beyond num_layers are allowed.
/// Errors   FileError that lists every missing, extra or misshapen tensor.
void check_weights(const std::filesystem::path& file, const ModelConfig& config);

/// Weights out of a safetensors file.
[[nodiscard]] std::unique_ptr<WeightSource> open_weights(const std::filesystem::path& file, const ModelConfig& config);

/// Writes all parameters of `config` as `source` gives them, in `dtype`, one tensor at a time.
void save_weights(const std::filesystem::path& file, const ModelConfig& config, const WeightSource& source);

}  // namespace isoshard
