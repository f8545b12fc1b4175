// SPDX-License-Identifier: Apache-2.0
// Contracts oracle.*: what our models compute is what Hugging
// Face transformers computes, each bound a claim of its own.
#include "fixtures/oracle/oracle.h"

#include <unistd.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <set>

#include "core/base/error.h"
#include "core/io/tensor_files.h"
#include "fixtures/oracle/arithmetic_digest.h"

namespace isoshard {
namespace {

using testing::HasSubstr;

std::filesystem::path case_folder(std::string_view name) {
  return std::filesystem::path(ISOSHARD_ORACLE_DIR) / name;
}

/// Reports are made once per case: several claims read them.
const OracleReport& report_of(const std::string& name) {
  static std::map<std::string, OracleReport> reports;
  const auto found = reports.find(name);
  return found != reports.end()
             ? found->second
             : reports.emplace(name, check_oracle(case_folder(name))).first->second;
}

struct Case {
  const char* name;
  /// Of two layers each; the rest: embeddings, final norm, own head
  std::size_t layer_parameters, fixed_parameters;
  /// Parameters a layer that are a bias of the keys, or
  std::size_t key_biases;
  std::size_t fused_key_biases;  ///< hold one beside others: judged in two parts
  bool has_same_ops = true;      ///< in bf16, so that bits can be equal
};
// Qwen2: 4 matrices and 3 biases, 3 matrices, 2 norms. Qwen3: 7 matrices, 4 norms. Llama and
// Mistral: 7 matrices, 2 norms. GPT-2: 4 matrices with biases, 2 norms with biases, and outside of
// the layers two embeddings and one norm with bias; Megatron's GPT the same, and without biases and
// positions 4 matrices and 2 norms with biases.
constexpr std::array kCases{
    Case{"qwen2_tied_gqa", 12, 2, 1, 0},
    Case{"qwen2_untied_mha", 12, 3, 1, 0},
    Case{"qwen3_qk_norm", 11, 3, 0, 0},
    Case{"llama_untied_gqa", 9, 3, 0, 0},
    Case{"llama3_rope_scaling", 9, 2, 0, 0},
    Case{"mistral_gqa_own_head_dim", 9, 3, 0, 0},
    Case{"gpt2_learned_positions", 12, 4, 0, 1},
    Case{"megatron_gpt_learned_positions", 12, 4, 0, 1, false},
    Case{"megatron_gpt_rope", 8, 4, 0, 0, false},
};

enum class Rows : std::uint8_t {
  kOne,
  kHiddenStates,
  kSteps,
  kParameters,
  kNoKeyBiases,
  kKeyBiases
};

std::size_t count_of(Rows rows, const Case& tested) {
  const std::size_t parameters = 2 * tested.layer_parameters + tested.fixed_parameters;
  switch (rows) {
    case Rows::kOne:
      return 1;
    case Rows::kHiddenStates:
      return 3;
    case Rows::kSteps:
      return 10;
    case Rows::kParameters:
      return parameters;
    case Rows::kNoKeyBiases:
      return parameters - 2 * tested.key_biases;
    case Rows::kKeyBiases:
      return 2 * (tested.key_biases + tested.fused_key_biases);
  }
  return 0;
}

struct Claim {
  const char* slug;
  const char* text;  ///< OracleRow::claim
  double bound;      ///< what the project promises, written out here a second time
  Rows rows;         ///< how many rows are expected
};
constexpr std::array kClaims{
    Claim{"fp64_hidden_eager", "fp64 hidden states (eager)", 1e-12, Rows::kHiddenStates},
    Claim{"fp64_logits_eager", "fp64 logits (eager)", 1e-12, Rows::kOne},
    Claim{"fp64_loss_eager", "fp64 loss (eager)", 1e-12, Rows::kOne},
    Claim{"fp64_gradients_eager", "fp64 gradients (eager)", 1e-12, Rows::kParameters},
    Claim{"fp64_hidden_sdpa", "fp64 hidden states (sdpa)", 1e-12, Rows::kHiddenStates},
    Claim{"fp64_logits_sdpa", "fp64 logits (sdpa)", 1e-12, Rows::kOne},
    Claim{"fp64_loss_sdpa", "fp64 loss (sdpa)", 1e-12, Rows::kOne},
    Claim{"fp64_gradients_sdpa", "fp64 gradients (sdpa)", 1e-12, Rows::kParameters},
    Claim{"fp32_logits_eager", "fp32 logits (eager)", 2e-6, Rows::kOne},
    Claim{"fp32_loss_eager", "fp32 loss (eager)", 2e-6, Rows::kOne},
    Claim{"fp32_gradients_eager", "fp32 gradients (eager)", 1e-5, Rows::kParameters},
    Claim{"fp32_logits_sdpa", "fp32 logits (sdpa)", 2e-6, Rows::kOne},
    Claim{"fp32_loss_sdpa", "fp32 loss (sdpa)", 2e-6, Rows::kOne},
    Claim{"fp32_gradients_sdpa", "fp32 gradients (sdpa)", 1e-5, Rows::kParameters},
    Claim{"adamw_losses", "adamw losses", 1e-5, Rows::kSteps},
    Claim{"adamw_norms", "adamw gradient norms", 1e-5, Rows::kSteps},
    Claim{"adamw_parameters", "adamw trained parameters", 2e-5, Rows::kNoKeyBiases},
    Claim{"adamw_key_biases", "adamw trained key biases", 2e-3, Rows::kKeyBiases},
    Claim{"sgd_losses", "sgd losses", 1e-5, Rows::kSteps},
    Claim{"sgd_norms", "sgd gradient norms", 1e-5, Rows::kSteps},
    Claim{"sgd_parameters", "sgd trained parameters", 5e-6, Rows::kParameters},
};

class Oracle : public testing::TestWithParam<std::tuple<Case, Claim>> {};

TEST_P(Oracle, Holds) {
  const auto& [tested, claim] = GetParam();

  const OracleReport& report = report_of(tested.name);

  std::size_t compared = 0;
  for (const OracleRow& row : report.rows) {
    if (row.claim != claim.text) continue;
    ++compared;
    EXPECT_TRUE(row.error <= claim.bound)
        << row.tensor << ": relative error " << row.error << ", bound " << claim.bound;
    EXPECT_EQ(row.bound, claim.bound) << "the check itself uses another bound";
  }
  EXPECT_EQ(compared, count_of(claim.rows, tested));
}

INSTANTIATE_TEST_SUITE_P(Models, Oracle,
                         testing::Combine(testing::ValuesIn(kCases), testing::ValuesIn(kClaims)),
                         [](const auto& tested) {
                           return fmt::format("{}_{}", std::get<0>(tested.param).name,
                                              std::get<1>(tested.param).slug);
                         });

// ---- bf16: bit for bit where the machine rounds like the recording one, else no further from fp64
// than twice what was stored

class OracleBf16 : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Models, OracleBf16, testing::ValuesIn(kCases),
                         [](const auto& tested) { return std::string(tested.param.name); });

/// The rows of `claim`; all of them hold.
std::vector<OracleRow> rows_that_hold(const OracleReport& report, std::string_view claim) {
  std::vector<OracleRow> rows;
  for (const OracleRow& row : report.rows) {
    if (row.claim != claim) continue;
    rows.push_back(row);
    EXPECT_TRUE(row.ok()) << claim << ' ' << row.tensor << ": " << row.error << ", bound "
                          << row.bound;
  }
  return rows;
}

TEST_P(OracleBf16, LogitsAndGradientsAreThoseOfTransformers) {
  const bool exact = GetParam().has_same_ops && rounds_like_the_oracle(arithmetic_digest());
  RecordProperty("arithmetic_digest", digest_text(arithmetic_digest()));
  RecordProperty("level", exact ? "bit-equal" : "bounded");
  const std::string suffix = exact ? "(eager, exact)" : "(eager)";

  const OracleReport& report = report_of(GetParam().name);
  const auto logits = rows_that_hold(report, "bf16 logits " + suffix),
             gradients = rows_that_hold(report, "bf16 gradients " + suffix);

  ASSERT_EQ(logits.size(), 1U);
  EXPECT_EQ(gradients.size(), count_of(Rows::kParameters, GetParam()));
  EXPECT_EQ(logits[0].bound == 0, exact);
}

TEST_P(OracleBf16, EitherAttentionIsWithinTwiceTheStoredDistanceFromFp64) {
  OracleOptions options;
  options.training = false;
  options.exact_bf16 = false;

  const OracleReport report = check_oracle(case_folder(GetParam().name), options);

  for (const std::string suffix : {"(eager)", "(sdpa)"}) {
    const auto logits = rows_that_hold(report, "bf16 logits " + suffix),
               gradients = rows_that_hold(report, "bf16 gradients " + suffix);
    ASSERT_EQ(logits.size(), 1U);
    EXPECT_GT(logits[0].bound, 2e-3) << "twice a bf16 run's distance from fp64";
    EXPECT_LT(logits[0].bound, 5e-2);
    EXPECT_EQ(gradients.size(), count_of(Rows::kParameters, GetParam()));
  }
}

TEST(OracleBf16Control, OneBitOfOneWeightBreaksExactness) {
  OracleOptions options;
  options.training = false;
  options.exact_bf16 = true;
  options.change_weights = [](Parameters& weights) {
    at::Tensor row = weights.at("model.layers.1.mlp.up_proj.weight")[3];
    row.mul_(1.0 + 1.0 / 128);
  };

  const OracleReport report = check_oracle(case_folder("llama_untied_gqa"), options);

  for (const char* const claim : {"bf16 logits (eager, exact)", "bf16 gradients (eager, exact)"}) {
    EXPECT_TRUE(std::ranges::any_of(report.rows, [&](const OracleRow& row) {
      return row.claim == claim && !row.ok();
    })) << claim;
  }
}

TEST(OracleBf16Control, ASkippedNormLeavesTheBound) {
  OracleOptions options;
  options.training = false;
  options.exact_bf16 = false;
  options.change_weights = [](Parameters& weights) {
    weights.at("model.layers.1.self_attn.q_norm.weight").fill_(1);
  };

  const OracleReport report = check_oracle(case_folder("qwen3_qk_norm"), options);

  EXPECT_TRUE(std::ranges::any_of(report.rows, [](const OracleRow& row) {
    return row.claim == "bf16 logits (eager)" && !row.ok();
  }));
}

TEST(ArithmeticDigest, IsTheSameEachTimeAndSixteenDigits) {
  const std::uint64_t first = arithmetic_digest();

  EXPECT_EQ(arithmetic_digest(), first);
  EXPECT_EQ(digest_text(first).size(), 16U);
  EXPECT_EQ(digest_text(0xab), "00000000000000ab");
  EXPECT_FALSE(rounds_like_the_oracle(first + 1));
}

// ---- the check fails when it must

struct Change {
  const char* slug;
  const char* folder;
  std::function<void(ModelConfig&)> config;
  std::function<void(Parameters&)> weights;
  const char* first;  ///< the first claim that diverges
};

void PrintTo(const Change& change, std::ostream* out) {
  *out << change.slug;
}

std::vector<Change> changes() {
  const auto scale = [](const char* name, double factor) {
    return [=](Parameters& weights) { weights.at(name).mul_(factor); };
  };
  constexpr const char* kHidden = "fp64 hidden states (eager)";
  constexpr const char *kQwen2 = "qwen2_untied_mha", *kLlama3 = "llama3_rope_scaling",
                       *kGpt2 = "gpt2_learned_positions";
  return {
      {"rope_theta_doubled", kQwen2, [](ModelConfig& c) { c.rope.theta *= 2; }, {}, kHidden},
      {"norm_eps_larger", kQwen2, [](ModelConfig& c) { c.norm_eps = 1e-5; }, {}, kHidden},
      {"weight_scaled", kQwen2, {}, scale("model.layers.1.mlp.down_proj.weight", 1.001), kHidden},
      {"key_bias_scaled",
       kQwen2,
       {},
       scale("model.layers.0.self_attn.k_proj.bias", 1.001),
       kHidden},
      {"final_norm_scaled", kQwen2, {}, scale("model.norm.weight", 1.001), kHidden},
      {"head_scaled", kQwen2, {}, scale("lm_head.weight", 1.001), "fp64 logits (eager)"},
      {"weight_nan",
       kQwen2,
       {},
       scale("model.layers.0.mlp.up_proj.weight", std::numeric_limits<double>::quiet_NaN()),
       kHidden},
      {"q_norm_off", "qwen3_qk_norm", [](ModelConfig& c) { c.qk_norm = false; }, {}, kHidden},
      {"k_norm_scaled",
       "qwen3_qk_norm",
       {},
       scale("model.layers.0.self_attn.k_norm.weight", 1.001),
       kHidden},
      {"rope_scaling_off",
       kLlama3,
       [](ModelConfig& c) {
         c.rope = {"default", c.rope.theta};
       },
       {},
       kHidden},
      {"rope_factor_larger", kLlama3, [](ModelConfig& c) { c.rope.factor *= 1.01; }, {}, kHidden},
      {"rope_original_length_other",
       kLlama3,
       [](ModelConfig& c) { c.rope.original_max_positions = 65; },
       {},
       kHidden},
      {"positions_scaled", kGpt2, {}, scale("transformer.wpe.weight", 1.001), kHidden},
      {"row_bias_scaled", kGpt2, {}, scale("transformer.h.0.attn.c_proj.bias", 1.001), kHidden},
      {"layer_norm_bias_scaled", kGpt2, {}, scale("transformer.ln_f.bias", 1.001), kHidden},
      {"layer_norm_eps_larger", kGpt2, [](ModelConfig& c) { c.norm_eps = 1e-4; }, {}, kHidden},
      {"megatron_theta_doubled",
       "megatron_gpt_rope",
       [](ModelConfig& c) { c.rope.theta *= 2; },
       {},
       kHidden},
      {"megatron_qkv_bias_scaled",
       "megatron_gpt_learned_positions",
       {},
       scale("decoder.layers.0.self_attention.linear_qkv.bias", 1.001),
       kHidden},
      {"megatron_heads_before_groups",  // rows of q, k and v one after the other, as GPT-2 has them
       "megatron_gpt_rope",
       {},
       [](Parameters& weights) {
         at::Tensor& fused = weights.at("decoder.layers.1.self_attention.linear_qkv.weight");
         fused = fused.view({2, 4, 12, -1}).transpose(0, 1).reshape(fused.sizes());
       },
       kHidden},
  };
}

class OracleControl : public testing::TestWithParam<Change> {};

TEST_P(OracleControl, DivergesAndSaysWhere) {
  OracleOptions options;
  options.change_config = GetParam().config;
  options.change_weights = GetParam().weights;
  options.training = false;

  const OracleReport report = check_oracle(case_folder(GetParam().folder), options);

  EXPECT_FALSE(report.ok());
  const auto failed =
      std::ranges::find_if(report.rows, [](const OracleRow& row) { return !row.ok(); });
  ASSERT_NE(failed, report.rows.end());
  EXPECT_EQ(failed->claim, GetParam().first) << failed->tensor;
  EXPECT_THAT(render(report), HasSubstr("DIVERGES"));
}

INSTANTIATE_TEST_SUITE_P(Changes, OracleControl, testing::ValuesIn(changes()),
                         [](const auto& tested) { return tested.param.slug; });

TEST(OracleTraining, DivergesInTheFirstLossIfOneWeightIsChanged) {
  OracleOptions options;
  options.change_weights = [](Parameters& weights) { weights.at("lm_head.weight").mul_(1.001); };

  const OracleReport report = check_oracle(case_folder("qwen2_untied_mha"), options);

  for (const char* const claim :
       {"adamw losses", "adamw gradient norms", "adamw trained parameters", "sgd losses",
        "sgd gradient norms", "sgd trained parameters"}) {
    EXPECT_TRUE(std::ranges::any_of(report.rows, [&](const OracleRow& row) {
      return row.claim == claim && !row.ok();
    })) << claim;
  }
}

TEST(OracleRows, NanIsNeverOk) {
  const OracleRow row{"claim", "tensor", std::nan(""), 1.0};

  EXPECT_FALSE(row.ok());
  EXPECT_FALSE((OracleReport{"case", {row}}).ok());
}

TEST(OracleRows, NothingComparedIsNotOk) {
  EXPECT_FALSE((OracleReport{"case", {}}).ok());
  EXPECT_THAT(render(OracleReport{"case", {}}), HasSubstr("nothing was compared"));
}

// ---- folders that cannot be judged

std::string error_of(const std::filesystem::path& folder) {
  try {
    static_cast<void>(check_oracle(folder));
  } catch (const FileError& error) {
    return error.what();
  }
  return "no FileError";
}

TEST(OracleFolders, AMissingFolderIsNamed) {
  EXPECT_THAT(error_of("/nonexistent/oracle"), HasSubstr("/nonexistent/oracle/config.json"));
}

/// A copy of a case that lacks one tensor of one file.
class CopyOfCase {
 public:
  explicit CopyOfCase(std::string_view name)
      : folder_(std::filesystem::path(testing::TempDir()) /
                fmt::format("isoshard_oracle_{}_{}", name, ::getpid())) {
    std::filesystem::remove_all(folder_);
    std::filesystem::copy(case_folder(name), folder_);
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      std::filesystem::permissions(entry.path(), std::filesystem::perms::owner_write,
                                   std::filesystem::perm_options::add);
    }
  }
  CopyOfCase(const CopyOfCase&) = delete;
  CopyOfCase& operator=(const CopyOfCase&) = delete;
  ~CopyOfCase() { std::filesystem::remove_all(folder_); }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return folder_; }

  void drop(const char* file_name, std::string_view tensor) const {
    std::vector<NamedTensor> kept;
    {
      const SafetensorsFile file = SafetensorsFile::open(folder_ / file_name);
      for (const std::string& name : file.names()) {
        if (name != tensor) kept.push_back({name, tensor_of(file.tensor(name)).clone()});
      }
    }
    write_safetensors(folder_ / file_name, kept);
  }

  /// The last element of a tensor of ids.
  void set_last(const char* file_name, std::string_view tensor, std::int64_t id) const {
    std::vector<NamedTensor> kept;
    {
      const SafetensorsFile file = SafetensorsFile::open(folder_ / file_name);
      for (const std::string& name : file.names()) {
        kept.push_back({name, tensor_of(file.tensor(name)).clone()});
        if (name == tensor) kept.back().tensor.view({-1})[-1].fill_(id);
      }
    }
    write_safetensors(folder_ / file_name, kept);
  }

 private:
  std::filesystem::path folder_;
};

TEST(OracleFolders, AMissingTensorIsNamed) {
  const CopyOfCase gradient("qwen2_tied_gqa"), hidden("qwen2_untied_mha");
  gradient.drop("expected.safetensors", "grad.model.norm.weight");
  hidden.drop("expected.safetensors", "hidden.1");

  EXPECT_THAT(error_of(gradient.path()), HasSubstr("grad.model.norm.weight"));
  EXPECT_THAT(error_of(hidden.path()), HasSubstr("hidden.1"));
}

TEST(OracleFolders, AMissingWeightIsNamed) {
  const CopyOfCase copy("qwen2_untied_mha");
  copy.drop("model.safetensors", "lm_head.weight");

  EXPECT_THAT(error_of(copy.path()), HasSubstr("lm_head.weight"));
}

TEST(OracleFolders, WithoutPackedDocumentsAndTrainingAreComparedInTheRest) {
  const CopyOfCase copy("qwen2_tied_gqa");
  for (const char* name : {"packed.safetensors", "train_adamw.json", "train_sgd.json"})
    std::filesystem::remove(copy.path() / name);

  const OracleReport report = check_oracle(copy.path());

  EXPECT_TRUE(report.ok());
  EXPECT_EQ(report.not_checked.size(), 3U);
  EXPECT_TRUE(report_of("qwen2_tied_gqa").not_checked.empty());
  std::set<std::string> claims;
  for (const OracleRow& row : report_of("qwen2_tied_gqa").rows) {
    const bool needs_them = row.claim.find("packed") != std::string::npos ||
                            row.claim.starts_with("adamw") || row.claim.starts_with("sgd");
    if (!needs_them) claims.insert(row.claim);
  }
  std::set<std::string> checked;
  for (const OracleRow& row : report.rows) checked.insert(row.claim);
  EXPECT_EQ(checked, claims);
}

TEST(OracleFolders, OfAModelAloneSayWhatIsMissing) {
  for (const char* name : {"expected.safetensors", "batch.safetensors"}) {
    const CopyOfCase copy("qwen2_tied_gqa");
    std::filesystem::remove(copy.path() / name);
    EXPECT_THAT(error_of(copy.path()), AllOf(testing::StartsWith((copy.path() / name).string()),
                                             HasSubstr("make_oracle.py")));
  }
}

TEST(OracleFolders, IdsOutsideTheVocabularyAreRefusedWithFileAndNumber) {
  struct Spoilt {
    const char *file, *tensor;
    std::int64_t id;
    const char* words;
  };
  constexpr std::int64_t kFar = std::int64_t{1} << 62;
  for (const Spoilt& spoilt :
       {Spoilt{"batch.safetensors", "input_ids", -1, "input_ids must be from 0 to "},
        Spoilt{"batch.safetensors", "input_ids", -100, "input_ids must be from 0 to "},
        Spoilt{"batch.safetensors", "labels", kFar, "labels must be from 0 to "},
        Spoilt{"batch.safetensors", "labels", -1, ", or -100, got -1"},
        Spoilt{"train_batches.safetensors", "batches", kFar, "batches must be from 0 to "}}) {
    for (const char* name : {"qwen2_tied_gqa", "gpt2_learned_positions"}) {
      const CopyOfCase copy(name);
      copy.set_last(spoilt.file, spoilt.tensor, spoilt.id);

      EXPECT_THAT(error_of(copy.path()),
                  AllOf(testing::StartsWith((copy.path() / spoilt.file).string()),
                        HasSubstr(spoilt.words), HasSubstr(fmt::format("got {}", spoilt.id))));
    }
  }
}

}  // namespace
}  // namespace isoshard
