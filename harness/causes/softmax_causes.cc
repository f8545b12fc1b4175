// SPDX-License-Identifier: Apache-2.0
/// What goes wrong inside of a cross entropy whose vocabulary tp ranks share out: which columns
/// smoothing counts, what ranks take off or round before they add it, targets that no rank finds.
///
/// Losses are few numbers, and many bugs move them by about as much. A smoothing over more columns
/// moves them by a part of the loss that the logits give to many digits. What is rounded moves the
/// softmax of each token by a factor of its own, which the gradients at the logits show: a cause is
/// said if the factors of all tokens are those that the rounding makes.
#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "harness/causes/class_causes.h"
#include "harness/causes/view/targets.h"

namespace isoshard::detail {
namespace {

/// Of the tokens of one of several equal runs of samples, added up: losses, means over the
/// vocabulary of what each of its ids would lose, and what a run has in the place of the latter.
struct RunOfTokens {
  double count = 0, loss = 0, mean = 0;
  double padded_with_zeros = 0;    ///< divided by more columns
  double padded_with_largest = 0;  ///< the same, of logits from which each row's largest was taken
};

/// As many runs as the loss has numbers; empty if logits and labels do not fit.
std::vector<RunOfTokens> runs_of_tokens(const Evidence& e, std::int64_t padded) {
  std::vector<RunOfTokens> runs(static_cast<std::size_t>(e.whole.numel()));
  const auto n = static_cast<std::int64_t>(runs.size());
  for (const Record* const record : labels_of_step(e)) {
    const Record* const head = logits_beside(e, *record);
    if (head == nullptr) return {};
    const Values logits = e.reference_value(head->key), labels = e.reference_value(record->key);
    if (labels.size(0) % n != 0) return {};
    const Values rows = logits.rows(), lse = log_sum_exp(rows);
    const std::int64_t width = rows.size(1);
    for (const Target& target : targets_in(labels, width)) {
      RunOfTokens& run = runs[static_cast<std::size_t>(target.sample / (labels.size(0) / n))];
      const auto own = rows.flat().subspan(static_cast<std::size_t>(target.row * width),
                                           static_cast<std::size_t>(width));
      const double all = lse.flat()[static_cast<std::size_t>(target.row)];
      double sum = 0;
      for (const double logit : own) sum += logit;
      const auto wide = static_cast<double>(padded);
      run.count += 1;
      run.loss += all - own[static_cast<std::size_t>(target.column)];
      run.mean += all - sum / static_cast<double>(width);
      run.padded_with_zeros += all - sum / wide;
      run.padded_with_largest +=
          all - *std::ranges::max_element(own) * (1 - static_cast<double>(width) / wide) -
          sum / wide;
    }
  }
  const bool has_all = std::ranges::all_of(runs, [](const RunOfTokens& r) { return r.count > 0; });
  return has_all ? runs : std::vector<RunOfTokens>();
}

/// How much of the mean over the vocabulary is in the reference's loss; nothing if it is no part,
/// or another one in each run.
std::optional<double> share_of_mean(const Evidence& e, const std::vector<RunOfTokens>& runs) {
  constexpr double kLeast = 1e-3, kMost = 0.9;
  std::optional<double> share;
  const Values losses = e.whole.flattened();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const RunOfTokens& run = runs[i];
    if (run.mean == run.loss) return std::nullopt;
    const double own = (losses.flat()[i] * run.count - run.loss) / (run.mean - run.loss);
    if (!(own > kLeast && own < kMost) || !is_near(own, share.value_or(own), 1e-2))
      return std::nullopt;
    share = share.value_or(own);
  }
  return share;
}

/// How wide the parts of a head are together, if ranks share its columns out.
std::optional<std::int64_t> padded_width(const Evidence& e, const RecordKey& head) {
  const Record* const record = e.actual.ranks.front().find(head);
  if (record == nullptr || !record->layout.explicit_parts || record->local_shape.empty())
    return std::nullopt;
  return record->local_shape.back() * e.actual.mesh.degree(Axis::kTp);
}

/// Gradients at logits, and the softmax that they should be made of, token by token.
struct TokenRow {
  std::vector<double> logits, seen, right;
  std::size_t target = 0;
};

/// The numbers of a tensor [B,S,V] that ranks hold, put over the right ones.
std::optional<std::vector<double>> as_held(const Evidence& e, const RecordKey& key,
                                           const Values& right) {
  std::vector<double> numbers(right.flat().begin(), right.flat().end());
  const Shape& shape = right.shape();
  bool any = false;
  for (const RankTrace& rank : e.actual.ranks) {
    const Record* const record = rank.find(key);
    if (record == nullptr || !record->kept || rank.arena == nullptr) continue;
    if (is_flat(record->layout) || is_partial(record->layout)) return std::nullopt;
    const Values local = Values(rank.tensor(*record)) / record->grad_scale;
    for (const PartStats& part : record->parts) {
      if (!lies_in(part.box, shape)) return std::nullopt;
      const Values own = local.cut(part.box.local_offset, part.box.size).contiguous();
      const Shape &at = part.box.global_offset, &size = part.box.size;
      std::size_t next = 0;
      for (std::int64_t b = 0; b < size[0]; ++b) {
        for (std::int64_t s = 0; s < size[1]; ++s) {
          const std::int64_t first = ((at[0] + b) * shape[1] + at[1] + s) * shape[2] + at[2];
          for (std::int64_t v = 0; v < size[2]; ++v)
            numbers[static_cast<std::size_t>(first + v)] = own.flat()[next++];
        }
      }
      any = true;
    }
  }
  return any ? std::optional(std::move(numbers)) : std::nullopt;
}

/// Of the micro-batches whose gradients at the logits ranks have kept; of `only` alone, if there is
/// one.
std::vector<TokenRow> token_rows(const Evidence& e, std::optional<int> only) {
  std::vector<TokenRow> rows;
  for (const Record* const record : labels_of_step(e)) {
    if (only.has_value() && record->key.call != *only) continue;
    const Record* const head = logits_beside(e, *record);
    if (head == nullptr) return {};
    RecordKey key = head->key;
    key.kind = RecordKind::kActivationGrad;
    const Record* const gradient = e.reference.find(key);
    if (gradient == nullptr || gradient->layout.global_shape != head->layout.global_shape)
      return {};
    const Values logits = e.reference_value(head->key).contiguous(),
                 right = (e.reference_value(key) / gradient->grad_scale).contiguous();
    const auto seen = as_held(e, key, right);
    if (!seen.has_value()) continue;
    const auto width = static_cast<std::size_t>(logits.size(2));
    for (const Target& target :
         targets_in(e.reference_value(record->key), static_cast<std::int64_t>(width))) {
      const auto cut = [&](std::span<const double> all) {
        const auto own = all.subspan(static_cast<std::size_t>(target.row) * width, width);
        return std::vector<double>(own.begin(), own.end());
      };
      rows.push_back({cut(logits.flat()), cut(*seen), cut(right.flat()),
                      static_cast<std::size_t>(target.column)});
    }
  }
  return rows;
}

/// The logarithm of the factor that a token's softmax has besides the right one; nothing if its
/// gradient does not tell, or is off in another way. A gradient is `weight` times what softmax has
/// above a constant, which smoothing takes off, and at the target above 1 less.
std::optional<double> logarithm_of_factor(const TokenRow& row, double noise) {
  const double largest = *std::ranges::max_element(row.logits);
  double sum = 0;
  for (const double logit : row.logits) sum += std::exp(logit - largest);
  const std::size_t n = row.logits.size();
  std::vector<double> softmax(n);
  for (std::size_t i = 0; i < n; ++i) softmax[i] = std::exp(row.logits[i] - largest) / sum;
  if (n < 8) return std::nullopt;
  const auto others = static_cast<double>(n - 1);
  double mean_p = 0, mean_g = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if (i == row.target) continue;
    mean_p += softmax[i] / others;
    mean_g += row.right[i] / others;
  }
  double products = 0, squares = 0, off = 0, all = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if (i != row.target) {
      products += (softmax[i] - mean_p) * (row.right[i] - mean_g);
      squares += std::pow(softmax[i] - mean_p, 2);
    }
    off += softmax[i] * (row.seen[i] - row.right[i]);
    all += softmax[i] * softmax[i];
  }
  const double weight = squares == 0 ? 0 : products / squares;
  if (weight == 0) return std::nullopt;
  const double more = off / all / weight;
  double left = 0, wrong = 0, size = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const double difference = row.seen[i] - row.right[i];
    left += std::pow(difference - more * weight * softmax[i], 2);
    wrong += difference * difference;
    size += row.right[i] * row.right[i];
  }
  // one factor for the whole row, or nothing that is wrong
  if (std::sqrt(left) > 0.1 * std::sqrt(wrong) + noise * std::sqrt(size)) return std::nullopt;
  return more > -1 ? std::optional(std::log1p(more)) : std::nullopt;
}

/// Where the columns of ranks begin, ascending, and the end of the last.
std::vector<std::size_t> borders_of_columns(const Evidence& e, const RecordKey& head,
                                            std::size_t width) {
  std::set<std::size_t> borders{0, width};
  for (const RankTrace& rank : e.actual.ranks) {
    const Record* const record = rank.find(head);
    if (record == nullptr || is_flat(record->layout)) continue;
    for (const PartStats& part : record->parts) {
      if (part.box.size.size() == 3 && part.box.global_offset[2] >= 0)
        borders.insert(std::min(width, static_cast<std::size_t>(part.box.global_offset[2])));
    }
  }
  return {borders.begin(), borders.end()};
}

/// What a token loses in a way that ranks may share its columns out by mistake. `borders` are those
/// of the columns; `share` of the loss is the mean over all columns.
using LossOfToken = double (*)(std::span<const double> logits, std::size_t target,
                               const std::vector<std::size_t>& borders, double share);

double loss_of(double log_sum, double target, double mean, double share) {
  return (log_sum - target) * (1 - share) + (log_sum - mean) * share;
}

double mean_of(std::span<const double> logits) {
  double sum = 0;
  for (const double logit : logits) sum += logit;
  return sum / static_cast<double>(logits.size());
}

double log_sum_of(std::span<const double> logits) {
  const double largest = *std::ranges::max_element(logits);
  double sum = 0;
  for (const double logit : logits) sum += std::exp(logit - largest);
  return largest + std::log(sum);
}

double right_loss(std::span<const double> logits, std::size_t target,
                  const std::vector<std::size_t>& /*borders*/, double share) {
  return loss_of(log_sum_of(logits), logits[target], mean_of(logits), share);
}

double loss_with_own_maxima(std::span<const double> logits, std::size_t target,
                            const std::vector<std::size_t>& borders, double share) {
  double sum = 0, shifted = 0, of_target = 0;
  for (std::size_t p = 0; p + 1 < borders.size(); ++p) {
    const auto own = logits.subspan(borders[p], borders[p + 1] - borders[p]);
    const double largest = *std::ranges::max_element(own);
    for (const double logit : own) {
      sum += std::exp(logit - largest);
      shifted += logit - largest;
    }
    if (borders[p] <= target && target < borders[p + 1]) of_target = logits[target] - largest;
  }
  return loss_of(std::log(sum), of_target, shifted / static_cast<double>(logits.size()), share);
}

/// A target that no rank finds counts as the largest logit, which is taken off everywhere.
double loss_without(bool is_lost, std::span<const double> logits, std::size_t target,
                    double share) {
  const double of_target = is_lost ? *std::ranges::max_element(logits) : logits[target];
  return loss_of(log_sum_of(logits), of_target, mean_of(logits), share);
}

double loss_without_first(std::span<const double> logits, std::size_t target,
                          const std::vector<std::size_t>& borders, double share) {
  const bool is_lost = std::find(borders.begin() + 1, borders.end(), target) != borders.end();
  return loss_without(is_lost, logits, target, share);
}

double loss_without_last(std::span<const double> logits, std::size_t target,
                         const std::vector<std::size_t>& borders, double share) {
  const bool is_lost = std::find(borders.begin() + 1, borders.end(), target + 1) != borders.end();
  return loss_without(is_lost, logits, target, share);
}

struct SplitLoss {
  LossOfToken loss;
  CauseId cause;
};
constexpr SplitLoss kSplitLosses[] = {{loss_with_own_maxima, CauseId::kOwnLargestLogit},
                                      {loss_without_first, CauseId::kTargetsInFirstColumnLost},
                                      {loss_without_last, CauseId::kTargetsInLastColumnLost}};

/// What each run of samples should lose, and what it would lose by mistake.
struct RunOfLosses {
  double count = 0, right = 0;
  std::vector<double> wrong = std::vector<double>(std::size(kSplitLosses), 0);
};

std::vector<RunOfLosses> runs_of_losses(const Evidence& e, double share) {
  std::vector<RunOfLosses> runs(static_cast<std::size_t>(e.whole.numel()));
  const auto n = static_cast<std::int64_t>(runs.size());
  for (const Record* const record : labels_of_step(e)) {
    const Record* const head = logits_beside(e, *record);
    if (head == nullptr) return {};
    const Values rows = e.reference_value(head->key).rows().contiguous(),
                 labels = e.reference_value(record->key);
    const auto width = static_cast<std::size_t>(rows.size(1));
    const std::vector<std::size_t> borders = borders_of_columns(e, head->key, width);
    if (labels.size(0) % n != 0 || borders.size() < 3) return {};
    for (const Target& target : targets_in(labels, rows.size(1))) {
      RunOfLosses& run = runs[static_cast<std::size_t>(target.sample / (labels.size(0) / n))];
      const auto own = rows.flat().subspan(static_cast<std::size_t>(target.row) * width, width);
      const auto column = static_cast<std::size_t>(target.column);
      run.count += 1;
      run.right += right_loss(own, column, borders, share);
      for (std::size_t i = 0; i < run.wrong.size(); ++i)
        run.wrong[i] += kSplitLosses[i].loss(own, column, borders, share);
    }
  }
  return runs;
}

/// What a sum of exponentials is, as the parts of ranks give it.
using SumOfParts = double (*)(const std::vector<double>& parts, int bits);
struct RoundedSum {
  SumOfParts sum;
  CauseId cause;
};
double sum_of_rounded(const std::vector<double>& parts, int bits) {
  double sum = 0;
  for (const double part : parts) sum += rounded_to(part, bits);
  return sum;
}
double rounded_sum(const std::vector<double>& parts, int bits) {
  double sum = 0;
  for (const double part : parts) sum += part;
  return rounded_to(sum, bits);
}
double exponential_of_rounded(const std::vector<double>& parts, int bits) {
  double sum = 0;
  for (const double part : parts) sum += part;
  return std::exp(rounded_to(std::log(sum), bits));
}
constexpr RoundedSum kRoundedSums[] = {{sum_of_rounded, CauseId::kExponentialsOfRankRounded},
                                       {rounded_sum, CauseId::kExponentialsRounded},
                                       {exponential_of_rounded, CauseId::kLogarithmRounded}};
constexpr std::pair<int, const char*> kCoarserExponentials[] = {{8, "bf16"}, {11, "fp16 or TF32"}};

/// By what the logarithms of the factors are: those of a rounded sum over the right one.
double logarithm_made(const TokenRow& row, const std::vector<std::size_t>& borders, SumOfParts sum,
                      int bits) {
  const double largest = *std::ranges::max_element(row.logits);
  std::vector<double> parts(borders.size() - 1, 0);
  double all = 0;
  for (std::size_t p = 0; p < parts.size(); ++p) {
    for (std::size_t i = borders[p]; i < borders[p + 1]; ++i)
      parts[p] += std::exp(row.logits[i] - largest);
    all += parts[p];
  }
  return std::log(all) - std::log(sum(parts, bits));
}

Cause rounded_exponentials(const Evidence& e, const RecordKey& head,
                           const std::vector<TokenRow>& rows) {
  constexpr std::size_t kLeastTokens = 16;
  constexpr double kLeastLogarithm = 1e-5, kUnexplained = 0.1;
  const double noise = e.is_wide() ? 1e-6 : 0x1p-8;
  std::vector<double> seen;
  double squares = 0;
  for (const TokenRow& row : rows) {
    const auto logarithm = logarithm_of_factor(row, noise);
    if (!logarithm.has_value()) return {};
    seen.push_back(*logarithm);
    squares += *logarithm * *logarithm;
  }
  const auto count = static_cast<double>(seen.size());
  if (seen.size() < kLeastTokens || !(std::sqrt(squares / count) > kLeastLogarithm)) return {};
  const std::vector<std::size_t> borders = borders_of_columns(e, head, rows.front().logits.size());
  for (const auto& [bits, name] : kCoarserExponentials) {
    for (const RoundedSum& candidate : kRoundedSums) {
      // One rank's sum is the sum over all columns, and nobody adds it to another.
      if (candidate.sum == sum_of_rounded && borders.size() == 2) continue;
      double left = 0;
      for (std::size_t i = 0; i < rows.size(); ++i)
        left += std::pow(seen[i] - logarithm_made(rows[i], borders, candidate.sum, bits), 2);
      if (left > kUnexplained * kUnexplained * squares) continue;
      const double largest = std::fabs(*std::ranges::max_element(
          seen, [](double a, double b) { return std::fabs(a) < std::fabs(b); }));
      return make_cause(candidate.cause,
                        {{"dtype", name}, {"num_tokens", seen.size()}, {"largest", largest}});
    }
  }
  return {};
}

}  // namespace

Cause cause_smoothed_columns(const Evidence& e) {
  if (!is_named_loss(role_of(e.wanted.key)) || !e.whole.defined() || e.views.empty() ||
      e.actual.mesh.degree(Axis::kTp) == 1)
    return {};
  const std::vector<const Record*> labels = labels_of_step(e);
  const Record* const head = labels.empty() ? nullptr : logits_beside(e, *labels.front());
  const View* const bad = e.first_bad_view();
  if (head == nullptr || bad == nullptr) return {};
  const std::int64_t columns = padded_width(e, head->key).value_or(0);
  if (columns == 0) return {};
  const std::int64_t width = head->layout.global_shape.back();
  const std::vector<RunOfTokens> runs = columns > width && are_few_logits(e, labels)
                                            ? runs_of_tokens(e, columns)
                                            : std::vector<RunOfTokens>();
  const auto share = runs.empty() ? std::nullopt : share_of_mean(e, runs);
  if (!share.has_value()) return {};
  const auto true_width = static_cast<double>(width), wide = static_cast<double>(columns);
  // smoothing of a gives the mean a V / (V - 1)
  const double smoothing = *share * (true_width - 1) / true_width;
  const auto first = bad->box.global_offset.empty()
                         ? std::size_t{0}
                         : static_cast<std::size_t>(bad->box.global_offset[0]);
  const Values off = (bad->actual - bad->expected).flattened();
  for (const double own_share : {*share, smoothing * wide / (wide - 1)}) {
    for (const auto mean : {&RunOfTokens::padded_with_zeros, &RunOfTokens::padded_with_largest}) {
      bool fits = true;
      for (std::size_t i = 0; i < off.flat().size(); ++i) {
        const RunOfTokens& run = runs.at(first + i);
        const double made = (run.loss * (1 - own_share) + run.*mean * own_share) / run.count,
                     right = (run.loss * (1 - *share) + run.mean * *share) / run.count;
        constexpr double kLeast = 1e-4;  // of the loss: less may be roundings
        fits = fits && std::fabs(made - right) > kLeast * std::fabs(right) &&
               is_near(off.flat()[i], made - right, 0.01);
      }
      if (!fits) continue;
      return make_cause(CauseId::kSmoothingOverPadding, {{"offset", off.flat()[0]},
                                                         {"smoothing", smoothing},
                                                         {"padded", columns},
                                                         {"head", head->key.name},
                                                         {"width", width}});
    }
  }
  return {};
}

Cause cause_rounded_exponentials(const Evidence& e) {
  const RecordKey& key = e.wanted.key;
  const bool is_loss = is_named_loss(role_of(key));
  const std::vector<const Record*> labels = labels_of_step(e);
  const Record* const head = labels.empty() ? nullptr : logits_beside(e, *labels.front());
  if (head == nullptr || (!is_loss && key.name != head->key.name) || !are_few_logits(e, labels))
    return {};
  const std::vector<TokenRow> rows =
      token_rows(e, is_loss ? std::nullopt : std::optional(key.call));
  return rows.empty() ? Cause() : rounded_exponentials(e, head->key, rows);
}

Cause cause_in_split_loss(const Evidence& e) {
  constexpr double kLeast = 1e-4, kNear = 1e-3;  // of the loss, and of what it is off by
  const View* const bad =
      e.views.empty() || !is_named_loss(role_of(e.wanted.key)) ? nullptr : e.first_bad_view();
  if (bad == nullptr || e.actual.mesh.degree(Axis::kTp) == 1) return {};
  if (!are_few_logits(e, labels_of_step(e))) return {};
  const std::vector<RunOfTokens> tokens = runs_of_tokens(e, 1);
  const double share = tokens.empty() ? 0 : share_of_mean(e, tokens).value_or(0);  // no smoothing
  const std::vector<RunOfLosses> runs = runs_of_losses(e, share);
  if (runs.empty()) return {};
  const auto first = bad->box.global_offset.empty()
                         ? std::size_t{0}
                         : static_cast<std::size_t>(bad->box.global_offset[0]);
  const Values seen = bad->actual.flattened(), wanted = bad->expected.flattened();
  for (std::size_t way = 0; way < std::size(kSplitLosses); ++way) {
    bool fits = true, is_off = false;
    for (std::size_t i = 0; fits && i < seen.flat().size(); ++i) {
      const RunOfLosses& run = runs.at(first + i);
      const double right = wanted.flat()[i], off = seen.flat()[i] - right;
      fits = run.count > 0 && is_near(run.right / run.count, right, kLeast);
      const double made = (run.wrong[way] - run.right) / run.count;
      const bool is_clear = std::fabs(made) > kLeast * std::fabs(right);
      is_off = is_off || is_clear;
      fits = fits && std::fabs(off - made) <= kNear * std::fabs(made) + 1e-6 * std::fabs(right);
    }
    if (fits && is_off) return make_cause(kSplitLosses[way].cause);
  }
  return {};
}

}  // namespace isoshard::detail
