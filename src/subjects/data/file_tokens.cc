// SPDX-License-Identifier: Apache-2.0
// Ids of flat files and of safetensors.
#include "subjects/data/file_tokens.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/mapped_file.h"
#include "core/base/suggest.h"
#include "core/io/safetensors.h"

namespace isoshard {
namespace {

static_assert(std::endian::native == std::endian::little, "ids are little-endian in files");

struct IdTypeInfo {
  IdType type;
  std::string_view name;
  std::int64_t size;
};
constexpr std::array kTypes{
    IdTypeInfo{IdType::kUint8, "uint8", 1},   IdTypeInfo{IdType::kInt16, "int16", 2},
    IdTypeInfo{IdType::kUint16, "uint16", 2}, IdTypeInfo{IdType::kInt32, "int32", 4},
    IdTypeInfo{IdType::kUint32, "uint32", 4}, IdTypeInfo{IdType::kInt64, "int64", 8}};

const IdTypeInfo& info_of(IdType type) noexcept {
  return kTypes[static_cast<std::size_t>(type)];
}

template <class T>
std::int64_t load(const std::byte* at) noexcept {
  T value;
  std::memcpy(&value, at, sizeof value);
  return static_cast<std::int64_t>(value);
}

using Load = std::int64_t (*)(const std::byte*);
Load loader_of(IdType type) noexcept {
  switch (type) {
    case IdType::kUint8:
      return load<std::uint8_t>;
    case IdType::kInt16:
      return load<std::int16_t>;
    case IdType::kUint16:
      return load<std::uint16_t>;
    case IdType::kInt32:
      return load<std::int32_t>;
    case IdType::kUint32:
      return load<std::uint32_t>;
    case IdType::kInt64:
      break;
  }
  return load<std::int64_t>;
}

// "" if the bytes are ids of that type below the vocabulary size, else what is wrong.
std::string problem_with(std::span<const std::byte> bytes, IdType type, std::int64_t vocab_size) {
  const auto size = static_cast<std::size_t>(size_of(type));
  if (bytes.size() % size != 0)
    return fmt::format("{} bytes are not a whole number of {} ids", bytes.size(), name_of(type));
  const Load load_id = loader_of(type);
  for (std::size_t at = 0; at < bytes.size(); at += size) {
    const std::int64_t id = load_id(bytes.data() + at);
    if (id < 0 || id >= vocab_size) {
      return fmt::format(
          "read as {}, id {} at place {} of {} is outside the model's vocabulary of {}",
          name_of(type), id, at / size, bytes.size() / size, vocab_size);
    }
  }
  return "";
}

void require_ids(const std::filesystem::path& path, std::span<const std::byte> bytes, IdType type,
                 std::int64_t vocab_size) {
  const std::string problem = problem_with(bytes, type, vocab_size);
  if (!problem.empty()) throw FileError(fmt::format("{}: {}", path.string(), problem));
}

IdType derived_type(const std::filesystem::path& path, std::span<const std::byte> bytes,
                    std::int64_t vocab_size) {
  std::vector<std::string> problems;
  for (const IdType type : {IdType::kInt64, IdType::kUint32, IdType::kUint16}) {
    problems.push_back(problem_with(bytes, type, vocab_size));
    if (problems.back().empty()) return type;
  }
  throw FileError(fmt::format("{}: no type of ids fits the model's vocabulary of {}:\n  {}",
                              path.string(), vocab_size, fmt::join(problems, "\n  ")));
}

IdType id_type_of(Dtype dtype, const std::filesystem::path& path, const std::string& name) {
  switch (dtype) {
    case Dtype::kInt64:
      return IdType::kInt64;
    case Dtype::kInt32:
      return IdType::kInt32;
    case Dtype::kInt16:
      return IdType::kInt16;
    case Dtype::kUint8:
      return IdType::kUint8;
    default:
      throw FileError(fmt::format("{}: tensor '{}' must be int64, int32, int16 or uint8, got {}",
                                  path.string(), name, name_of(dtype)));
  }
}

std::string tensor_of_ids(const SafetensorsFile& file) {
  if (file.contains("input_ids")) return "input_ids";
  if (file.names().size() == 1) return file.names().front();
  throw FileError(
      fmt::format("{}: must hold only one tensor or one named 'input_ids', got {} others",
                  file.path().string(), file.names().size()));
}

}  // namespace

std::string_view name_of(IdType type) noexcept {
  return info_of(type).name;
}

std::int64_t size_of(IdType type) noexcept {
  return info_of(type).size;
}

IdType parse_id_type(std::string_view name) {
  std::vector<std::string> known;
  for (const IdTypeInfo& info : kTypes) {
    if (info.name == name) return info.type;
    known.emplace_back(info.name);
  }
  throw UsageError(fmt::format("unknown type of ids '{}'{}; it must be one of {}", name,
                               did_you_mean(name, known), join_names(known)));
}

bool is_token_file(const std::filesystem::path& path) {
  return path.extension() == ".bin" || path.extension() == ".safetensors";
}

FileTokens::FileTokens(const std::filesystem::path& path, std::optional<IdType> type,
                       std::int64_t vocab_size, std::int64_t seq_length)
    : seq_length_(seq_length) {
  if (seq_length < 1)
    throw UsageError(fmt::format("the sequence length must be at least 1, got {}", seq_length));
  if (path.extension() == ".safetensors") {
    open_safetensors(path, type, vocab_size, seq_length);
  } else {
    open_flat(path, type, vocab_size);
  }
  const std::int64_t count = static_cast<std::int64_t>(bytes_.size()) / size_of(type_);
  num_sequences_ = count / seq_length;
  if (num_sequences_ == 0) {
    throw FileError(fmt::format("{}: must hold at least one sequence of {} ids, got {} ids ({})",
                                path.string(), seq_length, count, name_of(type_)));
  }
}

void FileTokens::open_flat(const std::filesystem::path& path, std::optional<IdType> type,
                           std::int64_t vocab_size) {
  const auto file = std::make_shared<const MappedFile>(path);
  bytes_ = file->bytes();
  keeper_ = file;
  if (type.has_value()) require_ids(path, bytes_, *type, vocab_size);
  type_ = type.has_value() ? *type : derived_type(path, bytes_, vocab_size);
}

void FileTokens::open_safetensors(const std::filesystem::path& path, std::optional<IdType> type,
                                  std::int64_t vocab_size, std::int64_t seq_length) {
  const auto file = std::make_shared<const SafetensorsFile>(SafetensorsFile::open(path));
  const std::string name = tensor_of_ids(*file);
  const SafetensorsInfo& info = file->info(name);
  type_ = id_type_of(info.dtype, path, name);
  if (type.has_value() && *type != type_) {
    throw UsageError(fmt::format("{}: tensor '{}' must be {} as requested, got {}", path.string(),
                                 name, name_of(*type), name_of(type_)));
  }
  const bool flat = info.shape.size() == 1,
             rows = info.shape.size() == 2 && info.shape[1] == seq_length;
  if (!flat && !rows) {
    throw FileError(
        fmt::format("{}: tensor '{}' must be [T], or [N, {}] for sequences of {}, got [{}]",
                    path.string(), name, seq_length, seq_length, fmt::join(info.shape, ", ")));
  }
  bytes_ = file->bytes(name);
  keeper_ = file;
  require_ids(path, bytes_, type_, vocab_size);
}

void FileTokens::read(std::int64_t number, std::span<std::int64_t> ids) const {
  const auto size = static_cast<std::size_t>(size_of(type_));
  const std::byte* at =
      bytes_.data() + static_cast<std::size_t>(number % num_sequences_ * seq_length_) * size;
  const Load load_id = loader_of(type_);
  for (std::int64_t& id : ids) {
    id = load_id(at);
    at += size;
  }
}

}  // namespace isoshard
