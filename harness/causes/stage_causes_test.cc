// SPDX-License-Identifier: Apache-2.0
/// Causes between stages of a pipeline, of which rank 0 has the first layer and rank 1 the second;
/// and in the scores of an attention.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "harness/judge/judge.h"
#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

using Named = std::pair<std::string, at::Tensor>;

// Rank r of pp has the tensors of stage r.
Body staged(const std::vector<std::vector<Named>>& stages) {
  return [=](Sink& sink, int rank) {
    for (std::size_t stage = 0; stage < stages.size(); ++stage) {
      if (rank >= 0 && std::cmp_not_equal(rank, stage)) continue;
      for (const auto& [name, value] : stages[stage]) {
        Layout layout = layout_of(value.sizes().vec());
        layout.placements = {only_at(Axis::kPp, static_cast<int>(stage))};
        sink.on_record(site(RecordKind::kActivation, name, layout), value);
      }
    }
  };
}

Body whole(const std::vector<Named>& tensors) {
  return [=](Sink& sink, int) {
    for (const auto& [name, value] : tensors)
      sink.on_record(site(RecordKind::kActivation, name, layout_of(value.sizes().vec())), value);
  };
}

std::string diagnosis_on(const MeshShape& mesh, const Body& right, const Body& wrong) {
  const Reference reference = synthetic::reference(right);
  JudgePolicy options;
  options.rtol = 1e-6;
  const Verdict verdict = judge(reference, run(mesh, &reference, wrong), options);
  EXPECT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  return verdict.findings.empty() ? "no finding" : verdict.findings[0].diagnosis;
}

TEST(StageCauses, WhatWasReceivedIsNotWhatWasSent) {
  const MeshShape mesh({{Axis::kPp, 2}});
  const at::Tensor first = values({2, 4, 3}, 1), norm = values({2, 4, 3}, 2),
                   second = values({2, 4, 3}, 3), other = values({2, 4, 3}, 4);
  const std::vector<Named> all = {
      {"layers.0", first}, {"layers.1.norm", norm}, {"layers.1", second}};

  const std::string told = diagnosis_on(
      mesh, whole(all),
      staged({{{"layers.0", first}}, {{"layers.1.norm", other}, {"layers.1", other}}}));
  EXPECT_THAT(told, HasSubstr("pp rank 1 received something other than what pp rank 0 made"));
  EXPECT_THAT(told, HasSubstr("layers.0"));
  EXPECT_THAT(
      diagnosis_on(mesh, whole(all),
                   staged({{{"layers.0", first}}, {{"layers.1.norm", norm}, {"layers.1", other}}})),
      Not(HasSubstr("received")))
      << "the stage's first tensor is right";
  EXPECT_THAT(diagnosis_on(
                  mesh, whole(all),
                  staged({{{"layers.0", other}}, {{"layers.1.norm", other}, {"layers.1", other}}})),
              Not(HasSubstr("received")))
      << "what was sent is wrong already";
}

// Causal attention of q, k and v [B,N,S,D] as [B,S,N D].
at::Tensor attended(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double factor) {
  const at::Tensor scores = at::matmul(q, k.transpose(2, 3)) * (factor / std::sqrt(q.size(3)));
  const at::Tensor later = at::ones({q.size(2), q.size(2)}, q.options().dtype(at::kBool)).triu(1);
  return at::matmul(at::softmax(scores.masked_fill(later, -INFINITY), -1), v)
      .transpose(1, 2)
      .contiguous()
      .flatten(2);
}

TEST(ScoreCauses, AMultipleOfTheScoresIsNamed) {
  const MeshShape one({{Axis::kDp, 1}});
  const at::Tensor q = values({2, 4, 6, 8}, 1), k = values({2, 2, 6, 8}, 2),
                   v = values({2, 2, 6, 8}, 3);
  const auto repeated = [](const at::Tensor& x) { return x.repeat_interleave(2, 1); };
  const auto with_core = [&](const at::Tensor& core) {
    return whole({{"attn.q_rope", q},
                  {"attn.k_rope", k},
                  {"attn.v_proj", v.transpose(1, 2).contiguous().flatten(2)},
                  {"attn.core", core}});
  };
  const auto core = [&](double factor) { return attended(q, repeated(k), repeated(v), factor); };

  EXPECT_THAT(diagnosis_on(one, with_core(core(1)), with_core(core(3))),
              HasSubstr("attention scores scale 3;"));
  EXPECT_THAT(diagnosis_on(one, with_core(core(1)), with_core(core(std::sqrt(8.0)))),
              HasSubstr("sqrt(head size)"));
  EXPECT_THAT(diagnosis_on(one, with_core(core(1)), with_core(values({2, 6, 32}, 9))),
              Not(HasSubstr("scores")));
}

TEST(ScoreCauses, ARootOfADegreeIsNamed) {
  const MeshShape three({{Axis::kTp, 3}});
  const at::Tensor q = values({2, 4, 6, 8}, 1), k = values({2, 4, 6, 8}, 2),
                   v = values({2, 4, 6, 8}, 3);
  const auto told = [&](double factor) {
    const auto body = [&](double own) {
      return whole({{"attn.q_rope", q},
                    {"attn.k_rope", k},
                    {"attn.v_proj", v.transpose(1, 2).contiguous().flatten(2)},
                    {"attn.core", attended(q, k, v, own)}});
    };
    return diagnosis_on(three, body(1), body(factor));
  };

  EXPECT_THAT(told(std::sqrt(3.0)), HasSubstr("attention scores scale 1.732 = sqrt(tp);"));
  EXPECT_THAT(told(1.7), Not(HasSubstr("sqrt")));
}

// As `attended`, but a query sees `ahead` tokens behind its own; a blind one sees all alike.
at::Tensor attended_ahead(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          std::int64_t ahead) {
  const at::Tensor scores = at::matmul(q, k.transpose(2, 3)) / std::sqrt(q.size(3));
  const at::Tensor hidden =
      at::ones({q.size(2), q.size(2)}, q.options().dtype(at::kBool)).triu(1 + ahead);
  return at::matmul(at::softmax(scores.masked_fill(hidden, -1e30), -1), v)
      .transpose(1, 2)
      .contiguous()
      .flatten(2);
}

TEST(ScoreCauses, ACausalMaskThatIsOffIsTold) {
  const MeshShape two({{Axis::kCp, 2}});
  const at::Tensor q = values({2, 2, 8, 8}, 1), k = values({2, 2, 8, 8}, 2),
                   v = values({2, 2, 8, 8}, 3);
  const auto told = [&](const at::Tensor& core) {
    const auto body = [&](const at::Tensor& own) {
      return whole({{"attn.q_rope", q},
                    {"attn.k_rope", k},
                    {"attn.v_proj", v.transpose(1, 2).contiguous().flatten(2)},
                    {"attn.core", own}});
    };
    return diagnosis_on(two, body(attended(q, k, v, 1)), body(core));
  };

  EXPECT_THAT(told(attended_ahead(q, k, v, 1)),
              HasSubstr("the causal mask is off: each query sees the token after its own, too"));
  EXPECT_THAT(told(attended_ahead(q, k, v, -1)), HasSubstr("no query sees its own token"));
  EXPECT_THAT(told(attended_ahead(q, k, v, 7)), HasSubstr("each query sees all tokens"));
  EXPECT_THAT(told(attended_ahead(q, k, v, 3)), Not(HasSubstr("mask")));
  EXPECT_THAT(told(attended_ahead(q, k, v, 1).index_fill(2, at::zeros({1}, at::kLong), 0.25)),
              Not(HasSubstr("mask")))
      << "one feature of all tokens is something else";
}

TEST(ScoreCauses, KeysOfRanksInAnotherOrderAreNamed) {
  const MeshShape two({{Axis::kCp, 2}});
  const at::Tensor q = values({2, 2, 8, 8}, 1), k = values({2, 2, 8, 8}, 2),
                   v = values({2, 2, 8, 8}, 3);
  const auto with_core = [&](const at::Tensor& core) {
    return whole({{"attn.q_rope", q},
                  {"attn.k_rope", k},
                  {"attn.v_proj", v.transpose(1, 2).contiguous().flatten(2)},
                  {"attn.core", core}});
  };
  const auto told = [&](const at::Tensor& core) {
    return diagnosis_on(two, with_core(attended(q, k, v, 1)), with_core(core));
  };
  // in the order of ranks, each with its head and its tail
  const auto by_rank = [](const at::Tensor& x) {
    const std::vector<at::Tensor> chunks = x.chunk(4, 2);
    return at::cat({chunks[0], chunks[3], chunks[1], chunks[2]}, 2);
  };
  const std::string wrong = " of cp ranks come together in the wrong order";

  EXPECT_THAT(told(attended(q, by_rank(k), by_rank(v), 1)),
              AllOf(HasSubstr("keys and values" + wrong), HasSubstr("stand as 0, 3, 1, 2")));
  EXPECT_THAT(told(attended(q, k, v.roll(4, 2), 1)),
              AllOf(HasSubstr("values" + wrong), HasSubstr("stand as 2, 3, 0, 1")));
  EXPECT_THAT(told(attended(q, k.flip(2), v.flip(2), 1)), Not(HasSubstr("order")))
      << "tokens are turned, not chunks";
  EXPECT_THAT(
      told(attended(q, by_rank(k), by_rank(v), 1).index_fill(2, at::zeros({1}, at::kLong), 0.25)),
      Not(HasSubstr("order")))
      << "one feature of all tokens is something else";
}

// Rank 0 has the first half of the sequence; `change` makes each rank's gradient from the whole one
// and from what its own queries give.
TEST(ScoreCauses, KeysThatOnlyOwnQueriesGiveAGradientAreTold) {
  const MeshShape two({{Axis::kCp, 2}});
  const at::Tensor q = values({2, 4, 8, 8}, 1).set_requires_grad(true),
                   k = values({2, 2, 8, 8}, 2).set_requires_grad(true),
                   v = values({2, 2, 8, 8}, 3).set_requires_grad(true),
                   dcore = values({2, 8, 32}, 4);
  const at::Tensor core = attended(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), 1);
  const auto tokens = [](const at::Tensor& x) {
    return x.detach().transpose(1, 2).contiguous().flatten(2);
  };
  const auto gradient = [&](const at::Tensor& of, int rank) {
    at::Tensor own = dcore.clone();
    if (rank >= 0) own.narrow(1, 4 * (1 - rank), 4).zero_();
    return torch::autograd::grad({core}, {of}, {own}, /*retain_graph=*/true)[0];
  };
  const auto told = [&](bool is_of_values, const std::function<at::Tensor(int rank)>& held) {
    const auto body = [&](bool is_whole) {
      return Body([=](Sink& sink, int rank) {
        const auto record = [&](RecordKind kind, const std::string& name, std::int64_t dim,
                                const at::Tensor& value) {
          Layout layout = layout_of(value.sizes().vec());
          if (!is_whole) layout = layout_of(value.sizes().vec(), {shard(Axis::kCp, dim)});
          sink.on_record(site(kind, name, layout),
                         is_whole ? value : value.narrow(dim, 4 * rank, 4).contiguous());
        };
        record(RecordKind::kActivation, "attn.q_rope", 2, q.detach());
        record(RecordKind::kActivation, "attn.k_rope", 2, k.detach());
        record(RecordKind::kActivation, "attn.v_proj", 1, tokens(v));
        record(RecordKind::kActivation, "attn.core", 1, core.detach());
        record(RecordKind::kActivationGrad, "attn.core", 1, dcore);
        const at::Tensor own = held(is_whole ? -1 : rank);
        record(RecordKind::kActivationGrad, is_of_values ? "attn.v_proj" : "attn.k_rope",
               is_of_values ? 1 : 2, is_of_values ? tokens(own) : own);
      });
    };
    return diagnosis_on(two, body(true), body(false));
  };
  const std::string missing = "the sum over cp is missing";

  EXPECT_THAT(told(true, [&](int rank) { return gradient(v, rank); }), HasSubstr(missing));
  EXPECT_THAT(told(false, [&](int rank) { return gradient(k, rank); }), HasSubstr(missing));
  EXPECT_THAT(told(true, [&](int rank) { return gradient(v, rank) * (rank < 0 ? 1 : 1.05); }),
              Not(HasSubstr(missing)));
  EXPECT_THAT(told(false, [&](int rank) { return gradient(k, rank < 0 ? -1 : 1 - rank); }),
              Not(HasSubstr(missing)))
      << "queries of the other rank";
}

TEST(ScoreCauses, FusedQueriesKeysAndValuesAreTakenApart) {
  const MeshShape one({{Axis::kDp, 1}});
  const at::Tensor fused = values({2, 6, 48}, 5);
  const auto part = [&](int i) {
    return fused.narrow(2, 16 * i, 16).view({2, 6, 2, 8}).transpose(1, 2);
  };
  const auto with_core = [&](double factor) {
    return whole(
        {{"attn.c_attn", fused}, {"attn.core", attended(part(0), part(1), part(2), factor)}});
  };

  EXPECT_THAT(diagnosis_on(one, with_core(1), with_core(0.5)),
              HasSubstr("attention scores scale 0.5;"));
}

}  // namespace
}  // namespace isoshard
