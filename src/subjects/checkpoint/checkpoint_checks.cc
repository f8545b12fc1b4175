// SPDX-License-Identifier: Apache-2.0
// Whether a checkpoint is what was written, and fits a model.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <xxhash.h>

#include <algorithm>

#include "core/base/error.h"
#include "core/base/sha256.h"
#include "core/comm/tensor.h"
#include "core/observe/record_name.h"
#include "subjects/checkpoint/checkpoint.h"
#include "subjects/checkpoint/checkpoint_content.h"

namespace isoshard {
namespace {

/// The first tensor of the file whose bytes are not those that were written; empty if all are.
std::string changed_tensor(const CheckpointContent& content, const SafetensorsFile& file,
                           int rank) {
  for (const auto& [name, tensor] : content.tensors) {
    const auto hash = tensor.hash_by_rank.find(rank);
    if (hash == tensor.hash_by_rank.end()) continue;
    if (const std::uint64_t actual = hash_of(file.bytes(name)); actual != hash->second) {
      return fmt::format("{}: checksum mismatch: computed {}, recorded in the manifest {}", name,
                         hash_text(actual), hash_text(hash->second));
    }
  }
  return "";
}

void check_file(const CheckpointContent& content, const SafetensorsFile& file, int rank) {
  if (const std::string changed = changed_tensor(content, file, rank); !changed.empty()) {
    throw FileError(fmt::format("{}: {}", file.path().string(), changed));
  }
  const std::string &expected = content.sha256_by_rank.at(rank),
                    actual = sha256_hex_of_file(file.path());
  if (actual == expected) return;
  throw FileError(
      fmt::format("{}: checksum mismatch: computed {}, recorded in the manifest {}; no tensor's "
                  "value was changed",
                  file.path().string(), actual, expected));
}

std::int64_t num_not_finite(const at::Tensor& whole) {
  // elements: the tests of isfinite take memory of their own
  constexpr std::int64_t kPiece = std::int64_t{1} << 20;
  const at::Tensor flat = whole.view({-1});
  std::int64_t count = 0;
  for (std::int64_t begin = 0; begin < flat.numel(); begin += kPiece) {
    const at::Tensor piece = flat.narrow(0, begin, std::min(kPiece, flat.numel() - begin));
    count += piece.numel() - at::isfinite(piece).sum().item<std::int64_t>();
  }
  return count;
}

std::string suffix_of(std::string_view name, std::string_view parameter) {
  return std::string(name.substr(parameter.size() + 1));
}

}  // namespace

std::uint64_t hash_of(std::span<const std::byte> bytes) noexcept {
  return XXH3_64bits(bytes.data(), bytes.size());
}

void Checkpoint::require_intact() const {
  const std::string manifest = content_->manifest_path().string();
  for (const auto& [rank, file] : content_->files) check_file(*content_, file, rank);
  for (const auto& [name, saved] : content_->tensors) {
    const at::Tensor whole = read_whole(name);
    if (const std::int64_t count = num_not_finite(whole); count != 0) {
      throw FileError(
          fmt::format("{}: {} of {} elements of {} are not finite; a run cannot resume from them",
                      manifest, count, whole.numel(), name));
    }
    if (saved.kind != SavedKind::kMaster) continue;
    const std::string parameter = std::string(parse_record_name(RecordKind::kOptimizer, name).base);
    const at::Tensor held = read_whole(parameter);
    const at::Tensor rounded = whole.to(held.scalar_type());
    if (at::equal(rounded, held)) continue;
    throw FileError(fmt::format("{}: {} of {} elements of {} differ from its master rounded to {}",
                                manifest, rounded.ne(held).sum().item<std::int64_t>(), held.numel(),
                                parameter, name_of(dtype_of(held))));
  }
}

void Checkpoint::require_fits(
    std::span<const ParameterSpec> specs, std::string_view rule,
    const std::function<bool(std::string_view parameter)>& is_frozen) const {
  const std::string manifest = content_->manifest_path().string();
  std::vector<std::string> problems;
  std::map<std::string, const ParameterSpec*, std::less<>> expected;
  for (const ParameterSpec& spec : specs) {
    expected.emplace(spec.name, &spec);
    const auto saved = content_->tensors.find(spec.name);
    if (saved == content_->tensors.end()) {
      problems.push_back(fmt::format("{} is missing", spec.name));
    } else if (saved->second.kind != SavedKind::kParameter) {
      problems.push_back(fmt::format("{} is not a parameter but of the kind {}", spec.name,
                                     name_of(saved->second.kind)));
    } else if (saved->second.shape != spec.shape) {
      problems.push_back(fmt::format("{} is [{}] where the model has [{}]", spec.name,
                                     fmt::join(saved->second.shape, ", "),
                                     fmt::join(spec.shape, ", ")));
    }
  }
  for (const auto& [name, saved] : content_->tensors) {
    if (saved.kind == SavedKind::kParameter && !expected.contains(name))
      problems.push_back(fmt::format("{} is not in the model", name));
  }
  for (const auto& [name, count] : content_->progress.updates) {
    if (!expected.contains(name))
      problems.push_back(fmt::format("{}, which has {} updates, is not in the model", name, count));
  }
  if (!problems.empty())
    throw FileError(
        fmt::format("{}: does not fit the model: {}", manifest, fmt::join(problems, "; ")));
  if (content_->progress.rule != rule) {
    throw FileError(fmt::format(
        "{}: holds the state of the optimizer {}, so the run's optimizer must be the same, got {}",
        manifest, content_->progress.rule, rule));
  }
  std::vector<std::string> usual;
  const ParameterSpec* first = nullptr;  // that is stepped
  for (const ParameterSpec& spec : specs) {
    std::vector<std::string> own;
    for (const std::string& name : state_names(spec.name)) {
      own.push_back(suffix_of(name, spec.name));
      if (tensor(name).shape != spec.shape) {
        throw FileError(fmt::format("{}: {} must have the shape [{}] of its parameter, got [{}]",
                                    manifest, name, fmt::join(spec.shape, ", "),
                                    fmt::join(tensor(name).shape, ", ")));
      }
    }
    if (own.empty() && is_frozen && is_frozen(spec.name)) continue;
    if (first == nullptr) {
      first = &spec;
      usual = own;
    }
    if (own == usual) continue;
    throw FileError(fmt::format(
        "{}: every parameter must have the same optimizer state, got [{}] for {} and [{}] for {}",
        manifest, fmt::join(own, ", "), spec.name, fmt::join(usual, ", "), first->name));
  }
}

}  // namespace isoshard
