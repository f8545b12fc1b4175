// SPDX-License-Identifier: Apache-2.0
#include "harness/checkpoints/tied_embeddings.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

namespace isoshard {
namespace {

constexpr std::array<std::string_view, 3> kOutputs{"lm_head.weight", "embed_out.weight",
                                                   "output_layer.weight"};
constexpr std::array<std::string_view, 5> kInputs{"embed_tokens.weight", "wte.weight",
                                                  "word_embeddings.weight", "embed_in.weight",
                                                  "tok_embeddings.weight"};

template <std::size_t N>
bool ends_with_one(std::string_view name, const std::array<std::string_view, N>& parts) {
  return std::ranges::any_of(parts, [&](std::string_view part) {
    return name == part || (name.ends_with(part) && name[name.size() - part.size() - 1] == '.');
  });
}

/// The only weight of the shape whose name is that of the embedding at the other end.
template <std::size_t N>
std::optional<std::string> partner_in(const StoredCheckpoint& checkpoint, const Shape& shape,
                                      const std::array<std::string_view, N>& parts) {
  std::optional<std::string> partner;
  for (const auto& [name, tensor] : checkpoint.tensors) {
    if (tensor.kind != RecordKind::kParam || tensor.shape != shape || !ends_with_one(name, parts))
      continue;
    if (partner.has_value()) return std::nullopt;
    partner = name;
  }
  return partner;
}

/// Fills `lacking` from itself with what `other` has.
void fill(StoredCheckpoint& lacking, const StoredCheckpoint& other, bool is_tied,
          std::vector<std::string>& notes) {
  for (const auto& [name, tensor] : other.tensors) {
    if (tensor.kind != RecordKind::kParam || lacking.tensors.contains(name)) continue;
    const bool is_output = ends_with_one(name, kOutputs);
    if (!is_output && !ends_with_one(name, kInputs)) continue;
    const std::optional<std::string> partner = is_output
                                                   ? partner_in(lacking, tensor.shape, kInputs)
                                                   : partner_in(lacking, tensor.shape, kOutputs);
    if (!partner.has_value()) continue;
    if (!is_tied) {
      notes.push_back(
          fmt::format("{} has no {}. If it is tied to {}, config.json beside the weights must say "
                      "\"tie_word_embeddings\": true (beside {}: {}; beside {}: {})",
                      lacking.path.string(), name, *partner, lacking.path.string(),
                      lacking.tied_words, other.path.string(), other.tied_words));
      continue;
    }
    notes.push_back(fmt::format("{} has no {}: {}, to which config.json ties it, stands for it",
                                lacking.path.string(), name, *partner));
    lacking.tensors.emplace(name, lacking.tensors.find(*partner)->second);
  }
}

}  // namespace

std::vector<std::string> fill_tied(StoredCheckpoint& reference, StoredCheckpoint& actual) {
  const bool is_tied = reference.is_tied || actual.is_tied;
  std::vector<std::string> notes;
  fill(actual, reference, is_tied, notes);
  fill(reference, actual, is_tied, notes);
  return notes;
}

}  // namespace isoshard
