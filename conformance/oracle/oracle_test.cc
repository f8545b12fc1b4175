// SPDX-License-Identifier: Apache-2.0
// Contracts oracle.*: what our Qwen2 computes is what Hugging Face transformers computes, each bound a claim of its own.
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

#include "base/error.h"
#include "io/safetensors.h"

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
  return found != reports.end() ? found->second : reports.emplace(name, check_oracle(case_folder(name))).first->second;
}

struct Claim {
  const char* slug;
  const char* text;              ///< OracleRow::claim
  double bound;                  ///< what the project promises, written out here a second time
  std::size_t per_layer, fixed;  ///< rows expected: per_layer * 2 layers + fixed (an own head adds one to gradients and parameters)
};
// 12 parameters a layer (4 matrices and 3 biases, 3 matrices, 2 norms), embedding and final norm.
constexpr std::array kClaims{
    Claim{"fp64_hidden_eager", "fp64 hidden states (eager)", 1e-12, 1, 1},
    Claim{"fp64_logits_eager", "fp64 logits (eager)", 1e-12, 0, 1},
    Claim{"fp64_loss_eager", "fp64 loss (eager)", 1e-12, 0, 1},
    Claim{"fp64_gradients_eager", "fp64 gradients (eager)", 1e-12, 12, 2},
    Claim{"fp64_hidden_sdpa", "fp64 hidden states (sdpa)", 1e-12, 1, 1},
    Claim{"fp64_logits_sdpa", "fp64 logits (sdpa)", 1e-12, 0, 1},
    Claim{"fp64_loss_sdpa", "fp64 loss (sdpa)", 1e-12, 0, 1},
    Claim{"fp64_gradients_sdpa", "fp64 gradients (sdpa)", 1e-12, 12, 2},
    Claim{"fp32_logits_eager", "fp32 logits (eager)", 2e-6, 0, 1},
    Claim{"fp32_loss_eager", "fp32 loss (eager)", 2e-6, 0, 1},
    Claim{"fp32_gradients_eager", "fp32 gradients (eager)", 1e-5, 12, 2},
    Claim{"fp32_logits_sdpa", "fp32 logits (sdpa)", 2e-6, 0, 1},
    Claim{"fp32_loss_sdpa", "fp32 loss (sdpa)", 2e-6, 0, 1},
    Claim{"fp32_gradients_sdpa", "fp32 gradients (sdpa)", 1e-5, 12, 2},
    Claim{"adamw_losses", "adamw losses", 1e-5, 0, 10},
    Claim{"adamw_norms", "adamw gradient norms", 1e-5, 0, 10},
    Claim{"adamw_parameters", "adamw trained parameters", 2e-5, 11, 2},
    Claim{"adamw_key_biases", "adamw trained key biases", 2e-3, 1, 0},
    Claim{"sgd_losses", "sgd losses", 1e-5, 0, 10},
    Claim{"sgd_norms", "sgd gradient norms", 1e-5, 0, 10},
    Claim{"sgd_parameters", "sgd trained parameters", 5e-6, 12, 2},
};

class Oracle : public testing::TestWithParam<std::tuple<std::string, Claim>> {};

TEST_P(Oracle, Holds) {
  const auto& [name, claim] = GetParam();
  const bool has_own_head = name.find("untied") != std::string::npos && claim.per_layer >= 11;

  const OracleReport& report = report_of(name);

  std::size_t compared = 0;
  for (const OracleRow& row : report.rows) {
    if (row.claim != claim.text) continue;
    ++compared;
    EXPECT_TRUE(row.error <= claim.bound) << row.tensor << ": relative error " << row.error << ", bound " << claim.bound;
    EXPECT_EQ(row.bound, claim.bound) << "the check itself uses another bound";
  }
  EXPECT_EQ(compared, claim.per_layer * 2 + claim.fixed + (has_own_head ? 1 : 0));
}

INSTANTIATE_TEST_SUITE_P(Qwen2, Oracle, testing::Combine(testing::Values("qwen2_tied_gqa", "qwen2_untied_mha"), testing::ValuesIn(kClaims)),
                         [](const auto& tested) {
                           return fmt::format("{}_{}", std::get<0>(tested.param), std::get<1>(tested.param).slug);
                         });

// ---- the check fails when it must

struct Change {
  const char* slug;
  std::function<void(ModelConfig&)> config;
  std::function<void(Parameters&)> weights;
  const char* first;  ///< the first claim that diverges
};

void PrintTo(const Change& change, std::ostream* out) {
  *out << change.slug;
}

std::vector<Change> changes() {
  const auto scale = [](const char* name, double factor) { return [=](Parameters& weights) { weights.at(name).mul_(factor); }; };
  return {
      {"rope_theta_doubled", [](ModelConfig& c) { c.rope.theta *= 2; }, {}, "fp64 hidden states (eager)"},
      {"norm_eps_larger", [](ModelConfig& c) { c.norm_eps = 1e-5; }, {}, "fp64 hidden states (eager)"},
      {"weight_scaled", {}, scale("model.layers.1.mlp.down_proj.weight", 1.001), "fp64 hidden states (eager)"},
      {"key_bias_scaled", {}, scale("model.layers.0.self_attn.k_proj.bias", 1.001), "fp64 hidden states (eager)"},
      {"final_norm_scaled", {}, scale("model.norm.weight", 1.001), "fp64 hidden states (eager)"},
      {"head_scaled", {}, scale("lm_head.weight", 1.001), "fp64 logits (eager)"},
      {"weight_nan",
       {},
       scale("model.layers.0.mlp.up_proj.weight", std::numeric_limits<double>::quiet_NaN()),
       "fp64 hidden states (eager)"},
  };
}

class OracleControl : public testing::TestWithParam<Change> {};

TEST_P(OracleControl, DivergesAndSaysWhere) {
  OracleOptions options;
  options.change_config = GetParam().config;
  options.change_weights = GetParam().weights;
  options.training = false;

  const OracleReport report = check_oracle(case_folder("qwen2_untied_mha"), options);

  EXPECT_FALSE(report.ok());
  const auto failed = std::ranges::find_if(report.rows, [](const OracleRow& row) { return !row.ok(); });
  ASSERT_NE(failed, report.rows.end());
  EXPECT_EQ(failed->claim, GetParam().first) << failed->tensor;
  EXPECT_THAT(render(report), HasSubstr("DIVERGES"));
}

INSTANTIATE_TEST_SUITE_P(Changes, OracleControl, testing::ValuesIn(changes()), [](const auto& tested) { return tested.param.slug; });

TEST(OracleTraining, DivergesInTheFirstLossIfOneWeightIsChanged) {
  OracleOptions options;
  options.change_weights = [](Parameters& weights) { weights.at("lm_head.weight").mul_(1.001); };

  const OracleReport report = check_oracle(case_folder("qwen2_untied_mha"), options);

  for (const char* const claim :
       {"adamw losses", "adamw gradient norms", "adamw trained parameters", "sgd losses", "sgd gradient norms", "sgd trained parameters"}) {
    EXPECT_TRUE(std::ranges::any_of(report.rows, [&](const OracleRow& row) { return row.claim == claim && !row.ok(); })) << claim;
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

TEST(OracleFolders, OtherArchitecturesAreRefusedByName) {
  EXPECT_THAT(error_of(case_folder("llama_untied_gqa")), HasSubstr("model_type 'llama' is not built yet"));
  EXPECT_THAT(error_of(case_folder("qwen3_qk_norm")), HasSubstr("model_type 'qwen3' is not built yet"));
  EXPECT_THAT(error_of(case_folder("gpt2_learned_positions")), HasSubstr("model_type 'gpt2' is not built yet"));
}

TEST(OracleFolders, AMissingFolderIsNamed) {
  EXPECT_THAT(error_of("/nonexistent/oracle"), HasSubstr("/nonexistent/oracle/config.json"));
}

/// A copy of a case that lacks one tensor of one file.
class CopyOfCase {
 public:
  explicit CopyOfCase(std::string_view name)
      : folder_(std::filesystem::path(testing::TempDir()) / fmt::format("isoshard_oracle_{}_{}", name, ::getpid())) {
    std::filesystem::remove_all(folder_);
    std::filesystem::copy(case_folder(name), folder_);
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      std::filesystem::permissions(entry.path(), std::filesystem::perms::owner_write, std::filesystem::perm_options::add);
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
        if (name != tensor) kept.push_back({name, file.tensor(name).clone()});
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

}  // namespace
}  // namespace isoshard
