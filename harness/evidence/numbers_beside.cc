// SPDX-License-Identifier: Apache-2.0
// A window of a matrix, filled from parts.
#include "harness/evidence/numbers_beside.h"

#include <algorithm>

#include "core/base/error.h"
#include "harness/trace/parts.h"

namespace isoshard {
namespace {

constexpr std::int64_t kRows = 6, kColumns = 5;
constexpr std::size_t kMostSides = 5;

/// rows x columns of a matrix with `width` columns.
struct Window {
  std::int64_t width = 1, row = 0, column = 0, rows = 1, columns = 1;

  [[nodiscard]] NumbersBeside::Side side(int rank) const {
    return {rank, std::vector(static_cast<std::size_t>(rows),
                              std::vector<std::optional<double>>(static_cast<std::size_t>(columns),
                                                                 std::nullopt))};
  }

  /// Calls put(row of the window, column of the window, offset in the run) for what of the run lies
  /// in the window.
  template <class Put>
  void visit(std::int64_t begin, std::int64_t count, Put&& put) const {
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t left = (row + r) * width + column;
      const std::int64_t from = std::max(begin, left), to = std::min(begin + count, left + columns);
      for (std::int64_t i = from; i < to; ++i) put(r, i - left, i - begin);
    }
  }
};

Window window_of(const Shape& shape, std::int64_t differs) {
  Window window;
  const std::int64_t numel = numel_of(shape);
  window.width = shape.empty() ? 1 : std::max<std::int64_t>(shape.back(), 1);
  const std::int64_t height = numel / window.width;
  window.rows = std::min(kRows, height);
  window.columns = std::min(kColumns, window.width);
  const std::int64_t at = std::max<std::int64_t>(differs, 0);
  // one row and two columns that are right stand before it, where there are such
  window.row = std::clamp<std::int64_t>(at / window.width - 1, 0, height - window.rows);
  window.column = std::clamp<std::int64_t>(at % window.width - 2, 0, window.width - window.columns);
  return window;
}

std::int64_t first_difference(const Trace& actual, const RecordKey& key) {
  std::int64_t first = -1;
  for (const RankTrace& rank : actual.ranks) {
    const Record* const record = rank.find(key);
    if (record == nullptr) continue;
    for (const PartStats& part : record->parts) {
      const std::int64_t here = part.stats.first_unequal;
      if (here >= 0 && (first < 0 || here < first)) first = here;
    }
  }
  return first;
}

/// False: the rank holds nothing of the window, or has let its bytes go.
bool fill(NumbersBeside::Side& side, const Window& window, const RankTrace& rank,
          const Record& record, const MeshShape& mesh, const Reference& reference,
          const Record& wanted) {
  bool any = false;
  const auto put = [&](std::int64_t r, std::int64_t c, double value) {
    side.rows.at(static_cast<std::size_t>(r)).at(static_cast<std::size_t>(c)) = value;
    any = true;
  };
  const bool flat = is_flat(record.layout);
  const bool is_equal =
      !record.parts.empty() && std::ranges::all_of(record.parts, [](const PartStats& part) {
        return part.stats.numel > 0 && part.stats.unequal_bits == 0;
      });
  if (!record.kept && !is_equal) return false;
  for (const PartStats& part : parts_of(record, mesh, rank.rank)) {
    if (numel_of(part, flat) == 0) continue;
    if (!record.kept) {  // bit for bit the reference's
      for_each_run(part, record, [&](std::int64_t global, std::int64_t, std::int64_t count) {
        window.visit(global, count, [&](std::int64_t r, std::int64_t c, std::int64_t i) {
          put(r, c,
              value_at(reference.bytes(wanted), wanted.dtype, global + i) / wanted.grad_scale);
        });
      });
      continue;
    }
    const HostTensor local = rank.tensor(record);
    std::vector<std::byte> scratch;
    const std::byte* const bytes = packed(record, part, local.bytes.data(), scratch);
    for_each_run(part, record, [&](std::int64_t global, std::int64_t at, std::int64_t count) {
      window.visit(global, count, [&](std::int64_t r, std::int64_t c, std::int64_t i) {
        put(r, c, value_at(bytes, record.dtype, at + i) / record.grad_scale);
      });
    });
  }
  return any;
}

}  // namespace

std::optional<NumbersBeside> numbers_beside(const Reference& reference, const Trace& actual,
                                            const RecordKey& key) {
  const Record* const wanted = reference.find(key);
  if (wanted == nullptr || !reference.has_bytes() || !wanted->kept) return std::nullopt;
  const Shape& shape = wanted->layout.global_shape;
  const std::int64_t numel = numel_of(shape);
  if (numel < 2) return std::nullopt;
  const Window window = window_of(shape, first_difference(actual, key));
  NumbersBeside beside{.key = key,
                       .shape = shape,
                       .row = window.row,
                       .column = window.column,
                       .is_whole = window.rows * window.columns == numel};
  beside.sides.push_back(window.side(-1));
  window.visit(0, numel, [&](std::int64_t r, std::int64_t c, std::int64_t i) {
    beside.sides[0].rows[static_cast<std::size_t>(r)][static_cast<std::size_t>(c)] =
        value_at(reference.bytes(*wanted), wanted->dtype, i) / wanted->grad_scale;
  });
  for (const RankTrace& rank : actual.ranks) {
    const Record* const record = rank.find(key);
    if (record == nullptr || record->layout.global_shape != shape) continue;
    if (beside.sides.size() > kMostSides) break;
    NumbersBeside::Side side = window.side(rank.rank);
    try {
      if (!fill(side, window, rank, *record, actual.mesh, reference, *wanted)) continue;
    } catch (const Error&) {
      continue;  // a local tensor that is not what its layout says: a finding of its own
    }
    beside.are_summands = beside.are_summands || is_partial(record->layout);
    beside.sides.push_back(std::move(side));
  }
  return beside.sides.size() < 2 ? std::nullopt : std::optional(std::move(beside));
}

}  // namespace isoshard
