// SPDX-License-Identifier: Apache-2.0
/// Weights in safetensors files, by Hugging Face name.
#pragma once
#include <cstdint>
#include <filesystem>
#include <span>

#include "core/base/dtype.h"
#include "core/io/safetensors.h"
#include "subjects/model/config/config.h"
#include "subjects/model/weights.h"

namespace isoshard {

/// Whether a file may hold layers beyond those of the model: a model that was cut to fewer layers
/// ignores them.
enum class ExtraLayers : std::uint8_t { kRefused, kIgnored };

/// The weights in a model.safetensors, mapped into memory: reading a box touches only its pages.
///
/// Requires     nobody shortens the file meanwhile.
/// Errors       FileError that starts with the path and lists every parameter that is missing,
///              extra, or of another shape or of a dtype that is not floating-point; ShapeError for
///              a box outside its parameter.
class FileWeights final : public WeightSource {
 public:
  FileWeights(const std::filesystem::path& path, std::span<const ParameterSpec> specs,
              ExtraLayers extra = ExtraLayers::kRefused);
  /// In the dtype of the file.
  [[nodiscard]] at::Tensor read(const ParameterSpec& spec, const Shape& offset,
                                const Shape& size) const override;
  /// Reads every parameter once, a piece at a time.
  /// Errors   FileError that lists every parameter with a NaN or an infinity, and the first one's
  ///          place.
  void require_finite(std::span<const ParameterSpec> specs) const;

 private:
  SafetensorsFile file_;
};

/// Writes all parameters of `specs` as `source` gives them, rounded to `dtype`, one after the
/// other, so that it needs memory for the largest one only.
/// Errors   InfrastructureError that names the path and the bytes written; the file is then as it
///          was before.
void save_weights(const std::filesystem::path& path, std::span<const ParameterSpec> specs,
                  const WeightSource& source, Dtype dtype);

}  // namespace isoshard
