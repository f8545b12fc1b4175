// SPDX-License-Identifier: Apache-2.0
// What goes wrong between the stages of a pipeline, and what backward reads again: the input of a
// stage, weights that are gathered a second time, layers that do not pass a gradient on.
#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "harness/causes/diagnosis.h"
#include "harness/causes/run_causes.h"
#include "harness/ids/phrase.h"
#include "harness/verdict/neighbours.h"

namespace isoshard::detail {
namespace {

/// The coordinate on pp of all ranks that have a record of the key; nothing if they have several.
std::optional<int> stage_rank_of(const Evidence& e, const RecordKey& key) {
  std::set<int> coordinates;
  for (const RankTrace& rank : e.actual.ranks) {
    if (rank.find(key) != nullptr)
      coordinates.insert(e.actual.mesh.coordinate(rank.rank, Axis::kPp));
  }
  return coordinates.size() == 1 ? std::optional(*coordinates.begin()) : std::nullopt;
}

/// What the reference made just before, or of gradients just after, in the same pass.
const Record* neighbor_of(const Evidence& e) {
  const std::vector<Record>& records = e.reference.trace().ranks.at(0).records;
  const RecordKey& key = e.wanted.key;
  const Record* before = nullptr;
  for (const Record& record : records) {
    if (record.key == key) return before;
    if (record.key.kind == key.kind && record.key.step == key.step && record.key.call == key.call)
      before = &record;
  }
  return nullptr;
}

/// The calls of the tensor that are wrong, and ", in micro-batch 2 only"; none if all are wrong.
NamedValues wrong_calls(const Evidence& e) {
  std::vector<int> wrong;
  int all = 0;
  for (RecordKey key = e.wanted.key; all < e.num_micro_batches(); ++all) {
    key.call = all;
    if (!e.is_right(key)) wrong.push_back(all);
  }
  if (wrong.empty() || std::cmp_equal(wrong.size(), all)) return {};
  return {{"micro_batches", wrong},
          NamedValue::words("in_micro_batches",
                            phrase(PhraseId::kInMicroBatchesOnly, {{"micro_batches", wrong}}))};
}

/// A norm that divides by the root of the mean square, [B,S,H] as rows: y = x r w, r of each row.
struct RootMeanSquare {
  Values x, weight;
  std::vector<double> r;
};

/// From a norm's input, output and weight; nothing if it is another one.
std::optional<RootMeanSquare> root_mean_square(const Values& input, const Values& output,
                                               const Values& weight) {
  if (input.dim() != 3 || input.shape() != output.shape() || weight.dim() != 1 ||
      weight.size(0) != input.size(2))
    return std::nullopt;
  RootMeanSquare norm{input.rows().contiguous(), weight.contiguous(), {}};
  const Values weighted = (norm.x * norm.weight).contiguous(), y = output.rows().contiguous();
  for (std::int64_t row = 0; row < y.size(0); ++row) {
    const Values own = weighted.narrow(0, row, 1), made = y.narrow(0, row, 1);
    const double squares = dot(own, own);
    if (squares == 0) return std::nullopt;
    norm.r.push_back(dot(own, made) / squares);
    if (distance(norm.r.back() * own, made) > 1e-4 * norm_of(made)) return std::nullopt;
  }
  return norm;
}

/// What the norm's backward gives its input if it reads `kept` as that input.
Values input_gradient(const RootMeanSquare& norm, const Values& kept, const Values& gradient) {
  const Values x = kept.rows().contiguous(), g = (gradient.rows() * norm.weight).contiguous();
  const auto width = static_cast<std::size_t>(x.size(1));
  std::vector<double> made(x.flat().size());
  for (std::size_t row = 0; row < norm.r.size(); ++row) {
    const double r = norm.r[row];
    double product = 0;
    for (std::size_t i = row * width; i < (row + 1) * width; ++i)
      product += g.flat()[i] * x.flat()[i];
    const double along = r * r * r / static_cast<double>(width) * product;
    for (std::size_t i = row * width; i < (row + 1) * width; ++i)
      made[i] = r * g.flat()[i] - along * x.flat()[i];
  }
  return {gradient.shape(), std::move(made)};
}

/// The micro-batch whose input a stage's first norm finds in backward in place of its own. `after`
/// is the gradient of the norm's output.
std::optional<int> overwritten_by(const Evidence& e, const RecordKey& after) {
  const auto output_of = [&](const std::string& name, int call) {
    return RecordKey{e.wanted.key.step, RecordKind::kActivation, name, call};
  };
  const int own = e.wanted.key.call;
  const RecordKey input = output_of(e.wanted.key.name, own), output = output_of(after.name, own);
  const Values weight = e.parameter_read(after.name + ".weight");
  const Record* const gradient = e.reference.find(after);
  if (!weight.defined() || e.reference.find(input) == nullptr ||
      e.reference.find(output) == nullptr || gradient == nullptr)
    return std::nullopt;
  const auto norm = root_mean_square(e.reference_value(input), e.reference_value(output), weight);
  const Values g = e.reference_value(after) / gradient->grad_scale;
  if (!norm.has_value() || g.shape() != e.whole.shape()) return std::nullopt;
  const Values besides = e.whole - input_gradient(*norm, e.reference_value(input), g);
  const std::vector<const View*> bad = e.bad_views();
  for (int call = 0; call < e.num_micro_batches(); ++call) {
    const RecordKey other = output_of(e.wanted.key.name, call);
    if (call == own || e.reference.find(other) == nullptr) continue;
    const Values kept = e.reference_value(other);
    if (kept.shape() != g.shape()) continue;
    const Values made = besides + input_gradient(*norm, kept, g);
    const bool fits = !bad.empty() && std::ranges::all_of(bad, [&](const View* view) {
      return e.explains_each(made.cut(view->box.global_offset, view->box.size), *view);
    });
    if (fits) return call;
  }
  return std::nullopt;
}

/// A linear module that reads a point: its output gradient as rows, and its weight [out, in].
struct Reader {
  std::string weight_name;
  Values gradient, weight;
};

/// The modules behind the point whose products with their output gradients add up to the
/// reference's gradient there: the nearest ones in a row. Empty if there are none.
std::vector<Reader> readers_of_point(const Evidence& e) {
  constexpr std::size_t kMost = 3;
  constexpr std::int64_t kMostProducts = std::int64_t{1} << 26;
  const RecordKey& key = e.wanted.key;
  const Values right = e.whole.rows();
  std::vector<Reader> readers;
  bool is_behind = false;
  Values sum = Values::zeros(right.shape());
  for (const Record& record : e.reference.trace().ranks.at(0).records) {
    if (record.key.kind != RecordKind::kActivation || record.key.step != key.step ||
        record.key.call != key.call)
      continue;
    if (!is_behind) {
      is_behind = record.key.name == key.name;
      continue;
    }
    RecordKey gradient = record.key;
    gradient.kind = RecordKind::kActivationGrad;
    const std::string weight_name = record.key.name + ".weight";
    const Record* const found = e.reference.find(gradient);
    const Values weight = e.parameter_read(weight_name);
    if (found == nullptr || !weight.defined() || weight.dim() != 2) continue;
    const Values g = (e.reference_value(gradient) / found->grad_scale).rows();
    if (g.size(1) != weight.size(0) || weight.size(1) != right.size(1) ||
        g.size(0) != right.size(0) || g.numel() * weight.size(1) > kMostProducts ||
        !e.is_right(gradient))
      return {};
    sum = sum + product(g, weight);
    readers.push_back({weight_name, g, weight});
    if (distance(sum, right) <= std::max(e.tolerance(), 1e-4) * norm_of(right)) return readers;
    if (readers.size() == kMost) return {};
  }
  return {};
}

/// The elements of a parameter that ranks hold, by what is not dp in their places in the mesh (the
/// first rank of it) and by their dp rank; empty if a rank holds more than a flat piece.
using Pieces = std::map<std::pair<int, int>, std::vector<std::size_t>>;

Pieces pieces_of(const Evidence& e, const std::string& parameter) {
  Pieces pieces;
  const std::int64_t numel =
      numel_of(e.reference.find({0, RecordKind::kParam, parameter, 0})->layout.global_shape);
  for (const RankTrace& rank : e.actual.ranks) {
    const Record* const held = rank.find({0, RecordKind::kParam, parameter, 0});
    if (held == nullptr || !is_flat(held->layout)) return {};
    const std::vector<int> group = e.actual.mesh.group_of(rank.rank, Axis::kDp);
    std::vector<std::size_t>& own =
        pieces[{group.front(), e.actual.mesh.coordinate(rank.rank, Axis::kDp)}];
    for (const PartStats& part : held->parts) {
      const FlatRange& range = part.range;
      if (range.global_begin < 0 || range.global_begin + range.count > numel) return {};
      for (std::int64_t i = 0; i < range.count; ++i)
        own.push_back(static_cast<std::size_t>(range.global_begin + i));
    }
  }
  return pieces;
}

/// A weight that may be gathered in the place of the right one, and the cause that it would be.
struct OtherWeight {
  CauseId cause;
  NamedValues values;
  Values weight;
};

std::vector<OtherWeight> other_weights(const Evidence& e, const Reader& reader) {
  std::vector<OtherWeight> others;
  const int step = e.wanted.key.step;
  for (int back = 1; back <= std::min(step, 2); ++back) {
    RecordKey old{step - back, RecordKind::kParam, reader.weight_name, 0};
    if (old.step > 0) old = record_before(old);
    if (e.reference.find(old) != nullptr)
      others.push_back(
          {CauseId::kBackwardReadsEarlierWeight, {{"step", step - back}}, e.reference_value(old)});
  }
  for (const Record& record : e.reference.trace().ranks.at(0).records) {
    const RecordKey& key = record.key;
    if (key.kind != RecordKind::kParam || key.step != 0 || key.call != 0 ||
        key.name == reader.weight_name || record.layout.global_shape != reader.weight.shape())
      continue;
    others.push_back(
        {CauseId::kBackwardReadsOtherWeight, {{"other", key.name}}, e.parameter_read(key.name)});
  }
  const int ranks = e.actual.mesh.degree(Axis::kDp);
  const Pieces pieces = pieces_of(e, reader.weight_name);
  const Values now = reader.weight.contiguous();
  // with each piece as that of the dp rank that `source_of` says, or zeros
  const auto with_pieces = [&](const auto& source_of) {
    std::vector<double> made(now.flat().begin(), now.flat().end());
    for (const auto& [place, own] : pieces) {
      const std::optional<int> from = source_of(place.second);
      const auto source = from.has_value() ? pieces.find({place.first, *from}) : pieces.end();
      if (from.has_value() && (source == pieces.end() || source->second.size() != own.size()))
        return Values();
      for (std::size_t i = 0; i < own.size(); ++i)
        made[own[i]] = from.has_value() ? now.flat()[source->second[i]] : 0;
    }
    return Values(now.shape(), std::move(made));
  };
  for (int rank = 0; !pieces.empty() && rank < ranks; ++rank) {
    const auto or_zeros = [rank](int own) {
      return own == rank ? std::nullopt : std::optional(own);
    };
    others.push_back(
        {CauseId::kBackwardReadsZerosInPart, {{"dp_rank", rank}}, with_pieces(or_zeros)});
  }
  for (int turn = 1; !pieces.empty() && turn < ranks; ++turn)
    others.push_back({CauseId::kBackwardReadsMovedParts,
                      {{"dp_ranks", turn}},
                      with_pieces([&](int own) { return std::optional((own + turn) % ranks); })});
  others.push_back({CauseId::kBackwardReadsZeros, {}, Values::zeros(reader.weight.shape())});
  return others;
}

}  // namespace

Cause cause_in_weights_of_backward(const Evidence& e) {
  const RecordKey& key = e.wanted.key;
  const RecordKey forward{key.step, RecordKind::kActivation, key.name, key.call};
  if (e.whole.dim() != 3 || !e.is_right(forward)) return {};
  const std::vector<const View*> bad = e.bad_views();
  if (bad.empty()) return {};
  for (const Reader& reader : readers_of_point(e)) {
    for (auto& [cause, values, weight] : other_weights(e, reader)) {
      if (!weight.defined() || weight.shape() != reader.weight.shape()) continue;
      const Values made =
          e.whole + product(reader.gradient, weight - reader.weight).reshape(e.whole.shape());
      const bool fits = std::ranges::all_of(bad, [&](const View* view) {
        return is_telling(view->actual) &&
               e.explains_each(made.cut(view->box.global_offset, view->box.size), *view);
      });
      if (!fits) continue;
      values.emplace_back("parameter", reader.weight_name);
      values.push_back(e.on_bad_ranks());
      return make_cause(cause, std::move(values));
    }
  }
  return {};
}

namespace {

/// Whether a step has inputs or activations on some rank.
bool has_forward(const Trace& trace, int step) {
  return std::ranges::any_of(trace.ranks, [step](const RankTrace& rank) {
    return std::ranges::any_of(rank.records, [step](const Record& record) {
      return record.key.step == step &&
             (record.key.kind == RecordKind::kDataId || record.key.kind == RecordKind::kActivation);
    });
  });
}

/// A step of the run that is made without a forward pass, unless it records none at all.
Cause without_forward(const Reference& reference, const Trace& actual, int step) {
  if (step == 0 || !has_forward(reference.trace(), step) || has_forward(actual, step)) return {};
  for (int before = step - 1; before >= 0; --before) {
    if (has_forward(actual, before))
      return make_cause(CauseId::kStepWithoutForward, {{"step", step}, {"before", before}});
  }
  return {};
}

}  // namespace

Cause cause_without_forward(const Evidence& e) {
  return without_forward(e.reference, e.actual, e.wanted.key.step);
}

Cause cause_of_missing(const Reference& reference, const Trace& actual, const RecordKey& key) {
  if (Cause cause = without_forward(reference, actual, key.step); !cause.empty()) return cause;
  if (key.kind == RecordKind::kMask) return make_cause(CauseId::kNothingDropped);
  RecordKey forward = key;
  forward.kind = RecordKind::kActivation;
  const bool is_made = std::ranges::any_of(
      actual.ranks, [&](const RankTrace& rank) { return rank.find(forward) != nullptr; });
  if (key.kind != RecordKind::kActivationGrad || !is_made) return {};
  bool has_parameters = false, is_trained = false;
  for (const Record& record : reference.trace().ranks.at(0).records) {
    if (record.key.step != key.step || !record.key.name.starts_with(key.name + ".")) continue;
    has_parameters = has_parameters || record.key.kind == RecordKind::kParam;
    is_trained = is_trained || record.key.kind == RecordKind::kGrad;
  }
  return make_cause(has_parameters && !is_trained ? CauseId::kModuleFrozen
                                                  : CauseId::kOutputDetached);
}

Cause cause_in_handover(const Evidence& e) {
  const RecordKind kind = e.wanted.key.kind;
  if (e.actual.mesh.degree(Axis::kPp) == 1 ||
      (kind != RecordKind::kActivation && kind != RecordKind::kActivationGrad))
    return {};
  const Record* const before = neighbor_of(e);
  if (before == nullptr) return {};
  const std::optional<int> own = stage_rank_of(e, e.wanted.key);
  const std::optional<int> other = stage_rank_of(e, before->key);
  if (!own.has_value() || !other.has_value() || own == other || !e.is_right(before->key)) return {};
  if (kind == RecordKind::kActivationGrad) {
    if (const std::optional<int> call = overwritten_by(e, before->key))
      return make_cause(CauseId::kInputBufferReused,
                        {{"pp_rank", *other}, {"read", *call}, {"micro_batch", e.wanted.key.call}});
  }
  NamedValues values = wrong_calls(e);
  values.emplace_back("pp_rank", *own);
  values.emplace_back("other_pp_rank", *other);
  values.emplace_back("last_right", describe(before->key));
  return make_cause(
      kind == RecordKind::kActivationGrad ? CauseId::kWrongBetweenStages : CauseId::kReceivedOther,
      std::move(values));
}

}  // namespace isoshard::detail
