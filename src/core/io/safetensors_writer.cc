// SPDX-License-Identifier: Apache-2.0
// Layout, header, then one tensor after the other.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/base/printable.h"
#include "core/comm/tensor.h"
#include "core/io/safetensors.h"
#include "core/io/safetensors_header.h"

namespace isoshard {
namespace {

constexpr std::size_t kAlignment = 8;

void require_writable(std::span<const NamedTensor> tensors) {
  std::set<std::string_view> seen;
  for (const NamedTensor& entry : tensors) {
    std::string problem = detail::name_problem(entry.name);
    if (entry.name == detail::kMetadataKey) problem = "is reserved";
    if (!seen.insert(entry.name).second) problem = "is a duplicate";
    if (!problem.empty())
      throw UsageError(
          fmt::format("cannot write the tensor '{}': its name {}", printable(entry.name), problem));
    if (!entry.tensor.defined() || !entry.tensor.device().is_cpu() ||
        entry.tensor.layout() != at::kStrided) {
      throw ShapeError(fmt::format(
          "cannot write the tensor '{}': it must be dense and in CPU memory", entry.name));
    }
  }
}

/// Larger elements first: with sizes that divide one another, every tensor then begins at a
/// multiple of its own.
std::vector<const NamedTensor*> data_order(std::span<const NamedTensor> tensors) {
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& entry : tensors) order.push_back(&entry);
  std::stable_sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) {
    return a->tensor.element_size() > b->tensor.element_size();
  });
  return order;
}

std::string quoted(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::type_error&) {
    throw UsageError(fmt::format("cannot write '{}': it must be UTF-8", printable(text)));
  }
}

std::string header_of(std::span<const NamedTensor* const> order,
                      const std::map<std::string, std::string>& metadata) {
  std::string text = "{";
  const auto out = std::back_inserter(text);
  if (!metadata.empty()) {
    fmt::format_to(out, "\"{}\":{{", detail::kMetadataKey);
    for (const auto& [key, value] : metadata)
      fmt::format_to(out, "{}:{},", quoted(key), quoted(value));
    text.back() = '}';
    text += ',';
  }
  std::uint64_t begin = 0;
  for (const NamedTensor* entry : order) {
    const std::uint64_t end = begin + static_cast<std::uint64_t>(entry->tensor.nbytes());
    fmt::format_to(out, "{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}},",
                   quoted(entry->name), safetensors_name_of(dtype_of(entry->tensor)),
                   fmt::join(entry->tensor.sizes(), ","), begin, end);
    begin = end;
  }
  if (text.back() == ',') text.pop_back();
  text += '}';
  text.append((kAlignment - (detail::kLengthBytes + text.size()) % kAlignment) % kAlignment, ' ');
  if (text.size() > detail::kMaxHeaderBytes) {
    throw UsageError(fmt::format(
        "a safetensors header of {} bytes is too long to be read again; write several files",
        text.size()));
  }
  return text;
}

}  // namespace

void write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata) {
  require_writable(tensors);
  const std::vector<const NamedTensor*> order = data_order(tensors);
  const std::string header = header_of(order, metadata);
  std::array<std::byte, detail::kLengthBytes> length{};
  for (std::size_t i = 0; i < length.size(); ++i)
    length[i] = static_cast<std::byte>(std::uint64_t{header.size()} >> (8 * i));
  AtomicFile file(path);
  file.write(length);
  file.write(header);
  for (const NamedTensor* entry : order) {
    const at::Tensor packed = entry->tensor.detach().resolve_neg().contiguous();
    file.write({static_cast<const std::byte*>(packed.const_data_ptr()),
                static_cast<std::size_t>(packed.nbytes())});
  }
  file.commit();
}

}  // namespace isoshard
