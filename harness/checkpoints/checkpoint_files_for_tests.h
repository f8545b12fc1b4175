// SPDX-License-Identifier: Apache-2.0
/// For tests: small checkpoints on disk.
#pragma once
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/io/safetensors.h"
#include "core/mesh/layout.h"

namespace isoshard::checkpoint_tests {

namespace fs = std::filesystem;

struct Tensor {
  Dtype dtype = Dtype::kFloat32;
  Shape shape;
  std::vector<std::byte> bytes;
};

inline Tensor floats(Shape shape, const std::vector<float>& values) {
  Tensor tensor{Dtype::kFloat32, std::move(shape), {}};
  tensor.bytes.resize(values.size() * sizeof(float));
  std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
  return tensor;
}

/// Values that differ from each other and between seeds, none of them 0.
inline Tensor numbered(Shape shape, int seed) {
  std::vector<float> values(static_cast<std::size_t>(numel_of(shape)));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(1 + (i * 37 + static_cast<std::size_t>(seed) * 11) % 101) / 64;
  return floats(std::move(shape), values);
}

inline float& value(Tensor& tensor, std::size_t index) {
  return reinterpret_cast<float*>(tensor.bytes.data())[index];
}

using Tensors = std::vector<std::pair<std::string, Tensor>>;

inline Tensor& at(Tensors& tensors, const std::string& name) {
  for (auto& [other, tensor] : tensors) {
    if (other == name) return tensor;
  }
  throw std::out_of_range(name);
}

/// A model of one layer with Adam's state of one weight.
inline Tensors model() {
  return {{"model.embed_tokens.weight", numbered({8, 4}, 1)},
          {"model.layers.0.self_attn.q_proj.weight", numbered({4, 4}, 2)},
          {"model.layers.0.self_attn.k_proj.weight", numbered({4, 4}, 3)},
          {"model.layers.0.mlp.gate_up_proj.weight", numbered({6, 4}, 4)},
          {"model.norm.weight", numbered({4}, 5)},
          {"model.norm.weight.exp_avg", numbered({4}, 6)},
          {"model.norm.weight.step", floats({}, {2})},
          {"lm_head.weight", numbered({8, 4}, 7)}};
}

inline void save(const fs::path& path, const Tensors& tensors,
                 const std::map<std::string, std::string>& metadata = {}) {
  fs::create_directories(path.parent_path());
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, tensor] : tensors)
    entries.push_back({name, tensor.dtype, tensor.shape, [&tensor = tensor] {
                         return HostTensor{tensor.dtype, tensor.shape, tensor.bytes};
                       }});
  write_safetensors(path, entries, metadata);
}

inline void write_text(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

/// As Hugging Face writes a model of several files: the tensors in turn.
inline void save_sharded(const fs::path& folder, const Tensors& tensors, std::size_t num_files) {
  nlohmann::json map = nlohmann::json::object();
  for (std::size_t file = 0; file < num_files; ++file) {
    const std::string name = "model-0000" + std::to_string(file + 1) + ".safetensors";
    Tensors held;
    for (std::size_t i = file; i < tensors.size(); i += num_files) {
      held.push_back(tensors[i]);
      map[tensors[i].first] = name;
    }
    save(folder / name, held);
  }
  write_text(folder / "model.safetensors.index.json",
             nlohmann::json{{"metadata", {{"total_size", 1}}}, {"weight_map", map}}.dump());
}

}  // namespace isoshard::checkpoint_tests
