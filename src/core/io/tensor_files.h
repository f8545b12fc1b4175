// SPDX-License-Identifier: Apache-2.0
/// Safetensors files of at::Tensor: the thin layer above safetensors.h.
#pragma once
#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <span>
#include <string>

#include "core/io/safetensors.h"
#include "core/tensor/convert.h"

namespace isoshard {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// As write_safetensors of entries: at most one non-contiguous tensor is copied at a time.
///
/// Errors   also ShapeError for a tensor that is not dense in CPU memory or has an unknown dtype.
void write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace isoshard
