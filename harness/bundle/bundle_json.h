// SPDX-License-Identifier: Apache-2.0
/// Records and responses as the JSON of a bundle.
#pragma once
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "core/io/safetensors.h"
#include "harness/trace/reference.h"

namespace isoshard::detail {

/// What is written. Schema 1 had no hashes.
inline constexpr int kSchema = 2;
/// Errors   FileError if the field "schema" is not the one that this program reads.
void require_known_schema(const nlohmann::json& object, const std::filesystem::path& file);

/// What a record may leave out.
struct RecordDefaults {
  int step = 0;
  std::int64_t position = 0;
  const SafetensorsInfo* tensor = nullptr;  ///< none: the record keeps no tensor
};

[[nodiscard]] nlohmann::json key_json(const RecordKey& key);
[[nodiscard]] nlohmann::json to_json(const Record& record);
[[nodiscard]] nlohmann::json to_json(const MeshShape& mesh);
inline constexpr const char* kResponsesFile = "responses.json";
[[nodiscard]] nlohmann::json to_json(const std::map<RecordKey, Response>& responses, int runs);

/// Errors   FileError that starts with `file`: a field is missing, of another type, or out of
///          range.
///
/// `position` is the place of the record in its file, `dtype` and `local_shape` are its tensor's,
/// all for fields that are not there. A layout to be inferred becomes a replica of the local shape.
[[nodiscard]] Record record_of(const nlohmann::json& json, const RecordDefaults& defaults,
                               const std::filesystem::path& file);
[[nodiscard]] bool is_inferred(const nlohmann::json& record, const std::filesystem::path& file);
[[nodiscard]] RecordKey key_of(const nlohmann::json& record, const RecordDefaults& defaults,
                               const std::filesystem::path& file);

[[nodiscard]] MeshShape mesh_of(const nlohmann::json& json, const std::filesystem::path& file);
[[nodiscard]] std::map<RecordKey, Response> responses_of(const nlohmann::json& json,
                                                         const std::filesystem::path& file,
                                                         int& runs);

/// The field, checked. Errors as above.
template <class T>
[[nodiscard]] T field(const nlohmann::json& json, const char* name,
                      const std::filesystem::path& file);

/// The field, or what is taken where it is not there. Errors as above, for a wrong type.
template <class T>
[[nodiscard]] T field_or(const nlohmann::json& json, const char* name, T otherwise,
                         const std::filesystem::path& file) {
  return json.is_object() && json.contains(name) ? field<T>(json, name, file) : otherwise;
}

/// A text that reports show: no control characters. Errors as above.
[[nodiscard]] std::string text_field(const nlohmann::json& json, const char* name,
                                     const std::filesystem::path& file);

/// kind/name/call: the tensor's name in its safetensors file.
[[nodiscard]] std::string tensor_name(const RecordKey& key);

}  // namespace isoshard::detail
