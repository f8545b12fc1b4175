// SPDX-License-Identifier: Apache-2.0
/// Entries that pack their tensor when it is written.
#include "core/io/tensor_files.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <vector>

#include "core/base/error.h"
#include "core/base/printable.h"

namespace isoshard {

void write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<SafetensorsEntry> entries;
  for (const NamedTensor& entry : tensors) {
    const at::Tensor& tensor = entry.tensor;
    if (!tensor.defined() || !tensor.device().is_cpu() || tensor.layout() != at::kStrided) {
      throw ShapeError(
          fmt::format("cannot write the tensor '{}': it is not a dense tensor in CPU memory",
                      printable(entry.name)));
    }
    entries.push_back({entry.name, dtype_of(tensor), tensor.sizes().vec(),
                       [&tensor] { return host_tensor_of(tensor); }});
  }
  write_safetensors(path, std::span<const SafetensorsEntry>(entries), metadata);
}

}  // namespace isoshard
