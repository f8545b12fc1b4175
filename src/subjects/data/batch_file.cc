// SPDX-License-Identifier: Apache-2.0
// Reading and writing batches.
#include "subjects/data/batch_file.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <set>
#include <string>

#include "core/base/error.h"
#include "core/io/tensor_files.h"

namespace isoshard {
namespace {

constexpr const char* kIds = "input_ids";
constexpr const char* kLabels = "labels";
constexpr const char* kSamples = "sample_ids";
constexpr const char* kMask = "attention_mask";

at::Tensor integers_of(const SafetensorsFile& file, const char* name, std::int64_t dims) {
  const at::Tensor tensor = tensor_of(file.tensor(name));
  if (!at::isIntegralType(tensor.scalar_type(), true)) {
    throw FileError(fmt::format("{}: tensor '{}' must hold integers, got {}", file.path().string(),
                                name, name_of(file.info(name).dtype)));
  }
  if (tensor.dim() != dims || tensor.numel() == 0) {
    throw FileError(fmt::format(
        "{}: tensor '{}' must have {} dimension{}, none of them 0, got [{}]", file.path().string(),
        name, dims, dims == 1 ? "" : "s", fmt::join(tensor.sizes(), ", ")));
  }
  return tensor.to(at::kLong).contiguous();
}

void require_range(const SafetensorsFile& file, const char* name, const at::Tensor& values,
                   std::int64_t vocab_size, bool may_be_uncounted) {
  at::Tensor bad = values.lt(0).logical_or(values.ge(vocab_size));
  if (may_be_uncounted) bad = bad.logical_and(values.ne(kNotCounted));
  if (!bad.any().item<bool>()) return;
  const auto place = bad.flatten().nonzero()[0].item<std::int64_t>();
  throw FileError(
      fmt::format("{}: tensor '{}' has {} at [{}, {}], outside the model's vocabulary of {}",
                  file.path().string(), name, values.flatten()[place].item<std::int64_t>(),
                  place / values.size(1), place % values.size(1), vocab_size));
}

void require_known(const SafetensorsFile& file) {
  const std::set<std::string> known = {kIds, kLabels, kSamples, kMask};
  for (const std::string& name : file.names()) {
    if (!known.contains(name))
      throw FileError(fmt::format("{}: unknown tensor '{}'; it must be one of {}",
                                  file.path().string(), name, fmt::join(known, ", ")));
  }
}

}  // namespace

BatchFile::BatchFile(const std::filesystem::path& path, std::int64_t vocab_size) : path_(path) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  require_known(file);
  input_ids_NS_ = integers_of(file, kIds, 2);
  require_range(file, kIds, input_ids_NS_, vocab_size, false);
  labels_NS_ = file.contains(kLabels) ? integers_of(file, kLabels, 2) : input_ids_NS_;
  require_range(file, kLabels, labels_NS_, vocab_size, true);
  sample_ids_N_ = file.contains(kSamples) ? integers_of(file, kSamples, 1)
                                          : at::arange(num_samples(), at::kLong);
  if (labels_NS_.sizes() != input_ids_NS_.sizes() || sample_ids_N_.size(0) != num_samples()) {
    throw FileError(fmt::format("{}: the shapes must agree, got {} [{}], {} [{}] and {} [{}]",
                                path.string(), kIds, fmt::join(input_ids_NS_.sizes(), ", "),
                                kLabels, fmt::join(labels_NS_.sizes(), ", "), kSamples,
                                fmt::join(sample_ids_N_.sizes(), ", ")));
  }
  if (file.contains(kMask) && !integers_of(file, kMask, 2).eq(1).all().item<bool>()) {
    throw FileError(
        fmt::format("{}: '{}' must not hide tokens, because only whole sequences are trained on; "
                    "leave tokens out with labels of {}",
                    path.string(), kMask, kNotCounted));
  }
}

void BatchFile::require(std::int64_t needed, std::int64_t seq_length) const {
  if (this->seq_length() != seq_length)
    throw FileError(fmt::format("{}: must hold sequences of {} tokens, got {}", path_.string(),
                                seq_length, this->seq_length()));
  if (num_samples() < needed) {
    throw FileError(fmt::format(
        "{}: must hold at least {} samples (steps x micro-batches x dp x batch size), got {}",
        path_.string(), needed, num_samples()));
  }
}

TokenBatch BatchFile::batch(const std::vector<std::int64_t>& rows) const {
  const at::Tensor index = at::tensor(rows, at::kLong).remainder(num_samples());
  TokenBatch batch{input_ids_NS_.index_select(0, index), labels_NS_.index_select(0, index), {}};
  for (const std::int64_t row : rows)
    batch.sample_ids.push_back(sample_ids_N_[row % num_samples()].item<std::int64_t>());
  return batch;
}

void save_batches(const std::filesystem::path& path, std::span<const TokenBatch> batches) {
  std::vector<at::Tensor> ids, labels;
  std::vector<std::int64_t> samples;
  for (const TokenBatch& batch : batches) {
    ids.push_back(batch.input_ids_BS);
    labels.push_back(batch.labels_BS);
    samples.insert(samples.end(), batch.sample_ids.begin(), batch.sample_ids.end());
  }
  const std::vector<NamedTensor> tensors = {
      {kIds, at::cat(ids)}, {kLabels, at::cat(labels)}, {kSamples, at::tensor(samples, at::kLong)}};
  write_safetensors(path, tensors);
}

}  // namespace isoshard
