// SPDX-License-Identifier: Apache-2.0
// Safetensors weights: checking, reading boxes, writing.
#include "subjects/checkpoint/file_weights.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/comm/tensor.h"

namespace isoshard {
namespace {

constexpr std::size_t kHeaderAlignment = 8;

// Whether the name is that of an expected tensor but for a layer number
// ("model.layers.7.mlp.up_proj.weight").
bool is_of_another_layer(const std::string& name,
                         const std::set<std::string, std::less<>>& expected) {
  for (std::size_t begin = name.find('.'); begin != std::string::npos;
       begin = name.find('.', begin + 1)) {
    const std::size_t end = name.find_first_not_of("0123456789", begin + 1);
    if (end == begin + 1 || end == std::string::npos || name[end] != '.') continue;
    return expected.contains(name.substr(0, begin + 1) + "0" + name.substr(end));
  }
  return false;
}

// GPT-2 folders of the Hub were saved without the head: their names lack the first part, and they
// hold the causal masks too.
constexpr std::string_view kBasePrefix = "transformer.";

std::string name_in(const SafetensorsFile& file, const std::string& parameter) {
  if (file.contains(parameter) || !parameter.starts_with(kBasePrefix)) return parameter;
  std::string without = parameter.substr(kBasePrefix.size());
  return file.contains(without) ? without : parameter;
}

bool is_causal_mask(const std::string& name, const std::set<std::string, std::less<>>& expected) {
  const bool is_mask = name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
  return is_mask && expected.contains(name.substr(0, name.rfind('.')) + ".c_attn.weight");
}

std::vector<std::string> problems_of(const SafetensorsFile& file,
                                     std::span<const ParameterSpec> specs, ExtraLayers extra) {
  std::vector<std::string> problems;
  std::set<std::string, std::less<>> expected;
  for (const ParameterSpec& spec : specs) {
    const std::string name = name_in(file, spec.name);
    expected.insert(name);
    if (!file.contains(name)) {
      problems.push_back(fmt::format("{} is missing", spec.name));
      continue;
    }
    const SafetensorsInfo& info = file.info(name);
    if (info.shape != spec.shape) {
      problems.push_back(fmt::format("{} is [{}] where the model has [{}]", spec.name,
                                     fmt::join(info.shape, ", "), fmt::join(spec.shape, ", ")));
    }
    if (!is_floating(info.dtype))
      problems.push_back(
          fmt::format("{} must be floating-point, got {}", spec.name, name_of(info.dtype)));
  }
  for (const std::string& name : file.names()) {
    if (expected.contains(name) || is_causal_mask(name, expected) ||
        (extra == ExtraLayers::kIgnored && is_of_another_layer(name, expected)))
      continue;
    problems.push_back(fmt::format("{} is not in the model", name));
  }
  return problems;
}

// "[3, 5]" for the 23rd element of [., 6].
std::string place_in_words(const Shape& shape, std::int64_t element) {
  Shape place(shape.size());
  for (std::size_t d = shape.size(); d-- > 0; element /= shape[d]) place[d] = element % shape[d];
  return fmt::format("[{}]", fmt::join(place, ", "));
}

// Empty if all elements are finite.
std::string nonfinite_in_words(const at::Tensor& whole) {
  // elements: the tests of isfinite take memory of their own
  constexpr std::int64_t kPiece = std::int64_t{1} << 20;
  const at::Tensor flat = whole.flatten();
  std::string first;
  std::int64_t count = 0;
  for (std::int64_t begin = 0; begin < flat.numel(); begin += kPiece) {
    const at::Tensor piece = flat.narrow(0, begin, std::min(kPiece, flat.numel() - begin));
    const at::Tensor bad = at::isfinite(piece).logical_not();
    if (!bad.any().item<bool>()) continue;
    const at::Tensor places = bad.nonzero();
    const auto place = places[0][0].item<std::int64_t>();
    if (count == 0)
      first = fmt::format("element {} is {}", place_in_words(whole.sizes().vec(), begin + place),
                          piece[place].item<double>());
    count += places.size(0);
  }
  return count == 0
             ? ""
             : fmt::format("{} ({} of {} elements are not finite)", first, count, flat.numel());
}

// Little-endian, as the format wants it.
std::string header_of(std::span<const ParameterSpec> specs, Dtype dtype) {
  nlohmann::json header = nlohmann::json::object();
  header["__metadata__"] = {{"format", "pt"}};
  std::uint64_t begin = 0;
  for (const ParameterSpec& spec : specs) {
    const std::uint64_t end =
        begin + static_cast<std::uint64_t>(numel_of(spec.shape)) * size_of(dtype);
    header[spec.name] = {{"dtype", safetensors_name_of(dtype)},
                         {"shape", spec.shape},
                         {"data_offsets", {begin, end}}};
    begin = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + kHeaderAlignment - 1) / kHeaderAlignment * kHeaderAlignment, ' ');
  std::string length;
  for (int byte = 0; byte < 8; ++byte)
    length.push_back(static_cast<char>((text.size() >> (8 * byte)) & 0xFF));
  return length + text;
}

}  // namespace

FileWeights::FileWeights(const std::filesystem::path& path, std::span<const ParameterSpec> specs,
                         ExtraLayers extra)
    : file_(SafetensorsFile::open(path)) {
  const std::vector<std::string> problems = problems_of(file_, specs, extra);
  if (problems.empty()) return;
  throw FileError(fmt::format("{}: does not hold this model's weights:\n  {}", path.string(),
                              fmt::join(problems, "\n  ")));
}

at::Tensor FileWeights::read(const ParameterSpec& spec, const Shape& offset,
                             const Shape& size) const {
  at::Tensor part = tensor_of(file_.tensor(name_in(file_, spec.name)));
  bool inside = offset.size() == spec.shape.size() && size.size() == spec.shape.size();
  for (std::size_t d = 0; inside && d < size.size(); ++d) {
    inside = offset[d] >= 0 && size[d] >= 0 && offset[d] <= spec.shape[d] - size[d];
  }
  if (!inside) {
    throw ShapeError(fmt::format("the box at [{}] of size [{}] must lie inside {} [{}]",
                                 fmt::join(offset, ", "), fmt::join(size, ", "), spec.name,
                                 fmt::join(spec.shape, ", ")));
  }
  for (std::size_t d = 0; d < size.size(); ++d)
    part = part.narrow(static_cast<std::int64_t>(d), offset[d], size[d]);
  return part.clone(at::MemoryFormat::Contiguous);  // the mapping is read-only
}

void FileWeights::require_finite(std::span<const ParameterSpec> specs) const {
  std::vector<std::string> problems;
  for (const ParameterSpec& spec : specs) {
    const std::string problem =
        nonfinite_in_words(tensor_of(file_.tensor(name_in(file_, spec.name))));
    if (!problem.empty()) problems.push_back(fmt::format("{}: {}", spec.name, problem));
  }
  if (problems.empty()) return;
  throw FileError(fmt::format("{}: all weights must be finite:\n  {}", file_.path().string(),
                              fmt::join(problems, "\n  ")));
}

void save_weights(const std::filesystem::path& path, std::span<const ParameterSpec> specs,
                  const WeightSource& source, Dtype dtype) {
  AtomicFile file(path);
  file.write(header_of(specs, dtype));
  for (const ParameterSpec& spec : specs) {
    const at::Tensor whole = source.read(spec, Shape(spec.shape.size(), 0), spec.shape)
                                 .to(scalar_type_of(dtype))
                                 .contiguous();
    file.write(std::span(static_cast<const std::byte*>(whole.const_data_ptr()), whole.nbytes()));
  }
  file.commit();
}

}  // namespace isoshard
