// SPDX-License-Identifier: Apache-2.0
/// Records that a run need not have: where it has some, the like of them must be there, and they
/// must fit.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>

#include "harness/judge/judge.h"
#include "harness/testing/said_matchers.h"
#include "harness/testing/synthetic.h"
#include "harness/verdict/verdict.h"

namespace isoshard {
namespace {

using namespace synthetic;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

/// Two layers whose outputs are sums over tp, one step with two micro-batches, and its gradients.
struct Recorded {
  at::ScalarType dtype = at::kFloat;
  bool has_bias = true, has_weights = true;
  double bias = 1;                ///< factor of the bias in what ranks add up to
  double summand = 1, other = 1;  ///< factors of both ranks' summands of layer 1
  double gradient = 1;            ///< of summands
  bool has_clipped = true;
  std::set<std::string> left_out = {};  ///< "l.1.w.micro_batch", on every rank
};

constexpr const char* kSplitModules[] = {"l.0.m", "l.1.m"};

at::Tensor own_summand(const std::string& module, int rank, at::ScalarType dtype) {
  return values({4, 6}, (module == "l.0.m" ? 10 : 20) + rank).to(dtype);
}

/// The sum as the dtype has it.
at::Tensor sum_of_summands(const std::string& module, const Recorded& r) {
  at::Tensor sum = own_summand(module, 0, r.dtype) + own_summand(module, 1, r.dtype);
  return r.has_bias ? sum + r.bias * values({6}, 30).to(r.dtype) : sum;
}

Body recorded_body(const Recorded& r, bool is_whole) {
  return [=](Sink& sink, int rank) {
    const auto record = [&](RecordKind kind, const std::string& name, const at::Tensor& value,
                            const std::vector<Placement>& placements = {}) {
      if (!r.left_out.contains(name))
        sink.on_record(site(kind, name, layout_of(value.sizes().vec(), placements)), value);
    };
    for (const std::string module : kSplitModules) {
      if (r.has_weights) record(RecordKind::kParam, module + ".weight", values({6, 3}, 31));
      if (r.has_bias && r.has_weights)
        record(RecordKind::kParam, module + ".bias", values({6}, 30).to(r.dtype));
    }
    Recorded right = r;
    right.bias = 1;
    for (const std::string module : kSplitModules) {
      const double factor = module == "l.1.m" ? (rank == 0 ? r.summand : r.other) : 1;
      if (!is_whole)
        record(RecordKind::kActivation, module + ".partial",
               own_summand(module, rank, r.dtype) * factor, {partial(Axis::kTp)});
      record(RecordKind::kActivation, module, sum_of_summands(module, right));
    }
    for (const std::string module : kSplitModules) {
      const at::Tensor gradient = values({4, 6}, 40).to(r.dtype);
      record(RecordKind::kActivationGrad, module, gradient);
      if (!is_whole)
        record(RecordKind::kActivationGrad, module + ".partial", gradient * r.gradient);
    }
    for (const std::string parameter : {"l.0.w", "l.1.w", "head"}) {
      record(RecordKind::kGrad, parameter + ".micro_batch", values({6, 3}, 50));
      record(RecordKind::kGrad, parameter, values({6, 3}, 51));
    }
    record(RecordKind::kScalar, "grad_norm", at::full({1}, 1.0, at::kDouble));
    for (const std::string parameter : {"l.0.w", "l.1.w", "head"}) {
      if (!is_whole && r.has_clipped)
        record(RecordKind::kGrad, parameter + ".clipped", values({6, 3}, 51));
    }
  };
}

Verdict recorded_verdict(const Recorded& r, JudgePolicy policy = {}, bool has_responses = false) {
  policy = with_unused_axes(policy);
  policy.activation_grad_scale = 1;
  policy.coarsest = r.dtype == at::kBFloat16 ? Dtype::kBFloat16 : Dtype::kFloat32;
  if (!has_responses && policy.level != Level::kExact) policy.rtol = 1e-6;
  Recorded right;
  right.dtype = r.dtype;
  right.has_bias = r.has_bias;
  right.has_weights = r.has_weights;
  const Reference wanted = reference(recorded_body(right, /*is_whole=*/true));
  const MeshShape mesh({{Axis::kTp, 2}});
  return judge(wanted, run(mesh, &wanted, recorded_body(r, false), Keep::kWhatDiffers, policy),
               policy);
}

TEST(Summands, AddUpToTheOutputAndItsBias) {
  for (const bool has_bias : {false, true}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const Level level : {Level::kPerturbed, Level::kExact}) {
        JudgePolicy policy;
        policy.level = level;
        const Verdict verdict = recorded_verdict({.dtype = dtype, .has_bias = has_bias}, policy);

        EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
        EXPECT_THAT(verdict.reason, Not(HasSubstr("not judged")));
      }
    }
  }
}

TEST(Summands, ThatDoNotAddUpDiverge) {
  for (const Level level : {Level::kPerturbed, Level::kExact}) {
    JudgePolicy policy;
    policy.level = level;
    for (const Recorded& wrong :
         {Recorded{.summand = 1.1}, Recorded{.summand = 0, .other = 0}, Recorded{.summand = -1},
          Recorded{.dtype = at::kBFloat16, .other = 2}}) {
      const Verdict verdict = recorded_verdict(wrong, policy);

      ASSERT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
      EXPECT_EQ(verdict.findings.front().key.name, "l.1.m.partial");
    }
  }
}

TEST(Summands, HaveTheGradientOfTheirSum) {
  const Verdict verdict = recorded_verdict({.gradient = 2});

  ASSERT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  EXPECT_EQ(verdict.findings.front().key,
            (RecordKey{0, RecordKind::kActivationGrad, "l.0.m.partial", 0}));
}

// A bias that nobody recorded may be part of the output.
TEST(Summands, OfModulesWithoutAWeightAreSaidNotToBeJudged) {
  const Verdict verdict = recorded_verdict({.has_weights = false, .summand = 7});

  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
  EXPECT_THAT(verdict.reason, HasSubstr("2 summands whose sum is not known were not judged, first "
                                        "forward at l.0.m.partial (step 0)"));
}

TEST(OptionalRecords, AreAskedForWhereTheLikeOfThemIs) {
  for (const char* const name :
       {"l.1.w.micro_batch", "l.1.w.clipped", "head.clipped", "l.1.m.partial"}) {
    const Verdict verdict = recorded_verdict({.left_out = {name}});

    ASSERT_EQ(verdict.status, Status::kDiverges) << name << ": " << verdict.reason;
    EXPECT_EQ(verdict.findings.front().key.name, name);
    EXPECT_THAT(
        verdict.findings.front(),
        testing::AnyOf(FindingIs(FindingId::kMissing), FindingIs(FindingId::kMissingBesideLikes)));
    JudgePolicy allowed;
    allowed.not_recorded = {"*/" + std::string(name)};
    EXPECT_EQ(recorded_verdict({.left_out = {name}}, allowed).status, Status::kConforms) << name;
  }
}

TEST(OptionalRecords, MayBeLeftOutTogether) {
  const Verdict verdict =
      recorded_verdict({.has_clipped = false,
                        .left_out = {"l.0.w.micro_batch", "l.1.w.micro_batch", "head.micro_batch",
                                     "l.0.m.partial", "l.1.m.partial"}});

  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
  EXPECT_THAT(verdict.reason, Not(HasSubstr("not recorded")));
}

// What only some ranks hold summands of, no layout says.
TEST(OptionalRecords, OfWhichNothingIsAlikeAreSaidToBeLeftOut) {
  const Verdict verdict = recorded_verdict({.left_out = {"head.micro_batch"}});

  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
  EXPECT_THAT(verdict.reason, HasSubstr("1 gradient between micro-batches was not recorded, first "
                                        "gradient of head.micro_batch (step 0)"));
}

}  // namespace
}  // namespace isoshard
