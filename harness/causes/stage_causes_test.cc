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
#include "harness/testing/is_cause.h"
#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;

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

Cause cause_on(const MeshShape& mesh, const Body& right, const Body& wrong) {
  const Reference reference = synthetic::reference(right);
  JudgePolicy options;
  options.rtol = 1e-6;
  const Verdict verdict = judge(reference, run(mesh, &reference, wrong), options);
  EXPECT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  return verdict.findings.at(0).cause;
}

TEST(StageCauses, WhatWasReceivedIsNotWhatWasSent) {
  const MeshShape mesh({{Axis::kPp, 2}});
  const at::Tensor first = values({2, 4, 3}, 1), norm = values({2, 4, 3}, 2),
                   second = values({2, 4, 3}, 3), other = values({2, 4, 3}, 4);
  const std::vector<Named> all = {
      {"layers.0", first}, {"layers.1.norm", norm}, {"layers.1", second}};

  const Cause told =
      cause_on(mesh, whole(all),
               staged({{{"layers.0", first}}, {{"layers.1.norm", other}, {"layers.1", other}}}));
  EXPECT_THAT(told,
              IsCause(CauseId::kReceivedOther,
                      {{"pp_rank", 1},
                       {"other_pp_rank", 0},
                       {"last_right", describe({0, RecordKind::kActivation, "layers.0", 0})}}));
  EXPECT_THAT(
      cause_on(mesh, whole(all),
               staged({{{"layers.0", first}}, {{"layers.1.norm", norm}, {"layers.1", other}}})),
      IsNoCause())
      << "the stage's first tensor is right";
  EXPECT_THAT(
      cause_on(mesh, whole(all),
               staged({{{"layers.0", other}}, {{"layers.1.norm", other}, {"layers.1", other}}})),
      IsNoCause())
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

  EXPECT_THAT(cause_on(one, with_core(core(1)), with_core(core(3))),
              IsCause(CauseId::kScoresScaledByRatio, {{"scale", 3}}));
  EXPECT_THAT(cause_on(one, with_core(core(1)), with_core(core(std::sqrt(8.0)))),
              IsCause(CauseId::kScoresScaledByRoot,
                      {{"scale", 2.8284}, {"inverse", ""}, {"number", "head size"}}));
  EXPECT_THAT(cause_on(one, with_core(core(1)), with_core(values({2, 6, 32}, 9))), IsNoCause());
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
    return cause_on(three, body(1), body(factor));
  };

  EXPECT_THAT(told(std::sqrt(3.0)), IsCause(CauseId::kScoresScaledByRoot,
                                            {{"scale", 1.732}, {"inverse", ""}, {"number", "tp"}}));
  EXPECT_THAT(told(1.7), IsNoCause());
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
    return cause_on(two, body(attended(q, k, v, 1)), body(core));
  };

  EXPECT_THAT(told(attended_ahead(q, k, v, 1)), IsCause(CauseId::kCausalMaskShowsNextToken));
  EXPECT_THAT(told(attended_ahead(q, k, v, -1)), IsCause(CauseId::kCausalMaskHidesOwnToken));
  EXPECT_THAT(told(attended_ahead(q, k, v, 7)), IsCause(CauseId::kCausalMaskShowsAllTokens));
  EXPECT_THAT(told(attended_ahead(q, k, v, 3)), IsNoCause());
  EXPECT_THAT(told(attended_ahead(q, k, v, 1).index_fill(2, at::zeros({1}, at::kLong), 0.25)),
              IsNoCause())
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
    return cause_on(two, with_core(attended(q, k, v, 1)), with_core(core));
  };
  // in the order of ranks, each with its head and its tail
  const auto by_rank = [](const at::Tensor& x) {
    const std::vector<at::Tensor> chunks = x.chunk(4, 2);
    return at::cat({chunks[0], chunks[3], chunks[1], chunks[2]}, 2);
  };

  EXPECT_THAT(told(attended(q, by_rank(k), by_rank(v), 1)),
              IsCause(CauseId::kCpChunksInWrongOrder,
                      {{"tensors", "keys and values"}, {"order", std::vector{0, 3, 1, 2}}}));
  EXPECT_THAT(told(attended(q, k, v.roll(4, 2), 1)),
              IsCause(CauseId::kCpChunksInWrongOrder,
                      {{"tensors", "values"}, {"order", std::vector{2, 3, 0, 1}}}));
  EXPECT_THAT(told(attended(q, k.flip(2), v.flip(2), 1)), IsNoCause())
      << "tokens are turned, not chunks";
  EXPECT_THAT(
      told(attended(q, by_rank(k), by_rank(v), 1).index_fill(2, at::zeros({1}, at::kLong), 0.25)),
      IsNoCause())
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
    return cause_on(two, body(true), body(false));
  };

  EXPECT_THAT(told(true, [&](int rank) { return gradient(v, rank); }),
              IsCause(CauseId::kOwnQueriesOnly));
  EXPECT_THAT(told(false, [&](int rank) { return gradient(k, rank); }),
              IsCause(CauseId::kOwnQueriesOnly));
  EXPECT_THAT(told(true, [&](int rank) { return gradient(v, rank) * (rank < 0 ? 1 : 1.05); }),
              IsNoCause());
  EXPECT_THAT(told(false, [&](int rank) { return gradient(k, rank < 0 ? -1 : 1 - rank); }),
              IsNoCause())
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

  EXPECT_THAT(cause_on(one, with_core(1), with_core(0.5)),
              IsCause(CauseId::kScoresScaledByRatio, {{"scale", 0.5}}));
}

/// A norm of root mean squares [B,S,H] at the beginning of the second stage, in two micro-batches.
/// Backward of the first one reads `kept` of both inputs; what it gives goes to the first stage.
Cause backward_reads(const std::function<at::Tensor(at::Tensor own, at::Tensor other)>& kept) {
  const MeshShape mesh({{Axis::kPp, 2}});
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const at::Tensor weight = values({8}, 20, at::kDouble) + 2;
      const auto record = [&](RecordKind kind, int stage, const std::string& name,
                              const at::Tensor& value) {
        Layout layout = layout_of(value.sizes().vec());
        if (!whole) layout.placements = {only_at(Axis::kPp, stage)};
        if (whole || rank == stage) sink.on_record(site(kind, name, layout), value);
      };
      const auto root = [](const at::Tensor& x) {
        return at::rsqrt(x.square().mean(-1, true) + 1e-6);
      };
      std::vector<at::Tensor> inputs;
      for (int m = 0; m < 2; ++m) inputs.push_back(values({2, 4, 8}, m + 1, at::kDouble));
      record(RecordKind::kParam, 1, "layers.1.norm.weight", weight);
      for (const at::Tensor& x : inputs) {
        sink.on_record(site(RecordKind::kDataId, "sample_ids", layout_of({2})),
                       at::tensor({0, 1}, at::kLong));
        record(RecordKind::kActivation, 0, "layers.0", x);
        record(RecordKind::kActivation, 1, "layers.1.norm", x * root(x) * weight);
      }
      for (int m = 0; m < 2; ++m) {
        const at::Tensor g = values({2, 4, 8}, m + 5, at::kDouble),
                         besides = values({2, 4, 8}, m + 8, at::kDouble), r = root(inputs[m]);
        const at::Tensor x = whole || m == 1 ? inputs[m] : kept(inputs[0], inputs[1]);
        const at::Tensor of_x =
            g * weight * r - x * r.pow(3) * (g * weight * x).mean(-1, true) + besides;
        record(RecordKind::kActivationGrad, 1, "layers.1.norm", g);
        record(RecordKind::kActivationGrad, 0, "layers.0", of_x);
      }
    });
  };
  return cause_on(mesh, body(true), body(false));
}

TEST(StageCauses, AnInputThatIsOverwrittenBeforeItsBackwardIsTold) {
  EXPECT_THAT(
      backward_reads([](auto, auto other) { return other; }),
      IsCause(CauseId::kInputBufferReused, {{"pp_rank", 1}, {"read", 1}, {"micro_batch", 0}}));
  EXPECT_THAT(backward_reads([](auto own, auto) {
                return own + 0.5 * values({2, 4, 8}, 30, at::kDouble);
              }),
              IsCause(CauseId::kWrongBetweenStages,
                      {{"micro_batches", std::vector{0}}, {"pp_rank", 0}, {"other_pp_rank", 1}}));
}

/// Two linear modules that read one point, in two steps; backward of the second step reads `used`
/// in the place of the second module's weight.
Cause backward_uses(
    const std::function<at::Tensor(at::Tensor now, at::Tensor before, at::Tensor other)>& used) {
  const MeshShape mesh({{Axis::kDp, 2}});
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const auto record = [&](RecordKind kind, const std::string& name, const at::Tensor& value) {
        sink.on_record(site(kind, name, layout_of(value.sizes().vec())), value);
      };
      const auto weight = [](int number, int step) {
        return values({6, 8}, 3 * number + 10 * step + 1, at::kDouble);
      };
      // dp ranks hold three rows each, in one piece
      for (int number = 0; number < 3; ++number) {
        Layout layout = layout_of({6, 8});
        at::Tensor held = weight(number, 0);
        if (!whole) {
          layout.explicit_parts = true;
          layout.flat = {{0, 24 * rank, 24}};
          held = held.narrow(0, 3 * rank, 3).reshape({24});
        }
        sink.on_record(site(RecordKind::kParam, "m." + std::to_string(number) + ".weight", layout),
                       held);
      }
      for (int step = 0; step < 2; ++step) {
        if (step > 0) sink.begin_step(step);
        const at::Tensor x = values({2, 5, 8}, 40 + step, at::kDouble);
        record(RecordKind::kActivation, "m.norm", x);
        std::vector<at::Tensor> gradients;
        for (int number = 0; number < 2; ++number) {
          const std::string name = "m." + std::to_string(number);
          record(RecordKind::kActivation, name, at::matmul(x, weight(number, step).t()));
          gradients.push_back(values({2, 5, 6}, 50 + number + step, at::kDouble));
        }
        for (const int number : {1, 0})
          record(RecordKind::kActivationGrad, "m." + std::to_string(number),
                 gradients[static_cast<std::size_t>(number)]);
        const at::Tensor second = whole || step == 0
                                      ? weight(1, step)
                                      : used(weight(1, step), weight(1, step - 1), weight(2, step));
        record(RecordKind::kActivationGrad, "m.norm",
               at::matmul(gradients[0], weight(0, step)) + at::matmul(gradients[1], second));
        for (int number = 0; number < 3; ++number)
          record(RecordKind::kParam, "m." + std::to_string(number) + ".weight",
                 weight(number, step + 1));
      }
    });
  };
  return cause_on(mesh, body(true), body(false));
}

TEST(BackwardCauses, AWeightThatBackwardReadsOtherwiseIsTold) {
  const auto shards_swapped = [](const at::Tensor& now, auto, auto) {
    return at::cat({now.narrow(0, 3, 3), now.narrow(0, 0, 3)});
  };

  EXPECT_THAT(
      backward_uses([](auto, auto before, auto) { return before; }),
      IsCause(CauseId::kBackwardReadsEarlierWeight, {{"step", 0}, {"parameter", "m.1.weight"}}));
  EXPECT_THAT(backward_uses([](auto, auto, auto other) { return other; }),
              IsCause(CauseId::kBackwardReadsOtherWeight,
                      {{"other", "m.2.weight"}, {"parameter", "m.1.weight"}}));
  EXPECT_THAT(
      backward_uses(shards_swapped),
      IsCause(CauseId::kBackwardReadsMovedParts, {{"dp_ranks", 1}, {"parameter", "m.1.weight"}}));
  EXPECT_THAT(
      backward_uses([](const at::Tensor& now, auto, auto) {
        at::Tensor half = now.clone();
        half.narrow(0, 3, 3).zero_();
        return half;
      }),
      IsCause(CauseId::kBackwardReadsZerosInPart, {{"dp_rank", 1}, {"parameter", "m.1.weight"}}));
  EXPECT_THAT(backward_uses([](const at::Tensor& now, auto, auto) {
                return now + 0.5 * values({6, 8}, 99, at::kDouble);
              }),
              IsNoCause())
      << "it is nobody's weight";
}

/// Of a module with a parameter, whose gradient the run has not; the parameter may be frozen.
Cause without_gradient(bool is_frozen, bool has_output) {
  const auto body = [=](bool whole) {
    return Body([=](Sink& sink, int) {
      const auto record = [&](RecordKind kind, const std::string& name, std::int64_t seed) {
        sink.on_record(site(kind, name, layout_of({2, 3, 4})), values({2, 3, 4}, seed));
      };
      record(RecordKind::kParam, "layers.1.w", 1);
      record(RecordKind::kActivation, "layers.0", 2);
      if (whole || has_output) record(RecordKind::kActivation, "layers.1", 3);
      if (whole) record(RecordKind::kActivationGrad, "layers.1", 4);
      if (!is_frozen) record(RecordKind::kGrad, "layers.1.w", 5);
    });
  };
  return cause_on(MeshShape({{Axis::kDp, 2}}), body(true), body(false));
}

TEST(BackwardCauses, AGradientThatComesToNobodyIsTold) {
  EXPECT_THAT(without_gradient(true, true), IsCause(CauseId::kModuleFrozen));
  EXPECT_THAT(without_gradient(false, true), IsCause(CauseId::kOutputDetached));
  EXPECT_THAT(without_gradient(true, false), IsNoCause()) << "the module was not run at all";
}

}  // namespace
}  // namespace isoshard
