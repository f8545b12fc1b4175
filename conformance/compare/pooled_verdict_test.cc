// SPDX-License-Identifier: Apache-2.0
/// What 16-bit runs hide from the plain reference tensor by tensor is found by pools, and correct
/// runs are not: on the small preset in bf16, tp 2 x dp 2.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "fixtures/cases/presets.h"
#include "harness/judge/judge.h"
#include "harness/judge/replay.h"
#include "suite/record/run_case.h"
#include "suite/reference/redrawn_run.h"
#include "suite/reference/reference.h"

namespace isoshard {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

/// The factor on a record of a rank; 1: it stays.
using Edit = std::function<double(const RecordKey& key, int rank)>;

/// Rounds to nearest, ties to even; finite numbers only.
std::uint16_t to_bf16(double value) {
  const auto narrow = static_cast<float>(value);
  std::uint32_t bits = 0;
  std::memcpy(&bits, &narrow, sizeof(bits));
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

/// `value`, a number in bf16, as it may have been before it was rounded: the `index`th of numbers
/// spread evenly over what rounds to it. A factor that is at work in the run meets that number: the
/// rounded one would take a factor below 1.002 back.
double before_rounding(double value, std::int64_t index) {
  constexpr double kGoldenRatio = 0.6180339887498949;
  const double part = static_cast<double>(index + 1) * kGoldenRatio;
  const double ulp = std::ldexp(1.0, std::ilogb(value) - 7);
  return value == 0 ? 0 : value + (part - std::floor(part) - 0.5) * ulp;
}

/// The run as if its ranks had computed other values.
Trace edited(const Trace& trace, const Reference& reference, const JudgePolicy& policy,
             const Edit& edit) {
  std::vector<std::byte> bytes;
  return replayed(trace, reference, policy, [&](const RankTrace& rank, const Record& record) {
    HostTensor tensor = rank.tensor(record);
    bytes.assign(tensor.bytes.begin(), tensor.bytes.end());
    const double factor = edit(record.key, rank.rank);
    for (std::int64_t i = 0; factor != 1 && i < tensor.numel(); ++i) {
      const double value = value_at(tensor.bytes.data(), tensor.dtype, i);
      if (tensor.dtype == Dtype::kBFloat16) {
        const std::uint16_t rounded = to_bf16(factor * before_rounding(value, i));
        std::memcpy(bytes.data() + 2 * i, &rounded, sizeof(rounded));
      } else {
        EXPECT_EQ(tensor.dtype, Dtype::kFloat64) << describe(record.key);
        const double edited = factor * value;
        std::memcpy(bytes.data() + 8 * i, &edited, sizeof(edited));
      }
    }
    tensor.bytes = bytes;
    return std::optional(tensor);
  });
}

class PooledVerdict : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    for (const Case& c : small_preset()) {
      if (c.subject == "autotp" && c.dtype == Dtype::kBFloat16 && c.degrees.tp == 2 &&
          c.degrees.dp == 2)
        case_ = std::make_unique<Case>(c);
    }
    ASSERT_NE(case_, nullptr);
    ASSERT_EQ(case_->world_size(), 4);
    reference_ = std::make_unique<Reference>(make_reference(*case_));
    add_redrawn_runs(*case_, *reference_);
    RunOptions options;
    options.keep = Keep::kEverything;
    run_ = std::make_unique<Trace>(run_case(*case_, *reference_, options));
  }
  static void TearDownTestSuite() {
    run_.reset();
    reference_.reset();
    case_.reset();
  }

  static Verdict verdict_on(const Edit& edit) {
    const JudgePolicy policy = policy_of(*case_);
    return judge(*reference_, edited(*run_, *reference_, policy, edit), policy);
  }
  static bool is_gradient(const RecordKey& key) {
    return key.kind == RecordKind::kGrad || key.kind == RecordKind::kOptimizer ||
           key.name == "grad_norm";
  }

  static std::unique_ptr<Case> case_;
  static std::unique_ptr<Reference> reference_;
  static std::unique_ptr<Trace> run_;
};
std::unique_ptr<Case> PooledVerdict::case_;
std::unique_ptr<Reference> PooledVerdict::reference_;
std::unique_ptr<Trace> PooledVerdict::run_;

TEST_F(PooledVerdict, OfACorrectRunConformsAndSaysWhatItWouldHaveMissed) {
  const Verdict verdict = verdict_on([](const RecordKey&, int) { return 1.0; });

  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
  EXPECT_GT(verdict.pools.size(), 100U);
  EXPECT_THAT(verdict.would_miss, StartsWith("scale errors below "));
  EXPECT_THAT(verdict.would_miss, HasSubstr(" % in all gradients, "));
}

TEST_F(PooledVerdict, FindsTwoThousandthsOnAllGradients) {
  for (const double factor : {1.002, 0.998, 1.01}) {
    const Verdict verdict =
        verdict_on([&](const RecordKey& key, int) { return is_gradient(key) ? factor : 1.0; });

    ASSERT_EQ(verdict.status, Status::kDiverges) << factor;
    EXPECT_EQ(verdict.findings.front().stage, Stage::kParameterGrad) << verdict.reason;
    EXPECT_THAT(verdict.findings.front().what, StartsWith("all gradients (step 0): scale"));
  }
}

TEST_F(PooledVerdict, FindsHalfAThousandthOnTheLosses) {
  const Verdict verdict = verdict_on([](const RecordKey& key, int) {
    return key.kind == RecordKind::kScalar && key.name.starts_with("loss") ? 1.0005 : 1.0;
  });

  ASSERT_EQ(verdict.status, Status::kDiverges);
  EXPECT_EQ(verdict.findings.front().stage, Stage::kForward) << verdict.reason;
  EXPECT_THAT(verdict.reason, HasSubstr("loss"));
}

TEST_F(PooledVerdict, FindsTwoHundredthsOnAnyMatrixAndFiveOnAnyNorm) {
  int matrices = 0, norms = 0;
  for (const Record& record : reference_->trace().ranks.at(0).records) {
    const RecordKey& wanted = record.key;
    if (wanted.kind != RecordKind::kGrad || wanted.name.ends_with(".bias")) continue;
    const bool is_matrix = record.layout.global_shape.size() == 2;
    ++(is_matrix ? matrices : norms);
    const double factor = is_matrix ? 1.02 : 1.05;

    const Verdict verdict = verdict_on([&](const RecordKey& key, int) {
      return is_gradient(key) && key.name.starts_with(wanted.name) ? factor : 1.0;
    });

    ASSERT_EQ(verdict.status, Status::kDiverges) << wanted.name << " " << verdict.would_miss;
    EXPECT_THAT(verdict.reason, HasSubstr(wanted.name));
  }
  EXPECT_GE(matrices, 15);
  EXPECT_EQ(norms, 5);
}

TEST_F(PooledVerdict, FindsALayersARanksAndTheActivationsFactors) {
  const struct {
    const char* what;
    Edit edit;
  } rows[] = {
      {"gradients of layer 1 by 1 %",
       [](const RecordKey& key, int) {
         return is_gradient(key) && key.name.starts_with("model.layers.1.") ? 1.01 : 1.0;
       }},
      {"gradients of tp rank 1 by 1 %",
       [](const RecordKey& key, int rank) {
         return is_gradient(key) && key.kind != RecordKind::kScalar && rank % 2 == 1 ? 1.01 : 1.0;
       }},
      {"activations by 1 %",
       [](const RecordKey& key, int) { return key.kind == RecordKind::kActivation ? 1.01 : 1.0; }},
      {"activation gradients by 1 %",
       [](const RecordKey& key, int) {
         return key.kind == RecordKind::kActivationGrad ? 1.01 : 1.0;
       }},
  };
  for (const auto& [what, edit] : rows)
    EXPECT_EQ(verdict_on(edit).status, Status::kDiverges) << what;
}

}  // namespace
}  // namespace isoshard
