// SPDX-License-Identifier: Apache-2.0
// What goes wrong where ranks of cp share the tokens of a sequence, and in the rotation by which
// queries and keys know their positions.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "harness/causes/run_causes.h"
#include "harness/causes/view/targets.h"

namespace isoshard::detail {
namespace {

/// Tokens that follow each other, on one rank.
struct Run {
  int rank = 0;  ///< world rank
  int cp = 0;
  std::int64_t begin = 0, local = 0, count = 0;
  bool is_wrong = false;
  bool is_filled = false;  ///< a quarter of its numbers or more are other ones
};

/// Of all ranks along dim `dim`; empty unless each cp rank has its share of it, and all that are
/// alike in cp the same.
std::vector<Run> runs_along(const Evidence& e, std::size_t dim) {
  const int cp = e.actual.mesh.degree(Axis::kCp);
  const std::int64_t length = e.wanted.layout.global_shape[dim];
  std::vector<Run> runs;
  std::map<int, std::set<std::pair<std::int64_t, std::int64_t>>> of_cp;
  std::set<std::pair<std::int64_t, std::int64_t>> all;
  for (const Held& held : e.held) {
    const int own = e.actual.mesh.coordinate(held.rank->rank, Axis::kCp);
    std::set<std::pair<std::int64_t, std::int64_t>> places;
    std::int64_t count = 0;
    for (const PartStats& part : held.record->parts) {
      if (part.box.size.size() <= dim) return {};
      const bool is_wrong =
          part.stats.nonfinite_mismatch != 0 || part.stats.relative_error() > e.tolerance();
      const bool is_filled = 4 * part.stats.unequal_values >= part.stats.numel;
      runs.push_back({held.rank->rank, own, part.box.global_offset[dim], part.box.local_offset[dim],
                      part.box.size[dim], is_wrong, is_filled});
      if (places.emplace(part.box.global_offset[dim], part.box.size[dim]).second)
        count += part.box.size[dim];
    }
    if (count * cp != length) return {};
    const auto [known, is_new] = of_cp.try_emplace(own, places);
    if (!is_new && known->second != places) return {};
    all.insert(places.begin(), places.end());
  }
  std::int64_t shared = 0;
  for (const auto& [begin, count] : all) shared += count;
  return shared == length ? runs : std::vector<Run>();
}

/// Where runs of a cp rank begin and end, and "4..7, 16..19".
NamedValues places_of(const std::vector<Run>& runs, int cp) {
  std::map<std::int64_t, std::int64_t> places;
  for (const Run& run : runs) {
    if (run.cp == cp) places.emplace(run.begin, run.begin + run.count - 1);
  }
  std::vector<std::int64_t> begins, ends;
  std::vector<std::string> words;
  for (const auto& [first, last] : places) {
    begins.push_back(first);
    ends.push_back(last);
    words.push_back(fmt::format("{}..{}", first, last));
  }
  return {{"begins", begins},
          {"ends", ends},
          NamedValue::words("places", fmt::format("{}", fmt::join(words, ", ")))};
}

/// Whether the tokens up to the end of a run are all on its rank.
bool meets_own_keys_only(const std::vector<Run>& runs, const Run& of) {
  std::int64_t own = 0;
  std::set<std::int64_t> seen;
  for (const Run& run : runs) {
    if (run.rank == of.rank && run.begin < of.begin + of.count && seen.insert(run.begin).second)
      own += run.count;
  }
  return own == of.begin + of.count;
}

Cause restarted_positions(const Evidence& e, const std::vector<Run>& runs) {
  const std::string& name = e.wanted.key.name;
  const bool is_of_places = name.find("rope") != std::string::npos ||
                            name.find("rotary") != std::string::npos ||
                            name.find("position") != std::string::npos;
  bool is_right_at_all = false;
  for (const Run& run : runs) {
    if (run.is_wrong != (run.local != run.begin)) return {};
    is_right_at_all |= !run.is_wrong;
  }
  if (!is_of_places || !is_right_at_all) return {};
  return make_cause(CauseId::kPositionsRestart, places_of(runs, 1));
}

/// Queries meet keys in the core of an attention, whose output shows it, too; not in what it reads.
bool is_of_attention(std::string_view name) {
  const std::string_view last = name.substr(name.rfind('.') + 1);
  return last == "core" || last.find("attn") != last.npos;
}

/// A single element that is wrong there may be so for any reason.
Cause keys_of_others(const Evidence& e, const std::vector<Run>& runs) {
  if (!is_of_attention(e.wanted.key.name)) return {};
  std::vector<int> wrong;
  bool has_own_only = false;
  for (const Run& run : runs) {
    const bool is_own_only = meets_own_keys_only(runs, run);
    if (run.is_wrong && (is_own_only || !run.is_filled)) return {};
    has_own_only |= is_own_only;
    if (run.is_wrong && std::ranges::find(wrong, run.rank) == wrong.end())
      wrong.push_back(run.rank);
  }
  if (wrong.empty() || !has_own_only) return {};
  std::ranges::sort(wrong);
  return make_cause(
      CauseId::kWrongWithForeignKeys,
      {{"ranks", wrong}, NamedValue::words("where", e.coordinates_in_words(wrong, Axis::kCp))});
}

/// How ranks have the tokens of a sequence: cp chunks in turn, or of 2 cp chunks one from either
/// end. Of those, both may lose their last token, or the tail alone, where the rank's tokens end.
enum class Chunks : unsigned char { kHeadAndTail, kTailOnly, kInTurn };

/// Where a rank's tokens end and the next one is another rank's.
std::set<std::int64_t> ends_of_chunks(std::int64_t length, int cp, Chunks order) {
  std::set<std::int64_t> ends;
  const int chunks = order == Chunks::kInTurn ? cp : 2 * cp;
  for (int chunk = 0; length % chunks == 0 && chunk + 1 < chunks; ++chunk) {
    const bool goes_on = order != Chunks::kInTurn && chunk + 1 == cp;
    const bool is_head = order == Chunks::kTailOnly && chunk < cp;
    if (!goes_on && !is_head) ends.insert((chunk + 1) * (length / chunks) - 1);
  }
  return ends;
}

/// Calls `use(sample, token, loss)` for each token of a micro-batch that has a target.
template <class Use>
void for_each_target(const Values& logits, const Values& labels, const Use& use) {
  const std::int64_t width = logits.size(2);
  const Values rows = logits.rows(), lse = log_sum_exp(logits);
  for (const Target& target : targets_in(labels, width)) {
    const double logit = rows.flat()[static_cast<std::size_t>(target.row * width + target.column)];
    use(target.sample, target.token, lse.flat()[static_cast<std::size_t>(target.row)] - logit);
  }
}

/// Losses of a step, added over its micro-batches, and how many targets there are.
struct CountedSum {
  double sum = 0, count = 0;
};

/// Adds the loss of a micro-batch as it is if each cp rank divides by its own count of targets, and
/// the means of ranks are averaged; with the shares of dp ranks as in the reference. False if a
/// rank has no target.
bool add_rank_means(CountedSum& step, const Values& logits, const Values& labels,
                    const MeshShape& mesh, bool is_head_tail) {
  const int dp = mesh.degree(Axis::kDp), cp = mesh.degree(Axis::kCp);
  const std::int64_t length = labels.size(1);
  const int chunks = is_head_tail ? 2 * cp : cp;
  if (length % chunks != 0 || labels.size(0) % dp != 0) return false;
  const auto rank_of = [&](std::int64_t token) {
    const auto chunk = static_cast<int>(token / (length / chunks));
    return chunk < cp ? chunk : 2 * cp - 1 - chunk;
  };
  std::vector<double> sums(static_cast<std::size_t>(dp * cp)), counts = sums;
  for_each_target(logits, labels, [&](std::int64_t sample, std::int64_t token, double loss) {
    const auto place =
        static_cast<std::size_t>(sample / (labels.size(0) / dp) * cp + rank_of(token));
    sums[place] += loss;
    counts[place] += 1;
  });
  for (std::size_t first = 0; first < sums.size(); first += static_cast<std::size_t>(cp)) {
    double count = 0, mean = 0;
    for (std::size_t place = first; place < first + static_cast<std::size_t>(cp); ++place) {
      if (counts[place] == 0) return false;
      count += counts[place];
      mean += sums[place] / counts[place] / cp;
    }
    step.sum += mean * count;
    step.count += count;
  }
  return true;
}

/// Sums of the tokens' losses over each of `n` equal runs of samples: of all tokens, and of those
/// at the ends of chunks; and how many tokens count.
struct TokenSums {
  std::vector<double> all, ends, counts;
};
bool add_tokens(TokenSums& sums, const Values& logits, const Values& labels,
                const std::set<std::int64_t>& ends) {
  const auto n = static_cast<std::int64_t>(sums.all.size());
  if (labels.size(0) % n != 0) return false;
  for_each_target(logits, labels, [&](std::int64_t sample, std::int64_t token, double loss) {
    const auto run = static_cast<std::size_t>(sample / (labels.size(0) / n));
    sums.all[run] += loss;
    sums.counts[run] += 1;
    if (ends.contains(token)) sums.ends[run] += loss;
  });
  return true;
}

/// An angle between -pi and pi.
double wrapped(double angle) {
  return std::remainder(angle, 2 * std::numbers::pi);
}

/// What goes into a rotation, [B,S,N,D] of queries or keys, if it is recorded and right; undefined
/// else.
Values input_of_rotation(const Evidence& e) {
  constexpr std::string_view kSuffix = "_rope";
  const RecordKey& key = e.wanted.key;
  if (!key.name.ends_with(kSuffix) || e.whole.dim() != 4 || e.whole.size(3) % 2 != 0) return {};
  const std::string base = key.name.substr(0, key.name.size() - kSuffix.size());
  const std::string fused = parent_of(base) + ".linear_qkv." + base.substr(base.rfind('.') + 1);
  for (const std::string& name : {base + "_norm", base + "_proj", fused}) {
    const RecordKey input{key.step, RecordKind::kActivation, name, key.call};
    if (e.reference.find(input) == nullptr) continue;
    const Values x = e.reference_value(input);
    if (!e.is_right(input) || x.numel() != e.whole.numel()) return {};
    return x.reshape({e.whole.size(0), e.whole.size(2), e.whole.size(1), e.whole.size(3)})
        .contiguous();
  }
  return {};
}

/// Angles of pairs of features, by token and pair.
using Angles = std::vector<std::vector<double>>;

/// Calls `use(token, pair, x1, x2, place of y1, place of y2)` for each pair of a part [B,N,S,D].
template <class Use>
void for_each_pair(const Values& x, const Box& box, const Use& use) {
  const std::int64_t half = box.size[3] / 2;
  const auto at_input = [&](std::int64_t b, std::int64_t s, std::int64_t n, std::int64_t d) {
    return x
        .flat()[static_cast<std::size_t>(((b * x.size(1) + s) * x.size(2) + n) * x.size(3) + d)];
  };
  std::size_t row = 0;
  for (std::int64_t b = 0; b < box.size[0]; ++b) {
    for (std::int64_t n = 0; n < box.size[1]; ++n) {
      for (std::int64_t s = 0; s < box.size[2]; ++s, row += static_cast<std::size_t>(2 * half)) {
        for (std::int64_t i = 0; i < half; ++i) {
          const auto input = [&](std::int64_t d) {
            return at_input(box.global_offset[0] + b, box.global_offset[2] + s,
                            box.global_offset[1] + n, d);
          };
          use(static_cast<std::size_t>(s), static_cast<std::size_t>(i), input(i), input(i + half),
              row + static_cast<std::size_t>(i), row + static_cast<std::size_t>(i + half));
        }
      }
    }
  }
}

Angles angles_of(const Values& x, const Values& y, const Box& box) {
  const auto tokens = static_cast<std::size_t>(box.size[2]),
             pairs = static_cast<std::size_t>(box.size[3] / 2);
  Angles along(tokens, std::vector<double>(pairs, 0)), across = along;
  const Values own = y.contiguous();
  for_each_pair(
      x, box,
      [&](std::size_t s, std::size_t i, double x1, double x2, std::size_t at1, std::size_t at2) {
        along[s][i] += x1 * own.flat()[at1] + x2 * own.flat()[at2];
        across[s][i] += x1 * own.flat()[at2] - x2 * own.flat()[at1];
      });
  for (std::size_t s = 0; s < tokens; ++s)
    for (std::size_t i = 0; i < pairs; ++i) along[s][i] = std::atan2(across[s][i], along[s][i]);
  return along;
}

Values rotated_by(const Values& x, const Box& box, const Angles& angles) {
  std::vector<double> made(static_cast<std::size_t>(numel_of(box.size)));
  for_each_pair(
      x, box,
      [&](std::size_t s, std::size_t i, double x1, double x2, std::size_t at1, std::size_t at2) {
        const double cosine = std::cos(angles[s][i]), sine = std::sin(angles[s][i]);
        made[at1] = x1 * cosine - x2 * sine;
        made[at2] = x2 * cosine + x1 * sine;
      });
  return {box.size, std::move(made)};
}

/// The angle from a token to the next one, of each pair; empty unless tokens are counted from 0 on.
std::vector<double> frequencies_in(const Angles& right) {
  constexpr double kNear = 1e-3;
  if (right.size() < 3) return {};
  for (std::size_t s = 0; s < right.size(); ++s) {
    for (std::size_t i = 0; i < right[s].size(); ++i) {
      if (std::fabs(wrapped(right[s][i] - static_cast<double>(s) * right[1][i])) > kNear) return {};
    }
  }
  return right[1];
}

/// What frequencies are, by those that are right.
Cause other_frequencies(const Evidence& e, const std::vector<double>& seen,
                        const std::vector<double>& right) {
  double most = 0;
  for (std::size_t i = 0; i < seen.size(); ++i)
    most = std::max(most, std::fabs(seen[i] / right[i] - 1));
  NamedValues values = {{"percent", 100 * most}, e.on_bad_ranks()};
  const auto fits = [&](const auto& other) {
    for (std::size_t i = 0; i < seen.size(); ++i)
      if (!is_near(seen[i], other(i), std::max(0.02 * most, 1e-6))) return false;
    return true;
  };
  for (const auto& [bits, name] : {std::pair{8, "bf16"}, std::pair{11, "fp16"}}) {
    if (!fits([&, own = bits](std::size_t i) { return rounded_to(right[i], own); })) continue;
    values.emplace_back("dtype", name);
    return make_cause(CauseId::kFrequenciesRounded, std::move(values));
  }
  // pair i of n has base^(-i/n)
  if (seen.size() < 3) return make_cause(CauseId::kOtherFrequencies, std::move(values));
  const auto base_of = [&](const std::vector<double>& frequencies) {
    return std::pow(frequencies[1], -static_cast<double>(frequencies.size()));
  };
  const double base = base_of(seen);
  const bool is_other_base = fits([&](std::size_t i) {
    return std::pow(base, -static_cast<double>(i) / static_cast<double>(seen.size()));
  });
  if (!is_other_base) return make_cause(CauseId::kOtherFrequencies, std::move(values));
  values.emplace_back("base", base);
  values.emplace_back("right", base_of(right));
  return make_cause(CauseId::kOtherBase, std::move(values));
}

}  // namespace

Cause cause_in_rotation(const Evidence& e) {
  const Values x = input_of_rotation(e);
  if (!x.defined()) return {};
  const Box all{Shape(4, 0), Shape(4, 0), e.whole.shape()};
  const std::vector<double> right = frequencies_in(angles_of(x, e.whole, all));
  const std::vector<const View*> bad = e.bad_views();
  if (right.empty() || bad.empty()) return {};
  const Box& box = bad.front()->box;
  const Angles seen = angles_of(x, bad.front()->actual, box);
  // all wrong ranks must turn by `angle(token, pair)`
  const auto explains_all = [&](const auto& angle) {
    return std::ranges::all_of(bad, [&](const View* view) {
      Angles angles(static_cast<std::size_t>(view->box.size[2]), std::vector<double>(right.size()));
      for (std::size_t s = 0; s < angles.size(); ++s)
        for (std::size_t i = 0; i < right.size(); ++i)
          angles[s][i] =
              angle(static_cast<double>(view->box.global_offset[2]) + static_cast<double>(s), i);
      return e.explains_each(rotated_by(x, view->box, angles), *view);
    });
  };
  const double first = static_cast<double>(box.global_offset[2]);
  const double off = wrapped(seen[0][0] - first * right[0]) / right[0];
  if (const double shift = std::round(off); shift != 0 && std::fabs(off - shift) < 0.05) {
    if (explains_all([&](double token, std::size_t i) { return (token + shift) * right[i]; }))
      return make_cause(CauseId::kPositionsOff, {{"shift", shift}, e.on_bad_ranks()});
  }
  // so small that the last token's angle is off by less than half a turn
  const double last = first + static_cast<double>(seen.size() - 1);
  std::vector<double> own;
  for (std::size_t i = 0; i < right.size(); ++i)
    own.push_back(right[i] + wrapped(seen.back()[i] - last * right[i]) / std::max(last, 1.0));
  if (!explains_all([&](double token, std::size_t i) { return token * own[i]; })) return {};
  return other_frequencies(e, own, right);
}

Cause cause_in_tokens(const Evidence& e) {
  if (e.wanted.key.kind != RecordKind::kActivation || e.actual.mesh.degree(Axis::kCp) == 1)
    return {};
  for (std::size_t dim = 1; dim < e.wanted.layout.global_shape.size(); ++dim) {
    const std::vector<Run> runs = runs_along(e, dim);
    if (runs.empty()) continue;
    if (Cause cause = restarted_positions(e, runs); !cause.empty()) return cause;
    if (Cause cause = keys_of_others(e, runs); !cause.empty()) return cause;
  }
  return {};
}

Cause cause_in_targets(const Evidence& e) {
  const int cp = e.actual.mesh.degree(Axis::kCp);
  const View* bad = e.views.empty() ? nullptr : e.first_bad_view();
  if (cp == 1 || bad == nullptr || !is_named_loss(role_of(e.wanted.key)) ||
      !are_few_logits(e, labels_of_step(e)))
    return {};
  for (const Chunks order : {Chunks::kHeadAndTail, Chunks::kTailOnly, Chunks::kInTurn}) {
    TokenSums sums;
    std::set<std::int64_t> ends;
    sums.all.resize(static_cast<std::size_t>(e.whole.numel()));
    sums.ends = sums.counts = sums.all;
    bool fits = true;
    for (const Record* const labels : labels_of_step(e)) {
      const Record* const logits = logits_beside(e, *labels);
      ends = ends_of_chunks(labels->layout.global_shape[1], cp, order);
      fits = fits && logits != nullptr &&
             add_tokens(sums, e.reference_value(logits->key), e.reference_value(labels->key), ends);
    }
    const std::size_t first =
        bad->box.global_offset.empty() ? 0 : static_cast<std::size_t>(bad->box.global_offset[0]);
    const Values seen = bad->actual.flattened();
    for (std::size_t i = 0; fits && i < seen.flat().size(); ++i) {
      const double count = sums.counts.at(first + i);
      fits = count > 0 && sums.ends[first + i] > 0 &&
             is_near(seen.flat()[i], (sums.all[first + i] - sums.ends[first + i]) / count, 1e-4);
    }
    if (!fits || seen.flat().empty() || ends.empty()) continue;
    return make_cause(CauseId::kLastTargetsMissing, {{"positions", ends}});
  }
  return {};
}

Cause cause_in_rank_means(const Evidence& e) {
  const int cp = e.actual.mesh.degree(Axis::kCp);
  const Stats& stats = e.result.comparison.stats;
  const NameRole role = role_of(e.wanted.key);
  if (cp == 1 || stats.numel != 1 || (role != NameRole::kLoss && role != NameRole::kLossBackward))
    return {};
  const double right = e.whole.defined() && e.whole.numel() == 1 ? e.whole.item() : 0;
  const double seen = right * stats.scale();
  for (const bool is_head_tail : {true, false}) {
    CountedSum step;
    bool fits = true;
    for (const Record* const labels : labels_of_step(e)) {
      const Record* const logits = logits_beside(e, *labels);
      fits = fits && logits != nullptr &&
             add_rank_means(step, e.reference_value(logits->key), e.reference_value(labels->key),
                            e.actual.mesh, is_head_tail);
    }
    if (fits && step.count > 0 &&
        std::abs(seen - step.sum / step.count) < 0.1 * std::abs(seen - right))
      return make_cause(CauseId::kMeanOfCpRankMeans);
  }
  return {};
}

}  // namespace isoshard::detail
