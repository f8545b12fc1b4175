// SPDX-License-Identifier: Apache-2.0
// Access to the tensors of a mapped safetensors file.
#include "core/io/safetensors.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <utility>

#include "core/base/error.h"
#include "core/base/mapped_file.h"
#include "core/base/suggest.h"
#include "core/comm/tensor.h"
#include "core/io/safetensors_header.h"

namespace isoshard {

static_assert(std::endian::native == std::endian::little,
              "safetensors data are little-endian and used in place");

struct SafetensorsFile::Mapping {
  MappedFile file;
  std::span<const std::byte> data;  // after the header
};

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  auto mapping = std::make_shared<Mapping>(Mapping{MappedFile(path), {}});
  detail::SafetensorsHeader header = detail::parse_safetensors_header(mapping->file.bytes(), path);
  mapping->data = mapping->file.bytes().subspan(header.data_begin);
  SafetensorsFile file;
  file.path_ = path;
  file.mapping_ = std::move(mapping);
  file.infos_ = std::move(header.infos);
  file.metadata_ = std::move(header.metadata);
  for (const auto& [name, info] : file.infos_) file.names_.push_back(name);
  return file;
}

const SafetensorsInfo& SafetensorsFile::info(std::string_view name) const {
  const auto found = infos_.find(name);
  if (found == infos_.end()) {
    throw FileError(fmt::format("{}: has no tensor '{}' among its {}{}", path_.string(), name,
                                names_.size(), did_you_mean(name, names_)));
  }
  return found->second;
}

std::span<const std::byte> SafetensorsFile::bytes(std::string_view name) const {
  const SafetensorsInfo& place = info(name);
  return mapping_->data.subspan(static_cast<std::size_t>(place.begin),
                                static_cast<std::size_t>(place.end - place.begin));
}

at::Tensor SafetensorsFile::tensor(std::string_view name) const {
  const SafetensorsInfo& place = info(name);
  const std::span<const std::byte> source = bytes(name);
  const at::TensorOptions options = at::TensorOptions().dtype(scalar_type_of(place.dtype));
  const bool aligned = reinterpret_cast<std::uintptr_t>(source.data()) % size_of(place.dtype) == 0;
  if (source.empty() || !aligned) {
    at::Tensor copy = at::empty(place.shape, options);
    if (!source.empty()) std::memcpy(copy.mutable_data_ptr(), source.data(), source.size());
    return copy;
  }
  // NOLINT: ATen has no read-only tensors; the pages are
  void* address = const_cast<std::byte*>(source.data());
  return at::from_blob(
      address, place.shape, [mapping = mapping_](void*) {}, options);
}

}  // namespace isoshard
