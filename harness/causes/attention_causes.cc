// SPDX-License-Identifier: Apache-2.0
// What goes wrong inside of an attention, which is computed again from the reference's queries,
// keys and values: their order, their scale, their mask, whose gradients they get.
#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "harness/causes/run_causes.h"

namespace isoshard::detail {
namespace {

struct Attention {
  std::int64_t batch = 0, heads = 0, groups = 1, length = 0, dim = 0;
  Values q, k, v;  ///< [B,N,S,D], and [B,N / groups,S,D]
  /// Of how many ranks each has its share of the heads, and takes their keys in turn (0: each kv
  /// head serves the heads that follow each other, as it should).
  std::int64_t in_turn_on = 0;
  std::int64_t ahead =
      0;  ///< how many tokens behind its own a query sees; below 0: fewer of its own
};

/// [B,S,N D] as [B,N,S,D].
Values by_heads(const Values& x_BSH, std::int64_t heads) {
  std::vector<Values> samples;
  for (std::int64_t b = 0; b < x_BSH.size(0); ++b) {
    samples.push_back(x_BSH.narrow(0, b, 1)
                          .contiguous()
                          .reshape({x_BSH.size(1), heads, x_BSH.size(2) / heads})
                          .to_front(1)
                          .contiguous()
                          .reshape({1, heads, x_BSH.size(1), x_BSH.size(2) / heads}));
  }
  return concatenated(samples);
}

/// [B,N,S,D] as [B,S,N D].
Values by_tokens(const Values& x_BNSD) {
  std::vector<Values> samples;
  for (std::int64_t b = 0; b < x_BNSD.size(0); ++b) {
    samples.push_back(x_BNSD.narrow(0, b, 1)
                          .contiguous()
                          .reshape({x_BNSD.size(1), x_BNSD.size(2), x_BNSD.size(3)})
                          .to_front(1)
                          .contiguous()
                          .reshape({1, x_BNSD.size(2), x_BNSD.size(1) * x_BNSD.size(3)}));
  }
  return concatenated(samples);
}

std::int64_t kv_head_of(const Attention& of, std::int64_t head) {
  if (of.in_turn_on == 0) return head / of.groups;
  const std::int64_t own_heads = of.heads / of.in_turn_on,
                     own_kv_heads = of.heads / of.groups / of.in_turn_on;
  return head / own_heads * own_kv_heads + head % own_heads % own_kv_heads;
}

/// [B,S,N D]: causal attention whose scores are multiplied with `factor` besides 1 / sqrt(D).
Values attended(const Attention& of, double factor) {
  const double scale = factor / std::sqrt(static_cast<double>(of.dim));
  std::vector<double> out(static_cast<std::size_t>(of.batch * of.length * of.heads * of.dim), 0);
  std::vector<double> weights(static_cast<std::size_t>(of.length));
  const auto q = of.q.flat(), k = of.k.flat(), v = of.v.flat();
  const auto row = [&](std::int64_t heads, std::int64_t b, std::int64_t head, std::int64_t s) {
    return static_cast<std::size_t>(((b * heads + head) * of.length + s) * of.dim);
  };
  const auto dim = static_cast<std::size_t>(of.dim);
  for (std::int64_t b = 0; b < of.batch; ++b) {
    for (std::int64_t head = 0; head < of.heads; ++head) {
      const std::int64_t kv_heads = of.heads / of.groups;
      const std::int64_t kv_head = kv_head_of(of, head);
      for (std::int64_t s = 0; s < of.length; ++s) {
        const std::size_t at = row(of.heads, b, head, s);
        // who sees nothing sees all alike: the lowest number takes up every score
        const bool is_blind = s + of.ahead < 0;
        const std::int64_t last = is_blind ? of.length - 1 : std::min(of.length - 1, s + of.ahead);
        double largest = -INFINITY, sum = 0;
        for (std::int64_t t = 0; t <= last; ++t) {
          const std::size_t key = row(kv_heads, b, kv_head, t);
          double score = 0;
          for (std::size_t d = 0; d < dim && !is_blind; ++d) score += q[at + d] * k[key + d];
          weights[static_cast<std::size_t>(t)] = score * scale;
          largest = std::max(largest, score * scale);
        }
        for (std::int64_t t = 0; t <= last; ++t) {
          double& weight = weights[static_cast<std::size_t>(t)];
          weight = std::exp(weight - largest);
          sum += weight;
        }
        const auto place =
            static_cast<std::size_t>(((b * of.length + s) * of.heads + head) * of.dim);
        for (std::int64_t t = 0; t <= last; ++t) {
          const std::size_t value = row(kv_heads, b, kv_head, t);
          const double share = weights[static_cast<std::size_t>(t)] / sum;
          for (std::size_t d = 0; d < dim; ++d) out[place + d] += share * v[value + d];
        }
      }
    }
  }
  return {{of.batch, of.length, of.heads * of.dim}, std::move(out)};
}

/// How far the reference's core is from what the attention gives; infinite if it is too large.
double misfit(const Values& core, const Attention& candidate) {
  constexpr std::int64_t kMostProducts = 4'000'000;
  if (candidate.batch * candidate.heads * candidate.length * candidate.length * candidate.dim >
      kMostProducts)
    return INFINITY;
  return distance(attended(candidate, 1), core);
}

/// Queries, keys and values [B,S,H] of each number of heads that there may be; empty if it is not
/// recorded like that.
std::vector<Attention> attentions_of(const Shape& shape, const Values& q, const Values& k,
                                     const Values& v) {
  std::vector<Attention> candidates;
  for (const Values* const part : {&q, &k, &v}) {
    if (!part->defined() || part->shape() != shape) return candidates;
  }
  for (std::int64_t heads = 1; heads <= 64 && heads <= shape[2]; ++heads) {
    if (shape[2] % heads == 0)
      candidates.push_back({shape[0], heads, 1, shape[1], shape[2] / heads, by_heads(q, heads),
                            by_heads(k, heads), by_heads(v, heads)});
  }
  return candidates;
}

/// The reference's queries, keys and values of the attention of a module in the pass of `e.wanted`:
/// of the layouts that its records may have, the one that gives the reference's core.
std::optional<Attention> attention_in(const Evidence& e, const std::string& module) {
  const auto value = [&](const std::string& name) -> Values {
    RecordKey key = e.wanted.key;
    key.kind = RecordKind::kActivation;
    key.name = module + name;
    return e.reference.find(key) == nullptr ? Values() : e.reference_value(key);
  };
  const Values core = value(".core");
  if (!core.defined() || core.dim() != 3) return std::nullopt;
  const Shape& shape = core.shape();
  const Values q = value(".q_rope"), k = value(".k_rope"), v = value(".v_proj"),
               fused = value(".c_attn");
  std::vector<Attention> candidates;
  if (q.defined() && k.defined() && v.defined() && q.dim() == 4 && k.dim() == 4 && v.dim() == 3 &&
      k.size(1) != 0 && v.size(2) == k.size(1) * k.size(3)) {
    candidates.push_back({shape[0], q.size(1), q.size(1) / k.size(1), shape[1], q.size(3),
                          q.contiguous(), k.contiguous(), by_heads(v, k.size(1))});
  } else if (fused.defined() && fused.dim() == 3 && fused.size(2) == 3 * shape[2]) {
    const auto part = [&](std::int64_t i) {
      return fused.narrow(2, i * shape[2], shape[2]).contiguous();
    };
    candidates = attentions_of(shape, part(0), part(1), part(2));
  } else {
    candidates = attentions_of(shape, value(".c_attn.q"), value(".c_attn.k"), value(".c_attn.v"));
  }
  std::optional<Attention> best;
  // 16-bit cores are sums of rounded weights
  double least = (e.is_wide() ? 1e-3 : 1.6e-2) * norm_of(core);
  for (const Attention& candidate : candidates) {
    const double distance = misfit(core, candidate);
    if (distance >= least) continue;
    least = distance;
    best = candidate;
  }
  return best;
}

/// Of the attention whose core is `e.wanted`.
std::optional<Attention> attention_of(const Evidence& e) {
  return attention_in(
      e, e.wanted.key.name.substr(0, e.wanted.key.name.size() - std::string(".core").size()));
}

/// The gradient of keys (or of values) [B,K,S,D] as far as it comes from some of the queries.
/// `dcore_BSH`   of the attention's output.
Values gradient_of_keys(const Attention& of, const Values& dcore_BSH,
                        const std::vector<bool>& has_query, bool is_of_values) {
  const std::int64_t kv_heads = of.heads / of.groups;
  const double scale = 1 / std::sqrt(static_cast<double>(of.dim));
  const auto dim = static_cast<std::size_t>(of.dim);
  std::vector<double> out(static_cast<std::size_t>(of.batch * kv_heads * of.length * of.dim), 0);
  const auto q = of.q.flat(), k = of.k.flat(), v = of.v.flat(), dcore = dcore_BSH.flat();
  const auto row = [&](std::int64_t heads, std::int64_t b, std::int64_t head, std::int64_t s) {
    return static_cast<std::size_t>(((b * heads + head) * of.length + s) * of.dim);
  };
  const auto dot_at = [dim](std::span<const double> a, std::size_t at, std::span<const double> b,
                            std::size_t to) {
    double sum = 0;
    for (std::size_t d = 0; d < dim; ++d) sum += a[at + d] * b[to + d];
    return sum;
  };
  for (std::int64_t b = 0; b < of.batch; ++b) {
    for (std::int64_t head = 0; head < of.heads; ++head) {
      const std::int64_t kv_head = kv_head_of(of, head);
      for (std::int64_t s = 0; s < of.length; ++s) {
        if (!has_query[static_cast<std::size_t>(s)]) continue;
        const std::size_t query = row(of.heads, b, head, s);
        const auto place =
            static_cast<std::size_t>(((b * of.length + s) * of.heads + head) * of.dim);
        std::vector<double> shares, slopes;
        double largest = -INFINITY, sum = 0, mean = 0;
        for (std::int64_t t = 0; t <= s; ++t) {
          const std::size_t key = row(kv_heads, b, kv_head, t);
          shares.push_back(scale * dot_at(q, query, k, key));
          slopes.push_back(dot_at(dcore, place, v, key));
          largest = std::max(largest, shares.back());
        }
        for (double& share : shares) sum += share = std::exp(share - largest);
        for (std::size_t t = 0; t < shares.size(); ++t) mean += (shares[t] /= sum) * slopes[t];
        for (std::size_t t = 0; t < shares.size(); ++t) {
          const std::size_t key = row(kv_heads, b, kv_head, static_cast<std::int64_t>(t));
          const double weight = is_of_values ? shares[t] : shares[t] * (slopes[t] - mean) * scale;
          for (std::size_t d = 0; d < dim; ++d)
            out[key + d] += weight * (is_of_values ? dcore[place + d] : q[query + d]);
        }
      }
    }
  }
  return {{of.batch, kv_heads, of.length, of.dim}, std::move(out)};
}

/// Which places of the sequence a rank has of a core; empty if that is not told.
std::vector<bool> queries_of(const Evidence& e, int rank, const RecordKey& core,
                             std::int64_t length) {
  const auto trace = std::ranges::find(e.actual.ranks, rank, &RankTrace::rank);
  const Record* record = trace == e.actual.ranks.end() ? nullptr : trace->find(core);
  if (record == nullptr || record->parts.empty()) return {};
  std::vector<bool> has(static_cast<std::size_t>(length), false);
  for (const PartStats& part : record->parts) {
    if (part.box.size.size() != 3 || part.box.global_offset[1] + part.box.size[1] > length)
      return {};
    for (std::int64_t s = 0; s < part.box.size[1]; ++s)
      has[static_cast<std::size_t>(part.box.global_offset[1] + s)] = true;
  }
  return has;
}

using Order = std::vector<std::int64_t>;

/// Orders in which the 2 cp chunks of a sequence may come together where ranks have exchanged them:
/// the chunk that stands at each place. A rank has chunks r and 2 cp - 1 - r, or two that follow
/// each other.
std::vector<Order> orders_of_chunks(int cp) {
  const std::int64_t chunks = 2 * cp;
  Order in_turn, sorted(static_cast<std::size_t>(chunks));
  for (std::int64_t r = 0; r < cp; ++r) in_turn.insert(in_turn.end(), {r, chunks - 1 - r});
  // head and tail where the parts of ranks follow each other, and what undoes that once too often
  for (std::size_t i = 0; i < in_turn.size(); ++i)
    sorted[static_cast<std::size_t>(in_turn[i])] = static_cast<std::int64_t>(i);
  std::vector<Order> orders = {in_turn, sorted};
  const auto add = [&](const auto& rank_at) {
    Order parts, ends;
    for (std::int64_t r = 0; r < cp; ++r) {
      const std::int64_t from = rank_at(r);
      parts.insert(parts.end(), {2 * from, 2 * from + 1});
      ends.push_back(from);
    }
    for (std::int64_t r = cp - 1; r >= 0; --r) ends.push_back(chunks - 1 - rank_at(r));
    orders.insert(orders.end(), {parts, ends});
  };
  for (std::int64_t by = 1; by < cp; ++by) add([&](std::int64_t r) { return (r + by) % cp; });
  for (std::int64_t a = 0; a < cp; ++a) {
    for (std::int64_t b = a + 1; b < cp; ++b)
      add([&](std::int64_t r) { return r == a ? b : r == b ? a : r; });
  }
  return orders;
}

bool is_near_expected(const Evidence& e, const Values& values, const View& view) {
  return distance(values, view.expected) <= 4 * e.tolerance() * norm_of(view.expected);
}

/// Whether what attention gives in another way explains a box. One that is near the reference needs
/// a candidate that is near, too.
bool explains_box(const Evidence& e, const Values& whole, const View& view) {
  const Values own = whole.cut(view.box.global_offset, view.box.size);
  return is_near_expected(e, view.actual, view) ? is_near_expected(e, own, view)
                                                : e.explains_each(own, view);
}

/// The same for all wrong boxes, of which at least one must be far from the reference.
bool explains_boxes(const Evidence& e, const Values& whole, const std::vector<View>& boxes) {
  return !std::ranges::all_of(boxes, [&](const View& view) {
    return is_near_expected(e, view.actual, view);
  }) && std::ranges::all_of(boxes, [&](const View& view) { return explains_box(e, whole, view); });
}

/// What wrong ranks hold, a view each box. Empty if bytes of one of them are not there.
std::vector<View> bad_boxes(const Evidence& e) {
  std::vector<View> views;
  for (const int rank : e.bad_ranks()) {
    const Held* const held = e.held_by(rank);
    if (held == nullptr) return {};
    const std::vector<std::pair<Box, Values>> boxes = e.own_boxes(*held->rank, *held->record);
    if (boxes.empty()) return {};
    for (const auto& [box, own] : boxes)
      views.push_back({rank, box, own, e.whole.cut(box.global_offset, box.size)});
  }
  return views;
}

Values reordered(const Values& x_BKSD, const Order& order) {
  const std::int64_t length = x_BKSD.size(2) / static_cast<std::int64_t>(order.size());
  std::vector<Values> chunks;
  for (const std::int64_t chunk : order)
    chunks.push_back(x_BKSD.narrow(2, chunk * length, length).contiguous());
  return concatenated(chunks, 2).contiguous();
}

}  // namespace

Cause cause_in_causal_mask(const Evidence& e) {
  if (!e.wanted.key.name.ends_with(".core") || e.wanted.layout.global_shape.size() != 3) return {};
  const std::vector<View> bad = bad_boxes(e);
  const std::optional<Attention> attention = bad.empty() ? std::nullopt : attention_of(e);
  if (!attention.has_value() || attention->length < 3) return {};
  for (const auto& [ahead, id] :
       {std::pair(std::int64_t{1}, CauseId::kCausalMaskShowsNextToken),
        std::pair(std::int64_t{-1}, CauseId::kCausalMaskHidesOwnToken),
        std::pair(attention->length - 1, CauseId::kCausalMaskShowsAllTokens)}) {
    Attention other = *attention;
    other.ahead = ahead;
    const Values core = attended(other, 1);
    if (explains_boxes(e, core, bad)) return make_cause(id, {e.on_bad_ranks()});
  }
  return {};
}

Cause cause_in_key_order(const Evidence& e) {
  const int cp = e.actual.mesh.degree(Axis::kCp);
  if (cp == 1 || !e.wanted.key.name.ends_with(".core") ||
      e.wanted.layout.global_shape.size() != 3 || e.wanted.layout.global_shape[1] % (2 * cp) != 0)
    return {};
  const std::vector<View> bad = bad_boxes(e);
  const std::optional<Attention> attention = bad.empty() ? std::nullopt : attention_of(e);
  if (!attention.has_value()) return {};
  // as many orders as this many products allow
  constexpr std::int64_t kMostSearched = std::int64_t{1} << 27;
  const std::int64_t products =
      attention->batch * attention->heads * attention->length * attention->length * attention->dim;
  std::vector<Order> orders = orders_of_chunks(cp);
  const std::int64_t most = kMostSearched / (3 * std::max<std::int64_t>(products, 1));
  if (most < static_cast<std::int64_t>(orders.size()))
    orders.resize(static_cast<std::size_t>(most));
  for (const Order& order : orders) {
    for (const auto& [tensors, has_keys, has_values] :
         {std::tuple("keys and values", true, true), std::tuple("keys", true, false),
          std::tuple("values", false, true)}) {
      Attention other = *attention;
      if (has_keys) other.k = reordered(other.k, order);
      if (has_values) other.v = reordered(other.v, order);
      const Values core = attended(other, 1);
      const bool fits = explains_boxes(e, core, bad);
      if (fits)
        return make_cause(
            CauseId::kCpChunksInWrongOrder,
            {{"tensors", tensors}, {"chunks", order.size()}, {"order", order}, e.on_bad_ranks()});
    }
  }
  return {};
}

Cause cause_own_queries(const Evidence& e) {
  const RecordKey& key = e.wanted.key;
  const bool is_of_values = key.name.ends_with(".v_proj");
  if (e.actual.mesh.degree(Axis::kCp) == 1 || (!is_of_values && !key.name.ends_with(".k_rope")))
    return {};
  const std::string module = key.name.substr(0, key.name.rfind('.'));
  RecordKey core = key;
  core.name = module + ".core";
  const Record* gradient = e.reference.find(core);
  const std::vector<View> bad = bad_boxes(e);
  const auto attention =
      bad.empty() || gradient == nullptr ? std::nullopt : attention_in(e, module);
  if (!attention.has_value()) return {};
  const Values dcore = (e.reference_value(core) / gradient->grad_scale).contiguous();
  core.kind = RecordKind::kActivation;
  std::map<int, Values> of_rank;  // a rank may have two boxes, of head and tail
  for (const View& view : bad) {
    const auto [known, is_new] = of_rank.try_emplace(view.rank);
    Values& whole = known->second;
    if (is_new) {
      const std::vector<bool> own = queries_of(e, view.rank, core, attention->length);
      if (own.empty()) return {};
      whole = gradient_of_keys(*attention, dcore, own, is_of_values);
      if (is_of_values) whole = by_tokens(whole);
    }
    if (whole.shape() != e.whole.shape() || !explains_boxes(e, whole, {view})) return {};
  }
  return make_cause(CauseId::kOwnQueriesOnly, {e.on_bad_ranks()});
}

Cause cause_in_scores(const Evidence& e) {
  const View* const bad = e.views.empty() ? nullptr : e.first_bad_view();
  if (bad == nullptr || e.wanted.key.kind != RecordKind::kActivation ||
      !e.wanted.key.name.ends_with(".core") || e.wanted.layout.global_shape.size() != 3)
    return {};
  const std::optional<Attention> attention = attention_of(e);
  if (!attention.has_value()) return {};
  const double error = distance(bad->actual, bad->expected);
  for (const std::int64_t ranks :
       {std::int64_t{1}, std::int64_t{e.actual.mesh.degree(Axis::kTp)}}) {
    const std::int64_t kv_heads = attention->heads / attention->groups;
    if (attention->groups == 1 || kv_heads % ranks != 0 || kv_heads == ranks) continue;
    Attention tiled = *attention;
    tiled.in_turn_on = ranks;
    if (e.explains_each(attended(tiled, 1).cut(bad->box.global_offset, bad->box.size), *bad))
      return make_cause(CauseId::kKvHeadsInTurn,
                        {{"kv_heads", kv_heads / ranks}, {"heads_of_kv_head", attention->groups}});
  }
  struct Factor {
    double value;
    std::string inverse, number;  ///< of a root
  };
  std::vector<Factor> factors;
  const auto add_root = [&](std::int64_t number, std::string_view name) {
    const double root = std::sqrt(static_cast<double>(number));
    if (number < 2) return;
    factors.push_back({root, "", std::string(name)});
    factors.push_back({1 / root, "1/", std::string(name)});
  };
  add_root(attention->dim, "head size");
  // heads are shared out over tp: of axes of one degree it is the likely one
  const int tp = e.actual.mesh.degree(Axis::kTp);
  add_root(tp, name_of(Axis::kTp));
  for (const AxisDegree& axis : e.actual.mesh.axes()) {
    if (axis.degree != tp) add_root(axis.degree, name_of(axis.axis));
  }
  add_root(attention->groups, "query heads of a kv head");
  add_root(attention->heads, "heads");
  const std::size_t num_roots = factors.size();
  constexpr int kMostLayers = 12;
  for (int a = 1; a <= kMostLayers; ++a) {
    for (int b = 1; b <= kMostLayers; ++b) {
      if (a != b) factors.push_back({static_cast<double>(a) / b, "", ""});
    }
  }
  // in 16 bits several are near: the nearest counts, of equally near ones the first
  std::optional<std::size_t> nearest;
  double least = error;
  for (std::size_t i = 0; i < factors.size(); ++i) {
    const Values candidate =
        attended(*attention, factors[i].value).cut(bad->box.global_offset, bad->box.size);
    const double left = distance(candidate, bad->actual);
    if (!(left < 0.99 * least) || !e.explains(candidate, bad->actual, error)) continue;
    least = left;
    nearest = i;
  }
  if (!nearest.has_value()) return {};
  const Factor& factor = factors[*nearest];
  if (*nearest >= num_roots)
    return make_cause(CauseId::kScoresScaledByRatio, {{"scale", factor.value}});
  return make_cause(
      CauseId::kScoresScaledByRoot,
      {{"scale", factor.value}, {"inverse", factor.inverse}, {"number", factor.number}});
}

}  // namespace isoshard::detail
