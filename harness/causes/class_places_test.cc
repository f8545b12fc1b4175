// SPDX-License-Identifier: Apache-2.0
/// Each class of causes on made-up runs with dp 2 and tp 3, and beside each a run that looks like
/// it and is not: it must not be given that cause.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "harness/judge/judge.h"
#include "harness/testing/diagnosed_run.h"
#include "harness/testing/is_cause.h"
#include "harness/testing/synthetic.h"
#include "harness/verdict/verdict.h"

namespace isoshard {
namespace {

using namespace synthetic;
using namespace causes_testing;
using testing::AllOf;

// ---- places

TEST(ClassCauses, WhatAnotherRankShouldHoldIsTold) {
  const auto held = [](const std::function<at::Tensor(at::Tensor whole, int tp)>& part) {
    const at::Tensor value = values({6, 8}, 1);
    const auto body = [=](bool whole) {
      return Body([=](Sink& sink, int rank) {
        const std::vector<Placement> split =
            whole ? std::vector<Placement>{} : std::vector<Placement>{shard(Axis::kTp, 0)};
        sink.on_record(site(RecordKind::kGrad, "m.w", layout_of({6, 8}, split)),
                       whole ? value : part(value, rank % kTp));
      });
    };
    return cause_of(body(true), body(false));
  };

  EXPECT_THAT(held([](const at::Tensor& v, int tp) {
                return v.narrow(0, 2 * ((tp + 1) % kTp), 2).clone();
              }),
              IsCause(CauseId::kValuesOfOtherRanks, {{"ranks", std::vector{0, 1, 2, 3, 4, 5}},
                                                     {"owners", std::vector{1, 2, 0, 1, 2, 0}}}));
  EXPECT_THAT(held([](const at::Tensor& v, int tp) {
                at::Tensor own = v.narrow(0, 2 * ((tp + 1) % kTp), 2).clone();
                set_first(own, 3);
                return own;
              }),
              IsNoCause());
}

TEST(ClassCauses, APermutationIsNamed) {
  EXPECT_THAT(cause_of_one(RecordKind::kActivation, values({4, 3, 8}, 1),
                           [](at::Tensor v, int, int) { return v.flip(0).contiguous(); }),
              IsCause(CauseId::kSlicesPermuted, {{"slices", "samples"},
                                                 {"block", 1},
                                                 {"order", std::vector{3, 2, 1, 0}},
                                                 {"dim", 0},
                                                 {"rank", 0},
                                                 {"ranks", std::vector{0, 1, 2, 3}}}));
  EXPECT_THAT(cause_of_one(RecordKind::kActivation, values({2, 3, 12}, 1),
                           [](at::Tensor v, int, int) {
                             return v.reshape({2, 3, 3, 4}).flip(2).reshape({2, 3, 12});
                           }),
              IsCause(CauseId::kSlicesPermuted,
                      {{"slices", "features"},
                       {"block", 4},
                       {"order", std::vector{8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3}},
                       {"dim", 2},
                       {"rank", 0}}));
}

TEST(ClassCauses, OtherValuesOfTheDistributionAreNoPermutation) {
  EXPECT_THAT(cause_of_one(RecordKind::kActivation, values({4, 3, 8}, 1),
                           [](at::Tensor, int, int) {
                             return values({4, 3, 8}, 2);
                           }),
              IsNoCause());
  EXPECT_THAT(cause_of_one(RecordKind::kActivation, values({4, 3, 8}, 1),
                           [](at::Tensor v, int, int) {
                             at::Tensor own = v.flip(0).contiguous();
                             own.select(0, 1).mul_(1.5);
                             return own;
                           }),
              IsNoCause())
      << "one sample is nobody's";
}

// ---- norms, data ids, flags

/// Gradients of four parameters and the norm whose square is `squares` of theirs.
Cause norm_is(const std::function<double(std::vector<double> squares)>& squares) {
  const std::vector<std::string> names = {"embed.weight", "layers.0.norm.weight",
                                          "layers.1.norm.weight", "head.weight"};
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int) {
      std::vector<double> own;
      for (std::size_t i = 0; i < names.size(); ++i) {
        const at::Tensor gradient = values({20}, static_cast<std::int64_t>(i + 1));
        own.push_back(gradient.to(at::kDouble).square().sum().item<double>());
        sink.on_record(site(RecordKind::kGrad, names[i], layout_of({20})), gradient);
      }
      const double all = own[0] + own[1] + own[2] + own[3];
      sink.on_record(site(RecordKind::kScalar, "grad_norm", layout_of({1})),
                     at::tensor({std::sqrt(whole ? all : squares(own))}, at::kDouble));
    });
  };
  return cause_of(body(true), body(false));
}

TEST(ClassCauses, SquaresThatANormLacksOrHasTwiceAreNamed) {
  EXPECT_THAT(norm_is([](auto s) { return s[1] + s[2] + s[3]; }),
              IsCause(CauseId::kSquaresLeftOut,
                      {{"parameters", std::vector<std::string>{"embed.weight"}}}));
  EXPECT_THAT(norm_is([](auto s) { return s[0] + s[3]; }),
              IsCause(CauseId::kSquaresLeftOut,
                      {{"num_parameters", 2},
                       {"parameters", std::vector<std::string>{"layers.0.norm.weight",
                                                               "layers.1.norm.weight"}}}));
  EXPECT_THAT(norm_is([](auto s) { return s[0] + s[1] + s[2] + 2 * s[3]; }),
              IsCause(CauseId::kSquaresCountedTwice,
                      {{"parameters", std::vector<std::string>{"head.weight"}}}));
  EXPECT_THAT(norm_is([](auto s) { return s[0] + s[1] + s[2] + 1.01 * s[3]; }), IsOnlyOff());
}

/// The gradients of a matrix [4, 20] and a vector [12], each cut into `parts` over the ranks of one
/// axis, which hold them one after the other, and over `copies` of cp they are copies. The norm has
/// `times` all squares too much, and lacks the parts of the vector on ranks above 0 if
/// `is_vector_lost`.
Cause norm_of_parts_is(Axis axis, int degree, int parts, double times, bool is_vector_lost,
                       int copies = 1) {
  const MeshShape mesh({{axis, degree}, {Axis::kCp, copies}});
  const auto squares = [](const at::Tensor& t) {
    return t.to(at::kDouble).square().sum().item<double>();
  };
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const auto record = [&](const std::string& name, const at::Tensor& gradient) {
        const std::int64_t count = gradient.size(0) / parts,
                           begin = whole ? 0 : mesh.coordinate(rank, axis) * parts / degree * count;
        Layout layout = layout_of(gradient.sizes().vec());
        Box box{Shape(layout.global_shape.size(), 0), Shape(layout.global_shape.size(), 0),
                layout.global_shape};
        box.global_offset[0] = begin;
        box.size[0] = count;
        layout.explicit_parts = !whole;
        if (!whole) layout.boxes = {box};
        sink.on_record(site(RecordKind::kGrad, name, layout),
                       whole ? gradient : gradient.narrow(0, begin, count));
      };
      const at::Tensor matrix = values({4, 20}, 1), vector = values({12}, 2);
      record("m.w", matrix);
      record("m.v", vector);
      double all = squares(matrix) + squares(vector);
      if (!whole) all *= 1 + times;
      if (!whole && is_vector_lost) all -= squares(vector.slice(0, 12 / parts));
      sink.on_record(site(RecordKind::kScalar, "grad_norm", layout_of({1})),
                     at::tensor({std::sqrt(all)}, at::kDouble));
    });
  };
  const Reference right = synthetic::reference(body(true));
  const Trace trace = synthetic::run(mesh, &right, body(false));
  JudgePolicy policy;
  policy.rtol = 1e-6;
  const Verdict verdict = judge(right, trace, policy);
  return verdict.findings.at(0).cause;
}

TEST(ClassCauses, CopiesAndPartsThatANormCountsWronglyAreTold) {
  EXPECT_THAT(norm_of_parts_is(Axis::kDp, 4, 4, 0, true),
              IsCause(CauseId::kSquaresLeftOut,
                      {{"axis", "dp"}, {"parameters", std::vector<std::string>{"m.v"}}}));
  EXPECT_THAT(norm_of_parts_is(Axis::kDp, 2, 2, 0, true, 2),
              IsCause(CauseId::kSquaresLeftOut,
                      {{"axis", "dp"}, {"parameters", std::vector<std::string>{"m.v"}}}));
  EXPECT_THAT(norm_of_parts_is(Axis::kDp, 4, 4, 0.01, true), IsOnlyOff());
  EXPECT_THAT(norm_of_parts_is(Axis::kTp, 4, 2, 1, false),
              IsCause(CauseId::kSquaresOfCopiesCounted,
                      {{"axis", "tp"},
                       {"num_parameters", 2},
                       {"parameters", std::vector<std::string>{"m.v", "m.w"}}}));
  EXPECT_THAT(norm_of_parts_is(Axis::kTp, 4, 2, 0.9, false), IsOnlyOff());
  EXPECT_THAT(norm_of_parts_is(Axis::kTp, 4, 4, 1, false), IsCause(CauseId::kSquaresCountedTwice))
      << "each rank holds another part";
}

/// The norm of gradients [12, 20] and [8] that four dp ranks share out, as `norm` makes it of the
/// squares that each rank has and of the largest element.
Cause norm_of_ranks_is(
    const std::function<double(std::vector<double> squares, double largest)>& norm) {
  const MeshShape mesh({{Axis::kDp, 4}});
  const at::Tensor matrix = values({12, 20}, 1), vector = values({8}, 2);
  std::vector<double> squares;
  for (std::int64_t rank = 0; rank < 4; ++rank) {
    squares.push_back(matrix.narrow(0, 3 * rank, 3).to(at::kDouble).square().sum().item<double>() +
                      vector.narrow(0, 2 * rank, 2).to(at::kDouble).square().sum().item<double>());
  }
  const double largest =
      std::max(matrix.abs().max().item<double>(), vector.abs().max().item<double>());
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const auto record = [&](const std::string& name, const at::Tensor& gradient) {
        const std::int64_t count = gradient.size(0) / 4;
        sink.on_record(site(RecordKind::kGrad, name,
                            layout_of(gradient.sizes().vec(),
                                      whole ? std::vector<Placement>{}
                                            : std::vector<Placement>{shard(Axis::kDp, 0)})),
                       whole ? gradient : gradient.narrow(0, rank * count, count));
      };
      record("m.w", matrix);
      record("m.v", vector);
      const double right = std::sqrt(std::accumulate(squares.begin(), squares.end(), 0.0));
      sink.on_record(site(RecordKind::kScalar, "grad_norm", layout_of({1})),
                     at::tensor({whole ? right : norm(squares, largest)}, at::kDouble));
    });
  };
  const Reference right = synthetic::reference(body(true));
  JudgePolicy policy;
  policy.rtol = 1e-6;
  const Verdict verdict = judge(right, synthetic::run(mesh, &right, body(false)), policy);
  return verdict.findings.at(0).cause;
}

TEST(ClassCauses, ANormOfAnotherKindIsTold) {
  const auto added = [](const std::vector<double>& squares) {
    double sum = 0;
    for (const double own : squares) sum += std::sqrt(own);
    return sum;
  };

  EXPECT_THAT(norm_of_ranks_is([&](auto squares, double) { return added(squares); }),
              IsCause(CauseId::kNormsAdded, {{"world_size", 4}}));
  EXPECT_THAT(norm_of_ranks_is([](auto, double largest) { return largest; }),
              IsCause(CauseId::kLargestElement));
  EXPECT_THAT(norm_of_ranks_is([](auto squares, double) {
                return std::accumulate(squares.begin(), squares.end(), 0.0);
              }),
              IsCause(CauseId::kNormSquared));
  EXPECT_THAT(norm_of_ranks_is([&](auto squares, double) { return 1.001 * added(squares); }),
              IsOnlyOff());
}

TEST(ClassCauses, ElementsThatAreZeroAndShouldNotBeAreTold) {
  EXPECT_THAT(cause_of_one(RecordKind::kGrad, values({6, 8}, 1),
                           [](at::Tensor v, int, int) {
                             v.view({-1}).select(0, 47).zero_();
                             return v;
                           }),
              IsCause(CauseId::kZeros, {{"zeros", 1}, {"rows", std::vector{5}}}));
  EXPECT_THAT(cause_of_one(RecordKind::kActivation, values({2, 6, 8}, 1),
                           [](at::Tensor v, int dp, int) {
                             if (dp == 1) v.narrow(0, 1, 1).zero_();
                             return v;
                           }),
              IsCause(CauseId::kZeros,
                      {{"zeros", 48}, {"rows", std::vector{1}}, {"ranks", std::vector{3, 4, 5}}}));
  EXPECT_THAT(cause_of_one(RecordKind::kGrad, values({6, 8}, 1),
                           [](at::Tensor v, int, int) {
                             v.view({-1}).select(0, 47).zero_();
                             set_first(v, 3);
                             return v;
                           }),
              IsNoCause())
      << "another one is wrong, too";
}

/// Two steps with a norm of 4.1 and 5.3, clipped to 1; the second step's gradient has a factor.
Cause clipped_is(double factor) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int) {
      for (const double norm : {4.1, 5.3}) {
        if (norm > 5) sink.begin_step(1);
        const at::Tensor gradient = values({6, 8}, norm > 5 ? 2 : 1);
        sink.on_record(site(RecordKind::kGrad, "m.w", layout_of({6, 8})), gradient);
        sink.on_record(site(RecordKind::kScalar, "grad_norm", layout_of({1})),
                       at::tensor({norm}, at::kDouble));
        sink.on_record(site(RecordKind::kGrad, "m.w.clipped", layout_of({6, 8})),
                       gradient / norm * (norm > 5 && !whole ? factor : 1));
      }
    });
  };
  JudgePolicy policy;
  policy.max_grad_norm = 1;
  return cause_of(body(true), body(false), policy);
}

TEST(ClassCauses, ClippingByAnEarlierNormIsTold) {
  EXPECT_THAT(clipped_is(5.3 / 4.1),
              IsCause(CauseId::kClippedByOtherNorm, {{"step", 0}, {"scale", 1.2927}}));
  EXPECT_THAT(clipped_is(1.29), IsCause(CauseId::kScale, {{"scale", 1.29}}));
}

TEST(ClassCauses, ClippingTwiceIsTold) {
  EXPECT_THAT(clipped_is(1 / 5.3), IsCause(CauseId::kClippedTwice, {{"scale", 0.18868}}));
  EXPECT_THAT(clipped_is(1 / 5.2), IsCause(CauseId::kScale, {{"scale", 0.1923}}));
}

/// A mask that keeps 9 of 10 elements, and what comes out of the dropout, times a factor.
Cause dropped_is(double factor) {
  const Shape shape{4, 50, 40};
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int) {
      const at::Tensor keep = values(shape, 3) < 0.8;
      sink.on_record(site(RecordKind::kMask, "m.drop", layout_of(shape)), keep);
      sink.on_record(site(RecordKind::kActivation, "m", layout_of(shape)),
                     values(shape, 1) * keep * (whole ? 1 : factor));
    });
  };
  return cause_of(body(true), body(false));
}

TEST(ClassCauses, DropoutThatDoesNotDivideWhatItKeepsIsTold) {
  EXPECT_THAT(dropped_is(0.9),
              IsCause(CauseId::kScale, {{"scale", 0.9}, {"mask", "m.drop"}, {"kept", 0.901}}));
  EXPECT_THAT(dropped_is(1 / 0.9),
              IsCause(CauseId::kScale, {{"scale", 1.1111}, {"mask", "m.drop"}, {"kept", 0.901}}));
  EXPECT_THAT(dropped_is(0.8),
              AllOf(IsCause(CauseId::kScale, {{"scale", 0.8}}), HasNoValue("mask")));
}

/// Two steps of a parameter at rates 0.01 and 0.03; the second one is `factor` times the right one.
Cause second_step_is(double factor) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int) {
      at::Tensor value = values({6, 8}, 1);
      sink.on_record(site(RecordKind::kParam, "m.w", layout_of({6, 8})), value);
      for (const double rate : {0.01, 0.03}) {
        if (rate > 0.02) sink.begin_step(1);
        sink.on_record(site(RecordKind::kScalar, "learning_rate", layout_of({1})),
                       at::tensor({rate}, at::kDouble));
        value = value - rate * values({6, 8}, 5) * (rate > 0.02 && !whole ? factor : 1);
        sink.on_record(site(RecordKind::kParam, "m.w", layout_of({6, 8})), value);
      }
    });
  };
  return cause_of(body(true), body(false));
}

/// The learning rates of three steps, the last one `last`, the second one `rate` on dp rank 1.
Cause second_rate_is(double rate, double last = 0.007) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const std::vector<double> rates = {0.0, 0.01, last};
      for (int step = 0; step < 3; ++step) {
        if (step > 0) sink.begin_step(step);
        const bool is_wrong = !whole && step == 1 && rank / kTp == 1;
        sink.on_record(
            site(RecordKind::kScalar, "learning_rate", layout_of({1})),
            at::tensor({is_wrong ? rate : rates[static_cast<std::size_t>(step)]}, at::kDouble));
      }
    });
  };
  return cause_of(body(true), body(false));
}

TEST(ClassCauses, ALearningRateOfAnotherStepIsTold) {
  EXPECT_THAT(second_rate_is(0),
              IsCause(CauseId::kRateOfOtherStep, {{"step", 0}, {"ranks", std::vector{3, 4, 5}}}));
  EXPECT_THAT(second_rate_is(0.007),
              IsCause(CauseId::kRateOfOtherStep, {{"step", 2}, {"ranks", std::vector{3, 4, 5}}}));
  EXPECT_THAT(second_rate_is(0.0071), IsCause(CauseId::kScale, {{"scale", 0.71}}));
  EXPECT_THAT(second_rate_is(0.02, 0.02),
              IsCause(CauseId::kRateOfOtherStep, {{"step", 2}, {"scale", 2}}))
      << "dp has two ranks";
  EXPECT_THAT(second_rate_is(0.04, 0.04), HasNoValue("scale"));
}

TEST(ClassCauses, AStepAtTheRateOfAnotherStepIsTold) {
  EXPECT_THAT(second_step_is(1.0 / 3),
              IsCause(CauseId::kUpdateWithRateOfStep,
                      {{"scale", 0.3333}, {"step", 0}, {"is_update", true}}));
  EXPECT_THAT(second_step_is(0.4), IsCause(CauseId::kScale, {{"scale", 0.4}, {"is_update", true}}));
}

/// The loss of two samples with 4 and 3 targets, times a factor.
Cause loss_times(double factor) {
  const at::Tensor labels =
      at::tensor({9, 1, 2, 3, 4, 9, 5, 6, 7, -100}, at::kLong).reshape({2, 5});
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int) {
      sink.on_record(site(RecordKind::kDataId, "labels", layout_of({2, 5})), labels);
      sink.on_record(site(RecordKind::kScalar, "loss", layout_of({1})),
                     at::tensor({2.5 * (whole ? 1 : factor)}, at::kDouble));
    });
  };
  return cause_of(body(true), body(false));
}

TEST(ClassCauses, ALossOfAnotherCountOfTokensIsTold) {
  EXPECT_THAT(loss_times(7.0 / 8),
              IsCause(CauseId::kDividedByOtherCount, {{"used", 8}, {"right", 7}}));
  EXPECT_THAT(loss_times(7.0 / 6),
              IsCause(CauseId::kDividedByOtherCount, {{"used", 6}, {"right", 7}, {"axis", "tp"}}));
  EXPECT_THAT(loss_times(0.93), IsOnlyOff());
}

Cause ids_are(const std::vector<std::int64_t>& first, const std::vector<std::int64_t>& second,
              const std::vector<std::int64_t>& right = {4, 5, 6, 7}) {
  const auto body = [](std::vector<std::int64_t> a, std::vector<std::int64_t> b) {
    return Body([=](Sink& sink, int) {
      sink.on_record(site(RecordKind::kDataId, "sample_ids", layout_of({4})), at::tensor(a));
      sink.begin_step(1);
      sink.on_record(site(RecordKind::kDataId, "sample_ids", layout_of({4})), at::tensor(b));
    });
  };
  return cause_of(body({0, 1, 2, 3}, right), body(first, second));
}

TEST(ClassCauses, RepeatsAndGapsOfSampleIdsAreListed) {
  EXPECT_THAT(ids_are({0, 1, 2, 3}, {0, 1, 2, 3}),
              IsCause(CauseId::kIdsOfEarlierStep, {{"step", 0}}));
  EXPECT_THAT(
      ids_are({1, 2, 3, 4}, {5, 6, 7, 8}),
      IsCause(
          CauseId::kIdsTooLarge,
          {{"missed", std::vector{0}}, {"foreign", std::vector{4}}, {"by", 1}, {"last_step", 0}}));
  EXPECT_THAT(
      ids_are({0, 1, 2, 3}, {3, 4, 5, 6}),
      IsCause(
          CauseId::kIdsTooSmall,
          {{"repeated", std::vector{3}}, {"missed", std::vector{7}}, {"by", 1}, {"last_step", 1}}));
  EXPECT_THAT(
      ids_are({0, 1, 2, 3}, {4, 5, 5, 6}),
      IsCause(CauseId::kIdsMiscounted,
              {{"repeated", std::vector{5}}, {"missed", std::vector{7}}, {"last_step", 1}}));
  EXPECT_THAT(ids_are({0, 1, 2, 3}, {5, 4, 7, 6}), IsCause(CauseId::kIdsInOtherOrder));
  EXPECT_THAT(ids_are({0, 1, 1, 2}, {4, 5, 6, 7}),
              IsCause(CauseId::kIdsMiscounted, {{"last_step", 0}}))
      << "ids are not averaged";
}

TEST(ClassCauses, AFlagIsNeitherSummedNorScaled) {
  const auto flag = [](const std::function<double(int rank)>& value, bool whole) {
    return Body([=](Sink& sink, int rank) {
      sink.on_record(site(RecordKind::kScalar, "found_inf", layout_of({1})),
                     at::tensor({whole ? 1.0 : value(rank)}, at::kDouble));
    });
  };
  const auto of = [&](const std::function<double(int rank)>& value) {
    return cause_of(flag(value, true), flag(value, false));
  };

  EXPECT_THAT(of([](int rank) { return rank / kTp == 0 ? 1.0 : 0.0; }),
              IsCause(CauseId::kFlagNotReduced, {{"axes", std::vector{"dp"}}}));
  EXPECT_THAT(of([](int) { return 0.0; }),
              IsCause(CauseId::kFlagWrongOnEveryRank, {{"value", 0}, {"expected", 1}}));
  EXPECT_THAT(of([](int) { return 0.25; }), IsCause(CauseId::kFlagOutOfRange, {{"value", 0.25}}));
}

TEST(ClassCauses, ZerosRepeatNothing) {
  const at::Tensor value = values({2, 3, 8}, 1);
  const at::Tensor with_zeros = at::cat({at::zeros({1, 3, 8}), value.narrow(0, 1, 1)});

  EXPECT_THAT(cause_of_one(RecordKind::kActivationGrad, with_zeros,
                           [](at::Tensor v, int, int) { return at::zeros_like(v); }),
              IsCause(CauseId::kScale, {{"scale", 0}}))
      << "the first sample is zeros, too";
  EXPECT_THAT(cause_of_one(RecordKind::kActivationGrad,
                           at::cat({values({2, 2, 8}, 1), at::zeros({2, 4, 8})}, 1),
                           [](at::Tensor v, int, int) { return at::zeros_like(v); }),
              IsCause(CauseId::kScale, {{"scale", 0}}))
      << "the last tokens are zeros, too";
  EXPECT_THAT(cause_of_one(RecordKind::kActivationGrad, value,
                           [](at::Tensor v, int, int) {
                             return at::cat({v.narrow(0, 0, 1), v.narrow(0, 0, 1)});
                           }),
              IsCause(CauseId::kSlicesRepeated,
                      {{"rank", 0}, {"dim", 0}, {"first", 0}, {"last", 0}, {"times", 2}}));
}

/// Tokens [2,6,8] of which tp ranks hold two each of both samples, cut from what `change` makes.
Cause tokens_are(const std::function<at::Tensor(at::Tensor whole)>& change) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const at::Tensor value = values({2, 6, 8}, 1);
      const std::vector<Placement> cut = {shard(Axis::kTp, 1)};
      sink.on_record(site(RecordKind::kActivation, "m.x",
                          layout_of({2, 6, 8}, whole ? std::vector<Placement>() : cut)),
                     whole ? value : change(value).narrow(1, 2 * (rank % kTp), 2).contiguous());
    });
  };
  return cause_of(body(true), body(false));
}

TEST(ClassCauses, TokensAtThePlacesOfOthersAreTold) {
  // the tokens of both samples are cut as one row of twelve
  const auto in_a_row = [](const at::Tensor& v) {
    return v.reshape({3, 2, 2, 8}).transpose(0, 1).reshape({2, 6, 8});
  };

  EXPECT_THAT(
      tokens_are(in_a_row),
      IsCause(CauseId::kTokensElsewhere,
              {{"rank", 0}, {"order", std::vector{0, 1, 2, 3}}, {"ranks", std::vector{0, 3}}}));
  EXPECT_THAT(tokens_are([&](const at::Tensor& v) {
                at::Tensor own = in_a_row(v).contiguous();
                own.select(0, 1).select(0, 0).copy_(values({8}, 9));
                return own;
              }),
              IsNoCause())
      << "one token is nobody's";
}

}  // namespace
}  // namespace isoshard
