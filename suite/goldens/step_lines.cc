// SPDX-License-Identifier: Apache-2.0
// From a judged run to what its golden stores.
#include "suite/goldens/step_lines.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <utility>

#include "fixtures/oracle/arithmetic_digest.h"
#include "harness/trace/numbers.h"
#include "harness/trace/stage.h"

namespace isoshard {
namespace {

/// Of the parts' bits; empty of a rank that holds none.
std::vector<std::uint64_t> digests_on(const RankTrace& rank, const RecordKey& key) {
  std::vector<std::uint64_t> digests;
  if (const Record* const record = rank.find(key)) {
    for (const PartStats& part : record->parts) digests.push_back(part.digest);
  }
  return digests;
}

/// Of the bits of all ranks' parts, rank by rank.
std::string digest_of_tensor(const Trace& trace, const RecordKey& key) {
  std::vector<std::uint64_t> digests;
  for (const RankTrace& rank : trace.ranks) {
    if (rank.find(key) == nullptr) continue;
    digests.push_back(static_cast<std::uint64_t>(rank.rank));
    std::ranges::copy(digests_on(rank, key), std::back_inserter(digests));
  }
  const auto bytes = std::as_bytes(std::span(digests));
  return digest_text(digest_of(bytes.data(), bytes.size()));
}

/// GoldenLine::copies.
std::string copies_of(const Trace& trace, const RecordKey& key) {
  constexpr std::size_t kLetters = 26;
  std::vector<std::vector<std::uint64_t>> distinct;
  std::string letters;
  std::size_t holders = 0;
  for (const RankTrace& rank : trace.ranks) {
    const std::vector<std::uint64_t> digests = digests_on(rank, key);
    if (digests.empty()) {
      letters += '-';
      continue;
    }
    ++holders;
    const auto found = std::ranges::find(distinct, digests);
    letters += static_cast<char>('a' + (found - distinct.begin()));
    if (found == distinct.end()) distinct.push_back(digests);
  }
  return distinct.size() == holders || distinct.size() > kLetters ? "" : letters;
}

/// Goldens hold what a step computes. What follows from that is judged in every run: gradients as
/// they are stepped with and between micro-batches, counters, the loss once more.
bool is_stored(const TensorComparison& tensor) {
  return !is_gradient_besides(tensor.key) && tensor.stage != Stage::kProgress &&
         role_of(tensor.key) != NameRole::kLossBackward;
}

/// A tensor of so few elements may equal another one by chance.
constexpr std::int64_t kFewElements = 16;

GoldenNumber norm_of(const TensorComparison& tensor) {
  const bool no_number = tensor.stats.nan_actual + tensor.stats.inf_actual > 0;
  const double norm =
      no_number ? std::numeric_limits<double>::quiet_NaN() : std::sqrt(tensor.stats.sum_sq_actual);
  // The norms of two tensors differ by no more than the norm of their difference.
  return {"norm", norm,
          tensor.insensitive ? tensor.allowed_absolute : tensor.allowed_relative_error * norm};
}

}  // namespace

std::vector<RankElements> elements_of(const Trace& trace, const RecordKey& key) {
  std::vector<RankElements> ranks;
  for (const RankTrace& rank : trace.ranks) {
    const Record* const record = rank.find(key);
    if (record == nullptr) continue;
    ranks.push_back({rank.rank, numbers_of(rank.tensor(*record)), record->grad_scale});
  }
  return ranks;
}

Projections project(const RecordKey& key, std::span<const RankElements> ranks) {
  Projections sums{};
  const std::string name = describe(key);
  for (const RankElements& rank : ranks) add_projections(sums, name, rank.rank, rank.elements);
  return sums;
}

double allowed_distance(const TensorComparison& tensor, std::span<const RankElements> ranks) {
  double sum_sq = 0, held = 0;
  for (const RankElements& rank : ranks) {
    for (const double element : rank.elements) sum_sq += element * element;
    held += rank.grad_scale * rank.grad_scale * static_cast<double>(rank.elements.size());
  }
  if (!tensor.insensitive) return tensor.allowed_relative_error * std::sqrt(sum_sq);
  return tensor.allowed_absolute * std::sqrt(held / static_cast<double>(tensor.elements));
}

bool is_equal_everywhere(const TensorComparison& tensor) {
  return tensor.level == Level::kExact ||
         (tensor.key.kind == RecordKind::kActivation && tensor.key.step == 0 &&
          tensor.key.name == "model.embed_tokens");
}

std::vector<GoldenLine> lines_of_step(const Verdict& verdict, const Trace& trace) {
  std::vector<GoldenLine> lines;
  std::map<std::string, std::string> first_of_digest;
  for (const TensorComparison& tensor : verdict.tensors) {
    if (!is_stored(tensor)) continue;
    GoldenLine line{describe(tensor.key), digest_of_tensor(trace, tensor.key), {}};
    const GoldenNumber norm = norm_of(tensor);
    const bool no_number = std::isnan(norm.value);
    if (is_equal_everywhere(tensor) && !no_number) {
      lines.push_back(std::move(line));
      continue;
    }
    line.numbers.push_back(norm);
    line.copies = copies_of(trace, tensor.key);
    // Elsewhere equal tensors are chance: norm weights of 1 that a step in bf16 does not move.
    const bool is_tap = tensor.key.kind == RecordKind::kActivation ||
                        tensor.key.kind == RecordKind::kActivationGrad;
    if (is_tap && tensor.elements >= kFewElements && norm.value > 0) {
      const auto [found, is_first] = first_of_digest.emplace(line.digest, line.name);
      if (!is_first) line.same_as = found->second;
    }
    if (!no_number) {
      const std::vector<RankElements> ranks = elements_of(trace, tensor.key);
      line.projections = StoredProjections{project(tensor.key, ranks),
                                           kProjectedFactor * allowed_distance(tensor, ranks)};
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

}  // namespace isoshard
