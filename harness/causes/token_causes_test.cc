// SPDX-License-Identifier: Apache-2.0
/// Causes in tokens that two cp ranks share: rank 0 has 0, 1, 6 and 7 of 8, rank 1 those between.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "harness/judge/judge.h"
#include "harness/testing/is_cause.h"
#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;

const MeshShape kCp2({{Axis::kCp, 2}});
const std::vector<std::vector<std::int64_t>> kTokens = {{0, 1, 6, 7}, {2, 3, 4, 5}};

at::Tensor places_of(int rank) {
  return at::tensor(kTokens.at(static_cast<std::size_t>(rank)), at::kLong);
}

Body whole(RecordKind kind, const std::string& name, const at::Tensor& global) {
  return [=](Sink& sink, int) {
    sink.on_record(site(kind, name, layout_of(global.sizes().vec())), global);
  };
}

// Dim 1 holds a rank's tokens.
Body shared(const std::string& name, const at::Tensor& global) {
  return [=](Sink& sink, int rank) {
    Layout layout = layout_of(global.sizes().vec());
    layout.explicit_parts = true;
    const at::Tensor own = global.index_select(1, places_of(rank));
    const std::int64_t run = rank == 0 ? 2 : 4;
    for (std::int64_t local = 0; local < 4; local += run) {
      Box box{Shape(3, 0), Shape(3, 0), own.sizes().vec()};
      box.local_offset[1] = local;
      box.global_offset[1] =
          kTokens[static_cast<std::size_t>(rank)][static_cast<std::size_t>(local)];
      box.size[1] = run;
      layout.boxes.push_back(box);
    }
    sink.on_record(site(RecordKind::kActivation, name, layout), own);
  };
}

Cause token_cause(const Body& right, const Body& wrong) {
  const Reference reference = synthetic::reference(right);
  JudgePolicy options;
  options.rtol = 1e-6;
  const Verdict verdict = judge(reference, run(kCp2, &reference, wrong), options);
  EXPECT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  return verdict.findings.at(0).cause;
}

// The tokens of `wrong` have other values.
Cause told(const std::string& name, const std::vector<std::int64_t>& wrong) {
  const at::Tensor right = values({2, 8, 3}, 1), other = values({2, 8, 3}, 2);
  at::Tensor changed = right.clone();
  for (const std::int64_t token : wrong) changed.select(1, token).copy_(other.select(1, token));
  return token_cause(whole(RecordKind::kActivation, name, right), shared(name, changed));
}

TEST(TokenCauses, PositionsThatRestartAreWrongWhereATokensPlaceIsAnother) {
  EXPECT_THAT(
      told("layers.0.self_attn.q_rope", {2, 3, 4, 5, 6, 7}),
      IsCause(CauseId::kPositionsRestart, {{"begins", std::vector{2}}, {"ends", std::vector{5}}}));
  EXPECT_THAT(told("layers.0.self_attn.q_rope", {2, 3, 4, 5}), IsNoCause())
      << "the tail of rank 0 is right, though its places are others";
  EXPECT_THAT(told("layers.0.mlp.up_proj", {2, 3, 4, 5, 6, 7}), IsNoCause());
}

TEST(TokenCauses, KeysOfOthersAreWrongOnlyForWhoMeetsThem) {
  EXPECT_THAT(told("layers.0.self_attn.core", {2, 3, 4, 5}),
              IsCause(CauseId::kWrongWithForeignKeys, {{"ranks", std::vector{1}}}));
  EXPECT_THAT(told("layers.0.self_attn.core", {2, 3, 4, 5, 6, 7}),
              IsCause(CauseId::kWrongWithForeignKeys, {{"ranks", std::vector{0, 1}}}));
  EXPECT_THAT(told("layers.0.self_attn.core", {0, 1, 2, 3, 4, 5}), IsNoCause())
      << "tokens 0 and 1 see keys of their own rank only";
  EXPECT_THAT(told("layers.0.self_attn", {2, 3, 4, 5}),
              IsCause(CauseId::kWrongWithForeignKeys, {{"ranks", std::vector{1}}}));
  EXPECT_THAT(told("layers.0.self_attn.k_rope", {2, 3, 4, 5}), IsNoCause())
      << "no query meets a key there";
  const at::Tensor right = values({2, 8, 3}, 1);
  at::Tensor changed = right.clone();
  changed[0][3][1] += 1;
  const std::string core = "layers.0.self_attn.core";
  EXPECT_THAT(token_cause(whole(RecordKind::kActivation, core, right), shared(core, changed)),
              IsCause(CauseId::kOneElementWrong));
}

// Mean losses over logits of 5 columns; targets are the labels shifted by one.
TEST(TokenCauses, TokensWithoutTargetAreNamed) {
  const at::Tensor logits = values({2, 8, 5}, 3) * 2;
  const at::Tensor labels =
      at::tensor({0, 1, 2, 3, 4, 0, 1, 2, 4, 3, 2, 1, 0, 4, 3, 2}, at::kLong).reshape({2, 8});
  const at::Tensor losses = at::log_softmax(logits.to(at::kDouble), 2)
                                .slice(1, 0, -1)
                                .gather(2, labels.slice(1, 1).unsqueeze(2))
                                .neg()
                                .squeeze(2);
  const auto recorded = [&](const std::vector<std::int64_t>& left_out) {
    at::Tensor counted = losses.clone();
    for (const std::int64_t token : left_out) counted.select(1, token).zero_();
    const at::Tensor loss = counted.sum().div(losses.numel()).reshape({1});
    return [=](Sink& sink, int rank) {
      whole(RecordKind::kDataId, "labels", labels)(sink, rank);
      whole(RecordKind::kActivation, "lm_head", logits)(sink, rank);
      whole(RecordKind::kScalar, "loss", loss)(sink, rank);
    };
  };
  const Body right = recorded({});

  EXPECT_THAT(token_cause(right, recorded({1, 5})),
              IsCause(CauseId::kLastTargetsMissing, {{"positions", std::vector{1, 5}}}));
  EXPECT_THAT(token_cause(right, recorded({3})),
              IsCause(CauseId::kLastTargetsMissing, {{"positions", std::vector{3}}}))
      << "of a sequence in two parts";
  EXPECT_THAT(token_cause(right, recorded({5})),
              IsCause(CauseId::kLastTargetsMissing, {{"positions", std::vector{5}}}))
      << "where a rank's last part ends";
  EXPECT_THAT(token_cause(right, recorded({2})), IsOnlyOff());
}

// Rank 0 has the tokens 0, 1, 6 and 7. Its head is off by roundings alone.
TEST(TokenCauses, ATailThatStandsElsewhereIsToldBesideAHeadThatIsRoundedOtherwise) {
  const at::Tensor right = values({2, 8, 8}, 1);
  at::Tensor moved = right.clone(), other = right.clone();
  for (at::Tensor* const changed : {&moved, &other}) changed->narrow(1, 0, 2).mul_(1 + 0x1p-22);
  moved.narrow(1, 6, 2).copy_(right.narrow(1, 2, 2));
  other.narrow(1, 6, 2).copy_(values({2, 2, 8}, 2));
  const auto told_of = [&](const at::Tensor& seen) {
    return token_cause(whole(RecordKind::kActivation, "m.x", right), shared("m.x", seen));
  };

  EXPECT_THAT(told_of(moved),
              IsCause(CauseId::kSlicesShifted,
                      {{"shift", 4}, {"dim", 1}, {"rank", 0}, {"ranks", std::vector{0}}}));
  EXPECT_THAT(told_of(other), IsNoCause());
}

/// Angles [tokens, pairs] of 4 pairs with this base.
at::Tensor angles_with(double base, std::int64_t tokens) {
  const at::Tensor frequencies = at::pow(base, -at::arange(4, at::kDouble) / 4);
  return at::arange(tokens, at::kDouble).unsqueeze(1) * frequencies.unsqueeze(0);
}

/// Queries [2,6,2 x 8] and what is rotated by angles; the run's angles are `seen`.
Cause rotation_is(const at::Tensor& seen) {
  const at::Tensor x = values({2, 6, 16}, 1, at::kDouble);
  const auto body = [&](const at::Tensor& angles) {
    const at::Tensor heads = x.reshape({2, 6, 2, 8}).transpose(1, 2);
    const at::Tensor first = heads.narrow(3, 0, 4), second = heads.narrow(3, 4, 4);
    const at::Tensor cosine = angles.cos(), sine = angles.sin();
    const at::Tensor y =
        at::cat({first * cosine - second * sine, second * cosine + first * sine}, 3).contiguous();
    return Body([=](Sink& sink, int) {
      sink.on_record(site(RecordKind::kActivation, "attn.q_proj", layout_of({2, 6, 16})), x);
      sink.on_record(site(RecordKind::kActivation, "attn.q_rope", layout_of({2, 2, 6, 8})), y);
    });
  };
  return token_cause(body(angles_with(10000, 6)), body(seen));
}

TEST(RotationCauses, OtherFrequenciesAndPositionsAreTold) {
  const auto rounded = [](const at::Tensor& angles) {
    const at::Tensor frequencies = angles.select(0, 1).to(at::kBFloat16).to(at::kDouble);
    return at::arange(6, at::kDouble).unsqueeze(1) * frequencies.unsqueeze(0);
  };

  EXPECT_THAT(rotation_is(rounded(angles_with(10000, 6))),
              IsCause(CauseId::kFrequenciesRounded, {{"dtype", "bf16"}}));
  EXPECT_THAT(rotation_is(angles_with(20000, 6)),
              IsCause(CauseId::kOtherBase, {{"base", 20000}, {"right", 10000}}));
  EXPECT_THAT(rotation_is(angles_with(10000, 8).narrow(0, 2, 6)),
              IsCause(CauseId::kPositionsOff, {{"shift", 2}}));
  EXPECT_THAT(rotation_is(angles_with(10000, 6) + 0.1 * values({6, 4}, 3, at::kDouble)),
              IsNoCause())
      << "no frequency makes these";
}

}  // namespace
}  // namespace isoshard
