// SPDX-License-Identifier: Apache-2.0
/// Each cause that lies in what was read, on made-up runs with dp 2 and tp 3; and beside each, a
/// run that is wrong in another way.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "harness/ids/phrase.h"
#include "harness/judge/judge.h"
#include "harness/testing/is_cause.h"
#include "harness/testing/synthetic.h"
#include "harness/verdict/verdict.h"

namespace isoshard {
namespace {

using namespace synthetic;
using testing::ElementsAre;
using testing::EndsWith;
using testing::UnorderedElementsAre;

constexpr int kTpRanks = 3;

Finding first_finding(const Body& right, const Body& wrong) {
  const Reference r = reference(right);
  const Trace trace = run(kDp2Tp3, &r, wrong);
  JudgePolicy options;
  options.rtol = 1e-6;
  const Verdict verdict = judge(r, trace, options);
  EXPECT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  return verdict.findings.at(0);
}

Cause read_cause(const Body& right, const Body& wrong) {
  return first_finding(right, wrong).cause;
}

/// A mask of two samples with 6 tokens, of which each tp rank has 2.
Body masks(const std::function<at::Tensor(int tp)>& part) {
  return [=](Sink& sink, int rank) {
    const Layout layout = layout_of({2, 6, 8}, {shard(Axis::kTp, 1)});
    for (const char* name : {"a.drop", "b.drop", "b.other"}) {
      const bool is_right = std::string_view(name) == "b.other";
      sink.on_record(site(RecordKind::kMask, name, layout),
                     is_right ? values({2, 6, 8}, 1).gt(0).narrow(1, rank % kTpRanks * 2, 2)
                              : part(rank % kTpRanks));
    }
  };
}

TEST(ReadCauses, MasksThatRanksShareAreTold) {
  const at::Tensor whole = values({2, 6, 8}, 1).gt(0);
  const Body right = [=](Sink& sink, int) {
    for (const char* name : {"a.drop", "b.drop", "b.other"})
      sink.on_record(site(RecordKind::kMask, name, layout_of({2, 6, 8})), whole);
  };

  const Finding shared = first_finding(right, masks([&](int) { return whole.narrow(1, 0, 2); }));
  EXPECT_THAT(shared.cause,
              IsCause(CauseId::kOneMaskForTokens, {{"axis", "tp"},
                                                   {"sharing_ranks", std::vector{0, 1, 2}},
                                                   {"point", "drop"},
                                                   {"same", 2},
                                                   {"same_of", 2}}));
  EXPECT_THAT(shared.diagnosis, EndsWith(phrase(PhraseId::kOfPoints,
                                                {{"point", "drop"}, {"same", 2}, {"same_of", 2}})));
  EXPECT_THAT(read_cause(right, masks([&](int tp) {
                           return values({2, 2, 8}, 7 + tp).gt(0);
                         })),
              IsNoCause());
  EXPECT_THAT(read_cause(right, masks([&](int) {
                           return at::ones({2, 2, 8}, at::kBool);
                         })),
              IsNoCause())
      << "nothing is dropped, which says nothing of streams";
}

/// A step 0 that changes the parameters of a product "m" and a norm "n"; in step 1 they are used,
/// by dp rank 1 as they were in step `used`.
Body second_step(bool whole, int used, double factor = 1) {
  return [=](Sink& sink, int rank) {
    const int dp = whole ? 0 : rank / kTpRanks;
    const std::vector<Placement> split =
        whole ? std::vector<Placement>{} : std::vector<Placement>{shard(Axis::kDp, 0)};
    const auto parameter = [](const std::string& name, int step) {
      const Shape shape = name == "m.weight" ? Shape{5, 4} : name == "m.bias" ? Shape{5} : Shape{4};
      return values(shape, name.size() + 10 * static_cast<std::int64_t>(name[0] == 'n')) +
             0.01 * step * values(shape, 30);
    };
    for (int step = 0; step < 2; ++step) {
      for (const std::string name : {"m.weight", "m.bias", "n.weight"})
        sink.on_record(site(RecordKind::kParam, name, layout_of(parameter(name, 0).sizes().vec())),
                       parameter(name, step));
    }
    sink.begin_step(1);
    const int read = !whole && dp == 1 ? used : 1;
    const auto mine = [&](const at::Tensor& t) { return whole ? t : t.narrow(0, 2 * dp, 2); };
    const at::Tensor x = mine(values({4, 3, 4}, 50));
    const double own = read == used && !whole ? factor : 1;
    sink.on_record(site(RecordKind::kActivation, "x", layout_of({4, 3, 4}, split)), x);
    const at::Tensor product =
        x.matmul(parameter("m.weight", read).t()) + parameter("m.bias", read);
    sink.on_record(site(RecordKind::kActivation, "m", layout_of({4, 3, 5}, split)), product * own);
    sink.on_record(site(RecordKind::kActivation, "n", layout_of({4, 3, 4}, split)),
                   x * parameter("n.weight", read) * own);
  };
}

TEST(ReadCauses, ParametersOfAnEarlierStepAreTold) {
  const Reference right = reference(second_step(true, 1));
  const Trace trace = run(kDp2Tp3, &right, second_step(false, 0));
  JudgePolicy options;
  options.rtol = 1e-6;

  const Verdict verdict = judge(right, trace, options);

  ASSERT_EQ(verdict.findings.size(), 2U);
  EXPECT_THAT(
      verdict.findings[0].cause,
      IsCause(
          CauseId::kStaleParametersRead,
          {{"step", 1}, {"parameter", "m.weight"}, {"steps", 1}, {"ranks", std::vector{3, 4, 5}}}));
  EXPECT_THAT(
      verdict.findings[1].cause,
      IsCause(
          CauseId::kStaleParametersRead,
          {{"step", 1}, {"parameter", "n.weight"}, {"steps", 1}, {"ranks", std::vector{3, 4, 5}}}));
  EXPECT_THAT(read_cause(second_step(true, 1), second_step(false, 1, 1.02)),
              IsCause(CauseId::kScale, {{"scale", 1.02}}));
}

/// Products "a.0.m" and "a.1.m" and norms "a.0.n" and "a.1.n" of the same input; those of a.1 are
/// made with the parameters of layer `used`, and changed.
Body two_layers(int used, const std::function<at::Tensor(at::Tensor)>& change) {
  return [=](Sink& sink, int) {
    const auto parameter = [](int layer, const std::string& kind) {
      return values(kind == "m" ? Shape{6, 4} : Shape{4}, 3 * layer + (kind == "m" ? 1 : 2));
    };
    for (int layer = 0; layer < 2; ++layer) {
      for (const std::string kind : {"m", "n"}) {
        const at::Tensor own = parameter(layer, kind);
        sink.on_record(site(RecordKind::kParam, fmt::format("a.{}.{}.weight", layer, kind),
                            layout_of(own.sizes().vec())),
                       own);
      }
    }
    const at::Tensor x = values({2, 5, 4}, 20);
    sink.on_record(site(RecordKind::kActivation, "x", layout_of({2, 5, 4})), x);
    for (int layer = 0; layer < 2; ++layer) {
      const int read = layer == 1 ? used : layer;
      const at::Tensor m = x.matmul(parameter(read, "m").t()), n = x * parameter(read, "n");
      sink.on_record(
          site(RecordKind::kActivation, fmt::format("a.{}.m", layer), layout_of({2, 5, 6})),
          layer == 1 ? change(m) : m);
      sink.on_record(
          site(RecordKind::kActivation, fmt::format("a.{}.n", layer), layout_of({2, 5, 4})),
          layer == 1 ? change(n) : n);
    }
  };
}

TEST(ReadCauses, ParametersOfAnotherModuleAreTold) {
  const auto as_made = [](const at::Tensor& y) { return y; };
  const Reference right = reference(two_layers(1, as_made));
  const auto told = [&](int used, const std::function<at::Tensor(at::Tensor)>& change) {
    JudgePolicy options;
    options.rtol = 1e-6;
    std::vector<Cause> all;
    for (const Finding& finding :
         judge(right, run(kDp2Tp3, &right, two_layers(used, change)), options).findings)
      all.push_back(finding.cause);
    return all;
  };

  // the input of both layers is one, so their outputs are also those of each other
  EXPECT_THAT(told(0, as_made),
              UnorderedElementsAre(IsCause(CauseId::kValuesOfOtherTensor, {{"other", "a.0.m"}}),
                                   IsCause(CauseId::kValuesOfOtherTensor, {{"other", "a.0.n"}})));
  EXPECT_THAT(told(0, [](const at::Tensor& y) { return y + 0.01 * values({1}, 2); }),
              ElementsAre(IsNoCause(), IsNoCause()));
}

/// Layer 1 of two that follow each other, with the parameters of layer `used`.
Body layers_in_turn(int used, double factor = 1) {
  return [=](Sink& sink, int) {
    const auto weight = [](int layer) { return values({4, 4}, 3 * layer + 1); };
    const auto norm = [](int layer) { return values({4}, 3 * layer + 2); };
    for (int layer = 0; layer < 2; ++layer) {
      sink.on_record(site(RecordKind::kParam, fmt::format("a.{}.n.weight", layer), layout_of({4})),
                     norm(layer));
      sink.on_record(
          site(RecordKind::kParam, fmt::format("a.{}.m.weight", layer), layout_of({4, 4})),
          weight(layer));
    }
    at::Tensor x = values({2, 5, 4}, 20);
    sink.on_record(site(RecordKind::kActivation, "x", layout_of({2, 5, 4})), x);
    for (int layer = 0; layer < 2; ++layer) {
      const int read = layer == 1 ? used : layer;
      const double own = layer == 1 ? factor : 1;
      const at::Tensor scaled = own * x * norm(read);
      sink.on_record(
          site(RecordKind::kActivation, fmt::format("a.{}.n", layer), layout_of({2, 5, 4})),
          scaled);
      x = scaled.matmul(weight(read).t());
      sink.on_record(
          site(RecordKind::kActivation, fmt::format("a.{}.m", layer), layout_of({2, 5, 4})), x);
    }
  };
}

TEST(ReadCauses, ALayerThatReadsTheParametersOfAnotherIsTold) {
  EXPECT_THAT(read_cause(layers_in_turn(1), layers_in_turn(0)),
              IsCause(CauseId::kParametersOfAnother,
                      {{"read", "a.0.n.weight"}, {"parameter", "a.1.n.weight"}}));
  EXPECT_THAT(read_cause(layers_in_turn(1), layers_in_turn(0, 1.05)),
              IsCause(CauseId::kPredecessorPadding))
      << "and something else besides";
}

/// What a rank has of two activations and of their gradients, each [2, 5, 4].
Cause sibling_is(RecordKind kind, const std::function<at::Tensor(at::Tensor)>& change) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int) {
      const Layout layout = layout_of({2, 5, 4});
      sink.on_record(site(kind, "attn.v", layout), values({2, 5, 4}, 2));
      sink.on_record(site(kind, "attn.k", layout),
                     whole ? values({2, 5, 4}, 1) : change(values({2, 5, 4}, 2)));
    });
  };
  return read_cause(body(true), body(false));
}

TEST(ReadCauses, ValuesOfAnotherTensorAreTold) {
  EXPECT_THAT(sibling_is(RecordKind::kActivation, [](const at::Tensor& v) { return v; }),
              IsCause(CauseId::kValuesOfOtherTensor, {{"other", "attn.v"}}));
  EXPECT_THAT(sibling_is(RecordKind::kActivationGrad, [](const at::Tensor& v) { return v; }),
              IsCause(CauseId::kGradientOfOtherActivation, {{"other", "attn.v"}}));
  for (const RecordKind kind : {RecordKind::kActivation, RecordKind::kActivationGrad}) {
    EXPECT_THAT(sibling_is(kind,
                           [](at::Tensor v) {
                             v.view({-1}).select(0, 7).fill_(0.3);
                             return v;
                           }),
                IsNoCause())
        << "one element is nobody's";
  }
}

/// The output of a module with weight [5, 4], in a model where a parameter of 3 rows comes first,
/// off by `error` [4, 3, 5].
Body after_gather(bool whole, const at::Tensor& error) {
  return [=](Sink& sink, int rank) {
    for (const auto& [name, shape] : std::vector<std::pair<std::string, Shape>>{
             {"p.weight", {3, 4}}, {"m.weight", {5, 4}}, {"m.bias", {5}}})
      sink.on_record(site(RecordKind::kParam, name, layout_of(shape)), values(shape, 3));
    const std::vector<Placement> split =
        whole ? std::vector<Placement>{} : std::vector<Placement>{shard(Axis::kDp, 0)};
    const at::Tensor out = values({4, 3, 5}, 9) + (whole ? at::zeros_like(error) : error);
    sink.on_record(site(RecordKind::kActivation, "m", layout_of({4, 3, 5}, split)),
                   whole ? out : out.narrow(0, rank / kTpRanks * 2, 2));
  };
}

TEST(ReadCauses, PaddingOfTheParameterBeforeIsTold) {
  const Body right = after_gather(true, at::zeros({4, 3, 5}));
  const auto wrong = [&](std::int64_t feature, std::int64_t count, const at::Tensor& values) {
    at::Tensor error = at::zeros({4, 3, 5});
    error.narrow(2, feature, count).copy_(values);
    return read_cause(right, after_gather(false, error));
  };
  const at::Tensor by_token = values({4, 3, 1}, 11), row = values({1, 1, 4}, 12);

  // Over dp 2 three rows are padded by one row of 4, which is the first row of m.weight; five rows
  // by one of 4, which is most of m.bias.
  EXPECT_THAT(wrong(0, 1, by_token),
              IsCause(CauseId::kPredecessorPadding,
                      {{"elements", 4}, {"predecessor", "p.weight"}, {"parameter", "m.weight"}}));
  EXPECT_THAT(wrong(0, 4, row),
              IsCause(CauseId::kPredecessorPadding,
                      {{"elements", 4}, {"predecessor", "m.weight"}, {"parameter", "m.bias"}}));
  EXPECT_THAT(wrong(1, 1, by_token), IsCause(CauseId::kPartWrong));
  EXPECT_THAT(wrong(0, 4, by_token), IsNoCause()) << "a bias is the same for every token";
  EXPECT_THAT(wrong(0, 2, by_token), IsCause(CauseId::kPartWrong));
}

TEST(ReadCauses, PaddingInAWeightByFeatureIsTold) {
  const auto norm = [](bool whole, const at::Tensor& added, bool by_token) {
    return Body([=](Sink& sink, int rank) {
      sink.on_record(site(RecordKind::kParam, "p.weight", layout_of({3, 7})), values({3, 7}, 3));
      sink.on_record(site(RecordKind::kParam, "n.weight", layout_of({5})), values({5}, 4));
      const std::vector<Placement> split =
          whole ? std::vector<Placement>{} : std::vector<Placement>{shard(Axis::kDp, 0)};
      const at::Tensor x = values({4, 3, 5}, 9), wrong = by_token ? x.roll(1, 1) : x;
      const at::Tensor out = x * values({5}, 4) + wrong * added;
      sink.on_record(site(RecordKind::kActivation, "n", layout_of({4, 3, 5}, split)),
                     whole ? out : out.narrow(0, rank / kTpRanks * 2, 2));
    });
  };
  const Body right = norm(true, at::zeros({5}), false);

  EXPECT_THAT(read_cause(right, norm(false, values({5}, 12), false)),
              IsCause(CauseId::kPredecessorPadding,
                      {{"elements", 5}, {"predecessor", "p.weight"}, {"parameter", "n.weight"}}));
  EXPECT_THAT(read_cause(right, norm(false, values({5}, 12), true)), IsNoCause())
      << "no weight does that";
}

TEST(ReadCauses, AGradientWithAnotherOnesValuesIsTold) {
  const at::Tensor a = values({6, 4}, 1), b = values({8, 5}, 2);
  const auto gradients = [&](const at::Tensor& first) {
    return Body([=](Sink& sink, int) {
      sink.on_record(site(RecordKind::kGrad, "a", layout_of({6, 4})), first);
      sink.on_record(site(RecordKind::kGrad, "b", layout_of({8, 5})), b);
    });
  };
  const Body right = gradients(a);
  at::Tensor partly = a.clone();
  partly.view({-1}).narrow(0, 0, 12).copy_(b.view({-1}).narrow(0, 28, 12));

  EXPECT_THAT(read_cause(right, gradients(b.view({-1}).narrow(0, 7, 24).view({6, 4}))),
              IsCause(CauseId::kWrongValuesOfOtherTensor, {{"other", "b"}, {"element", 7}}));
  EXPECT_THAT(read_cause(right, gradients(partly)),
              IsCause(CauseId::kWrongValuesOfOtherTensor, {{"other", "b"}, {"element", 28}}));
  EXPECT_THAT(read_cause(right, gradients(values({6, 4}, 5))), IsNoCause());
}

/// Two parameters after a step, of which one holds `values_of_a`.
Cause after_step_is(const at::Tensor& values_of_a, bool is_norm = false) {
  const at::Tensor b = is_norm ? at::ones({8, 5}) : values({8, 5}, 2);
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int) {
      for (const bool is_after : {false, true}) {
        const double moved = is_after ? 0.01 : 0;
        sink.on_record(
            site(RecordKind::kParam, "a", layout_of({6, 4})),
            whole || !is_after ? values({6, 4}, 1) + moved * values({6, 4}, 4) : values_of_a);
        sink.on_record(site(RecordKind::kParam, "b", layout_of({8, 5})),
                       b + moved * (is_norm ? at::zeros({8, 5}) : values({8, 5}, 5)));
      }
    });
  };
  return read_cause(body(true), body(false));
}

TEST(ReadCauses, AParameterWithAnotherOnesValuesAfterAStepIsTold) {
  const at::Tensor b = (values({8, 5}, 2) + 0.01 * values({8, 5}, 5)).view({-1});

  EXPECT_THAT(after_step_is(b.narrow(0, 7, 24).view({6, 4})),
              IsCause(CauseId::kWrongValuesOfOtherTensor, {{"other", "b"}, {"element", 7}}));
  EXPECT_THAT(after_step_is(values({6, 4}, 9)), IsNoCause());
  EXPECT_THAT(after_step_is(at::ones({6, 4}), /*is_norm=*/true), IsNoCause())
      << "ones stand in many places";
}

}  // namespace
}  // namespace isoshard
