// SPDX-License-Identifier: Apache-2.0
// Layout, header, then one tensor after the other.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/base/printable.h"
#include "core/io/safetensors.h"
#include "core/io/safetensors_header.h"

namespace isoshard {
namespace {

constexpr std::size_t kAlignment = 8;

void require_writable(std::span<const SafetensorsEntry> tensors) {
  std::set<std::string_view> seen;
  for (const SafetensorsEntry& entry : tensors) {
    std::string problem = detail::name_problem(entry.name);
    if (entry.name == detail::kMetadataKey) problem = "is reserved";
    if (!seen.insert(entry.name).second) problem = "is a duplicate";
    if (!problem.empty())
      throw UsageError(
          fmt::format("cannot write the tensor '{}': its name {}", printable(entry.name), problem));
  }
}

/// Larger elements first: with sizes that divide one another, every tensor then begins at a
/// multiple of its own.
std::vector<const SafetensorsEntry*> data_order(std::span<const SafetensorsEntry> tensors) {
  std::vector<const SafetensorsEntry*> order;
  for (const SafetensorsEntry& entry : tensors) order.push_back(&entry);
  std::stable_sort(order.begin(), order.end(),
                   [](const SafetensorsEntry* a, const SafetensorsEntry* b) {
                     return size_of(a->dtype) > size_of(b->dtype);
                   });
  return order;
}

std::uint64_t bytes_of(const SafetensorsEntry& entry) {
  std::uint64_t bytes = size_of(entry.dtype);
  for (const std::int64_t size : entry.shape) bytes *= static_cast<std::uint64_t>(size);
  return bytes;
}

std::string quoted(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::type_error&) {
    throw UsageError(fmt::format("cannot write '{}': it must be UTF-8", printable(text)));
  }
}

std::string header_of(std::span<const SafetensorsEntry* const> order,
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
  for (const SafetensorsEntry* entry : order) {
    const std::uint64_t end = begin + bytes_of(*entry);
    fmt::format_to(out, "{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}},",
                   quoted(entry->name), safetensors_name_of(entry->dtype),
                   fmt::join(entry->shape, ","), begin, end);
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

void write_safetensors(const std::filesystem::path& path, std::span<const SafetensorsEntry> tensors,
                       const std::map<std::string, std::string>& metadata, Sha256* hash) {
  require_writable(tensors);
  const std::vector<const SafetensorsEntry*> order = data_order(tensors);
  const std::string header = header_of(order, metadata);
  std::array<std::byte, detail::kLengthBytes> length{};
  for (std::size_t i = 0; i < length.size(); ++i)
    length[i] = static_cast<std::byte>(std::uint64_t{header.size()} >> (8 * i));
  AtomicFile file(path);
  const auto write = [&](std::span<const std::byte> bytes) {
    file.write(bytes);
    if (hash != nullptr) hash->update(bytes);
  };
  write(length);
  write(std::as_bytes(std::span(header)));
  for (const SafetensorsEntry* entry : order) {
    const HostTensor tensor = entry->read();
    if (tensor.bytes.size() != bytes_of(*entry)) {
      throw ShapeError(fmt::format("cannot write the tensor '{}': it must have {} bytes, got {}",
                                   entry->name, bytes_of(*entry), tensor.bytes.size()));
    }
    write(tensor.bytes);
  }
  file.commit();
}

}  // namespace isoshard
