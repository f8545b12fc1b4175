// SPDX-License-Identifier: Apache-2.0
/// Writing and strictly reading the JSON parts of a bundle.
#include "harness/bundle/bundle_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "core/base/hex_float.h"
#include "core/base/printable.h"
#include "core/io/safetensors_header.h"
#include "harness/bundle/bundle_form.h"

namespace isoshard::detail {
namespace {

using nlohmann::json;

constexpr RecordKind kKinds[] = {RecordKind::kParam,      RecordKind::kGrad,
                                 RecordKind::kActivation, RecordKind::kActivationGrad,
                                 RecordKind::kOptimizer,  RecordKind::kScalar,
                                 RecordKind::kDataId,     RecordKind::kMask};
constexpr int kMaxVariants = 1000;
constexpr std::string_view kPlacementKinds[] = {"replicate", "shard", "partial", "only_at"};

const json& member(const json& object, const char* name, const std::filesystem::path& file) {
  if (!object.is_object() || !object.contains(name))
    refuse_form(file, fmt::format("the field \"{}\" is missing", name));
  return object.at(name);
}

/// A hex float, or a number.
double hex_field(const json& object, const char* name, const std::filesystem::path& file) {
  if (member(object, name, file).is_number()) return object.at(name).get<double>();
  const auto text = field<std::string>(object, name, file);
  const auto value = parse_hex(text);
  if (!value)
    refuse_form(file, fmt::format("\"{}\" must be a number or a hex float, got '{}'", name,
                                  printable(text)));
  return *value;
}

Shape shape_field(const json& object, const char* name, const std::filesystem::path& file) {
  Shape shape = field<Shape>(object, name, file);
  for (const std::int64_t size : shape) {
    if (size < 0 || size > (std::int64_t{1} << 48))
      refuse_form(file, fmt::format("\"{}\" must hold sizes from 0 to 2^48, got {}", name, size));
  }
  std::int64_t numel = 1;
  for (const std::int64_t size : shape) {
    if (size != 0 && __builtin_mul_overflow(numel, size, &numel))
      refuse_form(file, fmt::format("the product of \"{}\" must be below 2^63", name));
  }
  return shape;
}

RecordKind kind_of(const json& j, const std::filesystem::path& file) {
  const auto kind = field<std::string>(j, "kind", file);
  for (const RecordKind candidate : kKinds) {
    if (name_of(candidate) == kind) return candidate;
  }
  refuse_form(file, fmt::format("the kind of a record must be param, grad, activation, "
                                "activation_grad, optimizer, scalar, data_id or mask, got \"{}\"",
                                printable(kind)));
}

json placement_json(const Placement& p) {
  json j = {{"axis", name_of(p.axis)}, {"kind", kPlacementKinds[static_cast<std::size_t>(p.kind)]}};
  if (p.kind == Placement::Kind::kShard) j["dim"] = p.dim;
  if (p.kind == Placement::Kind::kPartial) j["reduction"] = name_of(p.reduction);
  if (p.kind == Placement::Kind::kOnlyAt) j["coordinate"] = p.coordinate;
  if (p.also_at != 0) {
    const std::vector<int> at = coordinates_of(p);
    j["also_at"] = std::vector<int>(at.begin() + 1, at.end());
  }
  return j;
}

Placement placement_of(const json& j, const std::filesystem::path& file) {
  Placement p;
  try {
    p.axis = parse_axis(field<std::string>(j, "axis", file));
  } catch (const UsageError& error) {
    refuse_form(file, error.what());
  }
  const auto kind = field<std::string>(j, "kind", file);
  for (std::size_t i = 0; i < std::size(kPlacementKinds); ++i) {
    if (kPlacementKinds[i] != kind) continue;
    p.kind = static_cast<Placement::Kind>(i);
    if (p.kind == Placement::Kind::kShard) p.dim = field<int>(j, "dim", file);
    if (p.kind == Placement::Kind::kOnlyAt) {
      p.coordinate = field<int>(j, "coordinate", file);
      if (!j.contains("also_at")) return p;
      std::vector<int> at{p.coordinate};
      for (const std::int64_t more : field<Shape>(j, "also_at", file))
        at.push_back(static_cast<int>(std::clamp<std::int64_t>(more, -1, 64)));
      try {
        return only_at(p.axis, at);
      } catch (const MeshError& error) {
        refuse_form(file, error.what());
      }
    }
    if (p.kind == Placement::Kind::kPartial) {
      const auto reduction = field<std::string>(j, "reduction", file);
      constexpr Reduction kPartialReductions[] = {Reduction::kSum, Reduction::kAvg,
                                                  Reduction::kMax};
      const auto* const found = std::ranges::find(kPartialReductions, reduction,
                                                  [](Reduction known) { return name_of(known); });
      if (found == std::end(kPartialReductions))
        refuse_form(file,
                    fmt::format("\"reduction\" of a partial must be sum, avg or max, got \"{}\"",
                                printable(reduction)));
      p.reduction = *found;
    }
    return p;
  }
  refuse_form(file,
              fmt::format("the kind of a placement must be replicate, shard, partial or only_at, "
                          "got \"{}\"",
                          printable(kind)));
}

}  // namespace

json key_json(const RecordKey& key) {
  return {{"step", key.step}, {"kind", name_of(key.kind)}, {"name", key.name}, {"call", key.call}};
}

/// What a field must be to be read as a T.
template <class T>
constexpr const char* words_of_type() {
  if constexpr (std::is_same_v<T, std::string>) return "a string";
  if constexpr (std::is_same_v<T, bool>) return "true or false";
  if constexpr (std::is_same_v<T, int>) return "an integer of 32 bits";
  if constexpr (std::is_same_v<T, std::int64_t>) return "an integer";
  if constexpr (std::is_same_v<T, Shape>) return "a list of integers";
  if constexpr (std::is_same_v<T, json>) return "a list";
}

template <class T>
T field(const json& object, const char* name, const std::filesystem::path& file) {
  const json& value = member(object, name, file);
  const bool fits = [&] {
    if constexpr (std::is_same_v<T, std::string>) return value.is_string();
    if constexpr (std::is_same_v<T, bool>) return value.is_boolean();
    if constexpr (std::is_same_v<T, int>)
      return value.is_number_integer() &&
             value.get<std::int64_t>() == static_cast<int>(value.get<std::int64_t>());
    if constexpr (std::is_same_v<T, std::int64_t>) return value.is_number_integer();
    if constexpr (std::is_same_v<T, Shape>) {
      return value.is_array() && std::all_of(value.begin(), value.end(),
                                             [](const json& v) { return v.is_number_integer(); });
    }
    if constexpr (std::is_same_v<T, json>) return value.is_array();
  }();
  if (!fits) {
    refuse_form(file, fmt::format("the field \"{}\" must be {}, got a JSON {}", name,
                                  words_of_type<T>(), value.type_name()));
  }
  return value.get<T>();
}

std::string text_field(const json& object, const char* name, const std::filesystem::path& file) {
  auto text = field<std::string>(object, name, file);
  const std::string problem = text.empty() ? "" : name_problem(text);
  if (!problem.empty())
    refuse_form(file, fmt::format("\"{}\" is '{}', which {}", name, printable(text), problem));
  return text;
}

template std::string field<std::string>(const json&, const char*, const std::filesystem::path&);
template bool field<bool>(const json&, const char*, const std::filesystem::path&);
template int field<int>(const json&, const char*, const std::filesystem::path&);
template std::int64_t field<std::int64_t>(const json&, const char*, const std::filesystem::path&);
template Shape field<Shape>(const json&, const char*, const std::filesystem::path&);
template json field<json>(const json&, const char*, const std::filesystem::path&);

RecordKey key_of(const json& j, const RecordDefaults& defaults, const std::filesystem::path& file) {
  RecordKey key;
  key.step = field_or<int>(j, "step", defaults.step, file);
  key.kind = kind_of(j, file);
  key.name = text_field(j, "name", file);
  key.call = field_or<int>(j, "call", 0, file);
  if (key.step < 0 || key.call < 0)
    refuse_form(file,
                fmt::format("step and call must be at least 0, got {} and {}", key.step, key.call));
  return key;
}

namespace {

std::vector<Placement> placements_of(const json& record, const std::filesystem::path& file) {
  std::vector<Placement> placements;
  if (!record.contains("placements")) return placements;
  for (const json& p : field<json>(record, "placements", file))
    placements.push_back(placement_of(p, file));
  const auto is_partial_by = [](bool is_max) {
    return [=](const Placement& p) {
      return p.kind == Placement::Kind::kPartial && (p.reduction == Reduction::kMax) == is_max;
    };
  };
  if (std::ranges::any_of(placements, is_partial_by(true)) &&
      std::ranges::any_of(placements, is_partial_by(false)))
    refuse_form(
        file, "\"placements\" must be partial by max on all axes or on none, got max beside a sum");
  return placements;
}

}  // namespace

bool is_inferred(const json& j, const std::filesystem::path& file) {
  if (!j.is_object() || !j.contains("layout")) return false;
  if (field<std::string>(j, "layout", file) != "infer")
    refuse_form(
        file,
        "\"layout\" must be \"infer\", or be left out where placements, boxes or flat ranges "
        "say where the tensor lies");
  for (const char* other : {"global_shape", "boxes", "flat"}) {
    if (j.contains(other))
      refuse_form(file,
                  fmt::format("\"{}\" must be left out where the layout is to be inferred", other));
  }
  for (const Placement& placement : placements_of(j, file)) {
    if (placement.kind != Placement::Kind::kOnlyAt)
      refuse_form(file,
                  "\"placements\" may hold nothing but only_at where the layout is to be inferred");
  }
  return true;
}

std::string tensor_name(const RecordKey& key) {
  return fmt::format("{}/{}/{}", name_of(key.kind), key.name, key.call);
}

json to_json(const Record& record) {
  json j = key_json(record.key);
  j["order"] = record.order;
  j["dtype"] = name_of(record.dtype);
  j["global_shape"] = record.layout.global_shape;
  j["local_shape"] = record.local_shape;
  j["grad_scale"] = to_hex(record.grad_scale);
  j["kept"] = record.kept;
  j["unmasked"] = record.unmasked;
  json placements = json::array();
  for (const Placement& p : record.layout.placements) placements.push_back(placement_json(p));
  j["placements"] = placements;
  if (record.layout.explicit_parts) {
    json boxes = json::array(), flat = json::array();
    for (const Box& b : record.layout.boxes)
      boxes.push_back(
          {{"local_offset", b.local_offset}, {"global_offset", b.global_offset}, {"size", b.size}});
    for (const FlatRange& r : record.layout.flat)
      flat.push_back(
          {{"local_begin", r.local_begin}, {"global_begin", r.global_begin}, {"count", r.count}});
    j["boxes"] = boxes;
    j["flat"] = flat;
  }
  return j;
}

Record record_of(const json& j, const RecordDefaults& defaults, const std::filesystem::path& file) {
  Record record;
  record.key = key_of(j, defaults, file);
  record.order = field_or<std::int64_t>(j, "order", defaults.position, file);
  if (defaults.tensor == nullptr || j.contains("dtype")) {
    try {
      record.dtype = parse_dtype(field<std::string>(j, "dtype", file));
    } catch (const UsageError& error) {
      refuse_form(file, error.what());
    }
  } else {
    record.dtype = defaults.tensor->dtype;
  }
  record.local_shape = defaults.tensor == nullptr || j.contains("local_shape")
                           ? shape_field(j, "local_shape", file)
                           : defaults.tensor->shape;
  record.grad_scale = j.contains("grad_scale") ? hex_field(j, "grad_scale", file) : 1.0;
  if (!(record.grad_scale > 0) || std::isinf(record.grad_scale)) {
    refuse_form(file,
                fmt::format("the \"grad_scale\" of {} must be a positive, finite number, got {}",
                            describe(record.key), record.grad_scale));
  }
  record.kept = field_or<bool>(j, "kept", true, file);
  record.unmasked = field_or<std::int64_t>(j, "unmasked", -1, file);
  record.layout.placements = placements_of(j, file);
  if (is_inferred(j, file)) {
    record.layout.global_shape = record.local_shape;
    return record;
  }
  record.layout.global_shape = shape_field(j, "global_shape", file);
  if (j.contains("boxes") || j.contains("flat")) {
    record.layout.explicit_parts = true;
    for (const json& b : field_or<json>(j, "boxes", json::array(), file)) {
      record.layout.boxes.push_back({shape_field(b, "local_offset", file),
                                     shape_field(b, "global_offset", file),
                                     shape_field(b, "size", file)});
    }
    for (const json& r : field_or<json>(j, "flat", json::array(), file)) {
      record.layout.flat.push_back({field<std::int64_t>(r, "local_begin", file),
                                    field<std::int64_t>(r, "global_begin", file),
                                    field<std::int64_t>(r, "count", file)});
    }
  }
  return record;
}

json to_json(const MeshShape& mesh) {
  json j = json::array();
  for (const AxisDegree& axis : mesh.axes())
    j.push_back({{"axis", name_of(axis.axis)}, {"degree", axis.degree}});
  return j;
}

MeshShape mesh_of(const json& j, const std::filesystem::path& file) {
  std::vector<AxisDegree> axes;
  try {
    for (const json& axis : j)
      axes.push_back(
          {parse_axis(field<std::string>(axis, "axis", file)), field<int>(axis, "degree", file)});
    return MeshShape(axes);
  } catch (const UsageError& error) {
    refuse_form(file, error.what());
  } catch (const MeshError& error) {
    refuse_form(file, error.what());
  }
}

json to_json(const std::map<RecordKey, Response>& responses, int runs) {
  json list = json::array();
  for (const auto& [key, r] : responses) {
    json j = key_json(key);
    j["relative_error"] = to_hex(r.relative_error);
    j["scale_error"] = to_hex(r.scale_error);
    j["absolute_norm"] = to_hex(r.absolute_norm);
    j["max_abs"] = to_hex(r.max_abs);
    j["reference_norm"] = to_hex(r.reference_norm);
    j["reference_max_abs"] = to_hex(r.reference_max_abs);
    j["runs"] = r.runs;
    list.push_back(std::move(j));
  }
  int most = 0;
  for (const auto& [key, r] : responses) most = std::max(most, r.runs);
  return {{"schema", kSchema},
          {"runs", runs},
          {"variants", std::max(0, most - runs)},
          {"responses", list}};
}

void require_known_schema(const json& object, const std::filesystem::path& file) {
  const int schema = field<int>(object, "schema", file);
  if (schema != kSchema)
    refuse(file, RuleId::kUnknownSchema, {{"newest", kSchema}, {"got", schema}});
}

std::map<RecordKey, Response> responses_of(const json& j, const std::filesystem::path& file,
                                           int& runs) {
  require_known_schema(j, file);
  runs = field<int>(j, "runs", file);
  if (runs < 1) refuse_form(file, fmt::format("\"runs\" must be at least 1, got {}", runs));
  const int variants = field_or<int>(j, "variants", 0, file);
  if (variants < 0 || variants > kMaxVariants)
    refuse_form(file,
                fmt::format("\"variants\" must be from 0 to {}, got {}", kMaxVariants, variants));
  std::map<RecordKey, Response> responses;
  for (const json& entry : field<json>(j, "responses", file)) {
    Response r;
    r.relative_error = hex_field(entry, "relative_error", file);
    r.scale_error = hex_field(entry, "scale_error", file);
    r.absolute_norm = hex_field(entry, "absolute_norm", file);
    r.max_abs = hex_field(entry, "max_abs", file);
    r.reference_norm = hex_field(entry, "reference_norm", file);
    r.reference_max_abs = hex_field(entry, "reference_max_abs", file);
    r.runs = field<int>(entry, "runs", file);
    const RecordKey key = key_of(entry, {}, file);
    if (r.runs < 1 || r.runs - variants > runs) {
      refuse_form(file, fmt::format("the response of {} must be of 1 to {} runs, got {}",
                                    describe(key), runs + variants, r.runs));
    }
    if (!responses.emplace(key, r).second)
      refuse_form(file, fmt::format("the response of {} is listed twice", describe(key)));
  }
  return responses;
}

}  // namespace isoshard::detail
