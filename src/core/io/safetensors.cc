// SPDX-License-Identifier: Apache-2.0
// Access to the tensors of a mapped safetensors file.
#include "core/io/safetensors.h"

#include <fmt/format.h>

#include <bit>
#include <cstdint>
#include <utility>

#include "core/base/error.h"
#include "core/base/mapped_file.h"
#include "core/base/suggest.h"
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

std::span<const std::byte> SafetensorsFile::file_bytes() const noexcept {
  return mapping_->file.bytes();
}

HostTensor SafetensorsFile::tensor(std::string_view name) const {
  const SafetensorsInfo& place = info(name);
  const std::span<const std::byte> source = bytes(name);
  const bool aligned = reinterpret_cast<std::uintptr_t>(source.data()) % size_of(place.dtype) == 0;
  if (aligned) return {place.dtype, place.shape, source, mapping_};
  const auto copy = std::make_shared<const std::vector<std::byte>>(source.begin(), source.end());
  return {place.dtype, place.shape, *copy, copy};
}

}  // namespace isoshard
