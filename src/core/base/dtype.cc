// SPDX-License-Identifier: Apache-2.0
// Names and properties of the element types.
#include "core/base/dtype.h"

#include <fmt/format.h>

#include <array>
#include <ostream>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/suggest.h"

namespace isoshard {
namespace {

struct Properties {
  std::string_view name;
  std::string_view safetensors_name;
  std::size_t size;
  double unit_roundoff;
};

constexpr std::array<Properties, 10> kProperties{{{"fp64", "F64", 8, 0x1p-53},
                                                  {"fp32", "F32", 4, 0x1p-24},
                                                  {"bf16", "BF16", 2, 0x1p-8},
                                                  {"fp16", "F16", 2, 0x1p-11},
                                                  {"int64", "I64", 8, 0.0},
                                                  {"int32", "I32", 4, 0.0},
                                                  {"int16", "I16", 2, 0.0},
                                                  {"int8", "I8", 1, 0.0},
                                                  {"uint8", "U8", 1, 0.0},
                                                  {"bool", "BOOL", 1, 0.0}}};

struct Alias {
  std::string_view name;
  Dtype dtype;
};
constexpr std::array<Alias, 10> kAliases{{{"float64", Dtype::kFloat64},
                                          {"double", Dtype::kFloat64},
                                          {"float32", Dtype::kFloat32},
                                          {"float", Dtype::kFloat32},
                                          {"bfloat16", Dtype::kBFloat16},
                                          {"float16", Dtype::kFloat16},
                                          {"half", Dtype::kFloat16},
                                          {"long", Dtype::kInt64},
                                          {"int", Dtype::kInt32},
                                          {"short", Dtype::kInt16}}};

const Properties& properties_of(Dtype dtype) noexcept {
  return kProperties[static_cast<std::size_t>(dtype)];
}

}  // namespace

std::size_t size_of(Dtype dtype) noexcept {
  return properties_of(dtype).size;
}

bool is_floating(Dtype dtype) noexcept {
  return properties_of(dtype).unit_roundoff != 0.0;
}

double unit_roundoff(Dtype dtype) noexcept {
  return properties_of(dtype).unit_roundoff;
}

std::string_view name_of(Dtype dtype) noexcept {
  return properties_of(dtype).name;
}

void PrintTo(Dtype dtype, std::ostream* out) {
  *out << name_of(dtype);
}

std::string_view safetensors_name_of(Dtype dtype) noexcept {
  return properties_of(dtype).safetensors_name;
}

Dtype parse_dtype(std::string_view name) {
  constexpr std::string_view kTorchPrefix = "torch.";
  std::string_view bare = name;
  if (bare.starts_with(kTorchPrefix)) bare.remove_prefix(kTorchPrefix.size());
  for (std::size_t i = 0; i < kProperties.size(); ++i) {
    if (bare == kProperties[i].name) return static_cast<Dtype>(i);
  }
  for (const Alias& alias : kAliases) {
    if (bare == alias.name) return alias.dtype;
  }
  std::vector<std::string> known;
  for (const Properties& properties : kProperties) known.emplace_back(properties.name);
  throw UsageError(fmt::format("unknown dtype '{}'{}; it must be one of {}", name,
                               did_you_mean(bare, known), join_names(known)));
}

}  // namespace isoshard
