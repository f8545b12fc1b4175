// SPDX-License-Identifier: Apache-2.0
// Checks of an untrusted header, in the order in which each makes the next one safe.
#include "core/io/safetensors_header.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/printable.h"
#include "core/base/suggest.h"
#include "core/io/json.h"

namespace isoshard::detail {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMaxNameBytes = 1024;
constexpr std::size_t kMaxRank = 64;
constexpr JsonLimits kHeaderLimits{.max_bytes = kMaxHeaderBytes, .max_depth = 8};

constexpr std::array kDtypes{Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16,
                             Dtype::kInt64,   Dtype::kInt32,   Dtype::kInt16,    Dtype::kInt8,
                             Dtype::kUint8,   Dtype::kBool};

/// Refusals of one file, or of one tensor of it.
class Refusal {
 public:
  explicit Refusal(const std::filesystem::path& path) : where_(path.string()) {}
  Refusal(const Refusal& file, std::string_view tensor)
      : where_(fmt::format("{}: tensor '{}'", file.where_, printable(tensor))) {}
  [[noreturn]] void operator()(std::string_view problem) const {
    throw FileError(fmt::format("{}: {}", where_, problem));
  }

 private:
  std::string where_;
};

bool starts_with(std::span<const std::byte> file, std::string_view magic) {
  return file.size() >= magic.size() && std::memcmp(file.data(), magic.data(), magic.size()) == 0;
}

void refuse_pickle_suffix(const std::filesystem::path& path, const Refusal& refuse) {
  constexpr std::array<std::string_view, 5> kPickleSuffixes{".pt", ".pth", ".bin", ".ckpt", ".pkl"};
  const std::string suffix = path.extension().string();
  if (std::find(kPickleSuffixes.begin(), kPickleSuffixes.end(), suffix) != kPickleSuffixes.end()) {
    refuse(
        fmt::format("a {} file is a pickle; a pickle is never loaded (it can run code); convert it "
                    "to safetensors",
                    suffix));
  }
}

/// What a file is that does not begin like a safetensors file. Only asked then: a length may begin
/// with the same bytes.
void refuse_other_formats(std::span<const std::byte> file, const Refusal& refuse) {
  if (starts_with(file, "PK\x03\x04") || starts_with(file, "\x80")) {
    refuse(
        "is a pickle (torch.save); a pickle is never loaded (it can run code); convert it to "
        "safetensors");
  }
  if (starts_with(file, "version https://git-lfs"))
    refuse("is a Git LFS pointer, not the tensors; fetch the file with `git lfs pull`");
}

/// The JSON text of the header.
std::string_view header_text(std::span<const std::byte> file, const Refusal& refuse) {
  if (file.size() < kLengthBytes) {
    refuse_other_formats(file, refuse);
    refuse(fmt::format("is {} bytes long; a safetensors file begins with an 8-byte header length",
                       file.size()));
  }
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    length |= std::uint64_t{std::to_integer<std::uint8_t>(file[i])} << (8 * i);
  const std::size_t rest = file.size() - kLengthBytes;
  if (length == 0 || length > rest || length > kMaxHeaderBytes) {
    refuse_other_formats(file, refuse);
    if (length == 0) refuse("its header length must be above 0, got 0");
    if (length > kMaxHeaderBytes)
      refuse(fmt::format("its header length must be at most {} bytes, got {}", kMaxHeaderBytes,
                         length));
    refuse(fmt::format("its header length is {} bytes, but only {} follow; is the file truncated?",
                       length, rest));
  }
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + kLengthBytes,
                              static_cast<std::size_t>(length));
  if (text.front() != '{') {
    refuse_other_formats(file, refuse);
    refuse(fmt::format("its header must begin with '{{', got '{}'", printable(text.substr(0, 1))));
  }
  return text;
}

Dtype dtype_field(const Json& value, const Refusal& refuse) {
  if (!value.is_string())
    refuse(fmt::format("dtype must be a string, got a JSON {}", value.type_name()));
  const auto& name = value.get_ref<const std::string&>();
  std::vector<std::string> known;
  for (const Dtype dtype : kDtypes) {
    if (name == safetensors_name_of(dtype)) return dtype;
    known.emplace_back(safetensors_name_of(dtype));
  }
  refuse(fmt::format("unknown dtype '{}'{}; it must be one of {}", printable(name),
                     did_you_mean(name, known), join_names(known)));
}

std::vector<std::int64_t> shape_field(const Json& value, const Refusal& refuse) {
  if (!value.is_array())
    refuse(fmt::format("shape must be an array, got a JSON {}", value.type_name()));
  if (value.size() > kMaxRank)
    refuse(fmt::format("shape must have at most {} dimensions, got {}", kMaxRank, value.size()));
  std::vector<std::int64_t> shape;
  for (const Json& size : value) {
    if (!size.is_number_unsigned() ||
        size.get<std::uint64_t>() > std::numeric_limits<std::int64_t>::max()) {
      refuse(fmt::format("shape must hold sizes from 0 to 2^63-1, got {}",
                         printable(size.dump(-1, ' ', true), 40)));
    }
    shape.push_back(size.get<std::int64_t>());
  }
  return shape;
}

/// Bytes of the tensor, or nothing if they do not fit in 63 bits. A size of 0 does not excuse the
/// other sizes: strides use them.
std::optional<std::uint64_t> bytes_of(const std::vector<std::int64_t>& shape, Dtype dtype) {
  std::int64_t product = static_cast<std::int64_t>(size_of(dtype));
  bool empty = false;
  for (const std::int64_t size : shape) {
    empty = empty || size == 0;
    if (size != 0 && __builtin_mul_overflow(product, size, &product)) return std::nullopt;
  }
  return empty ? 0 : static_cast<std::uint64_t>(product);
}

std::pair<std::uint64_t, std::uint64_t> offsets_field(const Json& value, std::uint64_t data_bytes,
                                                      const Refusal& refuse) {
  if (!value.is_array() || value.size() != 2 || !value[0].is_number_unsigned() ||
      !value[1].is_number_unsigned()) {
    refuse("data_offsets must be a pair of non-negative integers");
  }
  const auto begin = value[0].get<std::uint64_t>(), end = value[1].get<std::uint64_t>();
  if (begin > end || end > data_bytes) {
    refuse(fmt::format(
        "data_offsets [{}, {}] must lie inside the {} bytes of data; is the file truncated?", begin,
        end, data_bytes));
  }
  return {begin, end};
}

SafetensorsInfo parse_info(const Json& entry, std::uint64_t data_bytes, const Refusal& refuse) {
  if (!entry.is_object())
    refuse(fmt::format("its entry must be an object, got a JSON {}", entry.type_name()));
  for (const char* field : {"dtype", "shape", "data_offsets"}) {
    if (!entry.contains(field)) refuse(fmt::format("has no {}", field));
  }
  for (const auto& [field, unused] : entry.items()) {
    if (field != "dtype" && field != "shape" && field != "data_offsets")
      refuse(fmt::format("unknown field '{}'", printable(field)));
  }
  SafetensorsInfo info;
  info.dtype = dtype_field(entry["dtype"], refuse);
  info.shape = shape_field(entry["shape"], refuse);
  std::tie(info.begin, info.end) = offsets_field(entry["data_offsets"], data_bytes, refuse);
  const std::optional<std::uint64_t> bytes = bytes_of(info.shape, info.dtype);
  if (!bytes) refuse("the number of elements in its shape must be below 2^63");
  if (*bytes != info.end - info.begin) {
    refuse(fmt::format("data_offsets [{}, {}] must span the {} bytes of shape and dtype, got {}",
                       info.begin, info.end, *bytes, info.end - info.begin));
  }
  return info;
}

std::map<std::string, std::string> parse_metadata(const Json& entry, const Refusal& refuse) {
  if (!entry.is_object())
    refuse(fmt::format("__metadata__ must be an object, got a JSON {}", entry.type_name()));
  std::map<std::string, std::string> metadata;
  for (const auto& [key, value] : entry.items()) {
    if (!value.is_string())
      refuse(fmt::format("__metadata__ '{}' must be a string, got a JSON {}", printable(key),
                         value.type_name()));
    metadata.emplace(key, value.get_ref<const std::string&>());
  }
  return metadata;
}

/// Every byte of the data belongs to exactly one tensor.
void require_tiling(const SafetensorsHeader& header, std::uint64_t data_bytes,
                    const Refusal& refuse) {
  using Entry = std::pair<const std::string, SafetensorsInfo>;
  std::vector<const Entry*> entries;
  for (const Entry& entry : header.infos) entries.push_back(&entry);
  const auto place = [](const Entry* entry) {
    return std::tuple(entry->second.begin, entry->second.end);
  };
  std::stable_sort(entries.begin(), entries.end(),
                   [&](const Entry* a, const Entry* b) { return place(a) < place(b); });
  std::uint64_t reached = 0;
  for (const Entry* entry : entries) {
    if (entry->second.begin != reached) {
      Refusal(refuse, entry->first)(fmt::format(
          "begins at byte {} of the data, where the tensors before it end at {} ({})",
          entry->second.begin, reached, entry->second.begin > reached ? "a hole" : "an overlap"));
    }
    reached = entry->second.end;
  }
  if (reached != data_bytes)
    refuse(fmt::format("{} bytes follow the last tensor and belong to none", data_bytes - reached));
}

}  // namespace

std::string name_problem(std::string_view name) {
  if (name.empty()) return "is empty";
  if (name.size() > kMaxNameBytes)
    return fmt::format("is {} bytes long, at most {} are allowed", name.size(), kMaxNameBytes);
  for (std::size_t i = 0; i < name.size(); ++i) {
    const auto byte = static_cast<unsigned char>(name[i]);
    // C1 controls (U+0080 to U+009F) are C2 80 to C2 9F in UTF-8; U+009B opens an ANSI sequence as
    // ESC [ does.
    const bool c1 =
        byte == 0xc2 && i + 1 < name.size() && static_cast<unsigned char>(name[i + 1]) < 0xa0;
    if (byte < 0x20 || byte == 0x7f || c1)
      return fmt::format("holds the control character {:#04x} at byte {}", byte, i);
  }
  return "";
}

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> file,
                                           const std::filesystem::path& path) {
  const Refusal refuse(path);
  refuse_pickle_suffix(path, refuse);
  const std::string_view text = header_text(file, refuse);
  const Json json = parse_json(text, path, kHeaderLimits);
  SafetensorsHeader header;
  header.data_begin = kLengthBytes + text.size();
  const std::uint64_t data_bytes = file.size() - header.data_begin;
  for (const auto& [name, entry] : json.items()) {
    if (name == kMetadataKey) {
      header.metadata = parse_metadata(entry, refuse);
      continue;
    }
    const Refusal refuse_tensor(refuse, name);
    if (const std::string problem = name_problem(name); !problem.empty())
      refuse_tensor("its name " + problem);
    header.infos.emplace(name, parse_info(entry, data_bytes, refuse_tensor));
  }
  require_tiling(header, data_bytes, refuse);
  return header;
}

}  // namespace isoshard::detail
