// SPDX-License-Identifier: Apache-2.0
/// A tensor as files and traces hold it: a dtype, a shape and bytes, without ATen.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/base/dtype.h"

namespace isoshard {

/// Contiguous, row-major and read-only. Copies share the bytes.
///
/// Guarantees   the bytes live as long as `owner` does, if there is one; else as long as what made
///              the tensor says. `bytes` holds numel() elements and is aligned for `dtype`.
///
///     const HostTensor weight = SafetensorsFile::open(path).tensor("model.norm.weight");
struct HostTensor {
  Dtype dtype = Dtype::kFloat32;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
  std::shared_ptr<const void> owner = nullptr;  ///< of the bytes; may be null

  [[nodiscard]] std::int64_t numel() const noexcept {
    return static_cast<std::int64_t>(bytes.size() / size_of(dtype));
  }
};

}  // namespace isoshard
