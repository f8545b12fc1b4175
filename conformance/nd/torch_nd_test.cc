// SPDX-License-Identifier: Apache-2.0
// Contract oracle.nd: pipelines, context parallelism and hybrid shards compute what torch's own
// computed on gloo (fixtures/oracle/torch_nd), within the bounds of the other oracles.
#include <ATen/ATen.h>
#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/io/json.h"
#include "core/io/safetensors.h"
#include "core/tensor/convert.h"
#include "fixtures/oracle/oracle.h"
#include "fixtures/oracle/oracle_files.h"
#include "harness/trace/collective_calls.h"
#include "suite/faults/fault.h"
#include "suite/testing/step_cases.h"

namespace isoshard {
namespace {

constexpr const char* kFolder = ISOSHARD_ORACLE_DIR "/torch_nd";
constexpr int kSamples = 4;

/// A run of torch, as the file says it, and what is left to choose for ours.
struct Pair {
  std::string run;
  std::string schedule = {};  ///< another one than torch's; its stages may lie otherwise
  ContextAttention attention = ContextAttention::kRing;
  /// What must travel, and along which axis.
  Axis axis = Axis::kPp;
  Purpose purpose = Purpose::kPipeBackward;
};

/// Zero-bubble schedules make the gradients of weights later, which changes no value: so one of
/// them is held by another schedule, too.
std::vector<Pair> pairs() {
  constexpr auto kGathered = ContextAttention::kAllGather;
  const Pair cp{.run = "", .axis = Axis::kCp, .purpose = Purpose::kRingDkv};
  const auto over_cp = [&](const char* run, ContextAttention attention) {
    Pair pair = cp;
    pair.run = run;
    pair.attention = attention;
    return pair;
  };
  return {{.run = "pp2_1f1b"},
          {.run = "pp2_1f1b", .schedule = "GPipe"},
          {.run = "pp2_interleaved"},
          {.run = "pp2_zb1p"},
          {.run = "pp2_zbv"},
          {.run = "pp2_zbv", .schedule = "Interleaved1F1B"},
          over_cp("cp2_head_tail", ContextAttention::kRing),
          over_cp("cp2_head_tail", kGathered),
          over_cp("cp2_contiguous", ContextAttention::kRing),
          over_cp("cp2_contiguous", kGathered),
          {.run = "hsdp2x2", .axis = Axis::kDpReplicate, .purpose = Purpose::kGradReduce},
          {.run = "pp2_dp2_cp2"},
          over_cp("pp2_dp2_cp2", kGathered)};
}

std::string slug_of(const Pair& pair) {
  std::string slug = pair.run;
  if (!pair.schedule.empty()) slug += "_by_" + pair.schedule;
  if (pair.attention == ContextAttention::kAllGather) slug += "_gathered";
  return slug;
}

void PrintTo(const Pair& pair, std::ostream* out) {
  *out << slug_of(pair);
}

nlohmann::json run_of(const Pair& pair) {
  const nlohmann::json stored =
      read_json_file(std::filesystem::path(kFolder) / "runs.json").at("runs");
  const auto found = std::ranges::find(stored, pair.run, [](const nlohmann::json& run) {
    return run.at("name").get<std::string>();
  });
  if (found == stored.end()) throw FileError("runs.json must have the run " + pair.run);
  return *found;
}

Case case_of(const Pair& pair, Dtype dtype) {
  const nlohmann::json run = run_of(pair);
  Case item;
  item.model_name = "torch_nd";
  item.config = detail::read_oracle_config(kFolder);
  item.subject = "nd";
  item.dtype = dtype;
  NdSettings& nd = item.settings.nd;
  item.settings = verify_settings();
  nd.dp_replicate = run.at("dp_replicate");
  item.degrees = {.pp = run.at("pp"),
                  .dp = nd.dp_replicate * run.at("dp_shard").get<int>(),
                  .cp = run.at("cp")};
  nd.context_attention = pair.attention;
  nd.context_order =
      run.at("load_balance").get<bool>() ? ContextOrder::kHeadTail : ContextOrder::kContiguous;
  nd.stages_per_rank = run.at("stages_per_rank");
  if (item.degrees.pp > 1)
    nd.pipeline_schedule =
        pair.schedule.empty() ? run.at("schedule").get<std::string>() : pair.schedule;
  item.micro_batches = run.at("micro_batches");
  item.batch_size = kSamples / (item.degrees.dp * item.micro_batches);
  item.seq_length = 16;
  item.weights_path = fmt::format("{}/model.safetensors", kFolder);
  item.data.kind = DataSource::Kind::kBatchFile;
  item.data.path = fmt::format("{}/batch.safetensors", kFolder);
  return item;
}

/// All that ranks record, compared with nothing.
Trace recorded(const Case& item, RunOptions options = {}) {
  options.keep = Keep::kEverything;
  options.compare = false;
  return run_case(item, Reference(), options);
}

at::Tensor whole(const Trace& trace, RecordKind kind, const std::string& name, int call = 0) {
  return tensor_of(trace.assemble({0, kind, name, call})).clone();
}

at::Tensor logits_of(const Trace& trace, const Case& item) {
  std::vector<at::Tensor> calls;
  for (int m = 0; m < item.micro_batches; ++m)
    calls.push_back(whole(trace, RecordKind::kActivation, "lm_head", m));
  return at::cat(calls);
}

/// Loss, logits, gradient norm and every gradient against the stored ones: fp64 and fp32 against
/// torch's fp64, bf16 by its distance from there.
OracleReport compare(const Pair& pair, const Case& item, const Trace& trace) {
  const SafetensorsFile file =
      SafetensorsFile::open(std::filesystem::path(kFolder) / run_of(pair).at("file"));
  const OracleBounds bounds;
  const bool is_wide = item.dtype == Dtype::kFloat64, is_bf16 = item.dtype == Dtype::kBFloat16;
  OracleReport report{fmt::format("{} in {}", slug_of(pair), name_of(item.dtype)), {}};
  const auto add = [&](const char* claim, const std::string& name, const at::Tensor& actual,
                       double bound) {
    const std::size_t dot = std::min(name.find('.'), name.size());
    const auto stored = [&](std::string_view suffix) {
      return tensor_of(file.tensor(name.substr(0, dot) + std::string(suffix) + name.substr(dot)));
    };
    const at::Tensor reference = stored("");
    ASSERT_EQ(reference.sizes(), actual.sizes()) << name;
    if (is_bf16) bound = bounds.bf16_ratio * relative_error(reference, stored("_bf16"));
    report.rows.push_back({claim, name, relative_error(reference, actual), bound});
  };
  const double output = is_wide ? bounds.fp64 : bounds.fp32_output;
  add("logits", "logits", logits_of(trace, item), output);
  for (const ParameterSpec& spec : make_model(item.config, item.attention)->parameters())
    add("gradients", "grad." + spec.name, whole(trace, RecordKind::kGrad, spec.name),
        is_wide ? bounds.fp64 : bounds.fp32_gradient);
  if (is_bf16) return report;  // a single number may lie on fp64's by chance
  add("loss", "loss", whole(trace, RecordKind::kScalar, "loss"), output);
  add("gradient norm", "grad_norm", whole(trace, RecordKind::kScalar, "grad_norm"),
      is_wide ? bounds.fp64 : bounds.step_scalar);
  return report;
}

/// How many calls a rank made for a purpose on its groups along an axis.
std::ptrdiff_t calls_on(const RankTrace& rank, Axis axis, Purpose purpose) {
  const Record* const record =
      rank.find({0, RecordKind::kScalar, collectives_name(axis, rank.rank), 0});
  if (record == nullptr) return 0;
  const HostTensor rows = rank.tensor(*record);
  return std::ranges::count(calls_of(rows.bytes), purpose,
                            [](const CollectiveCall& call) { return call.purpose; });
}

/// How many elements of parameters' gradients a rank has.
std::int64_t gradient_elements(const RankTrace& rank, const std::vector<ParameterSpec>& specs) {
  std::int64_t elements = 0;
  for (const ParameterSpec& spec : specs) {
    const Record* const record = rank.find({0, RecordKind::kGrad, spec.name, 0});
    if (record != nullptr) elements += c10::multiply_integers(record->local_shape);
  }
  return elements;
}

/// For each claim, the tensor that comes nearest to its bound.
std::map<std::string, std::string> nearest_of(const OracleReport& report) {
  std::map<std::string, const OracleRow*> worst;
  for (const OracleRow& row : report.rows) {
    const OracleRow*& known = worst[row.claim];
    if (known == nullptr || !(row.error / row.bound <= known->error / known->bound)) known = &row;
  }
  std::map<std::string, std::string> texts;
  for (const auto& [claim, row] : worst)
    texts[claim] = fmt::format("{:.2e} of {:.0e}, {}", row->error, row->bound, row->tensor);
  return texts;
}

class TorchNd : public testing::TestWithParam<std::tuple<Pair, Dtype>> {};

TEST_P(TorchNd, IsComputedWithinTheOraclesBounds) {
  const auto& [pair, dtype] = GetParam();
  const Case item = case_of(pair, dtype);

  const Trace trace = recorded(item);
  const OracleReport report = compare(pair, item, trace);

  EXPECT_EQ(report.rows.size(), (dtype == Dtype::kBFloat16 ? 1U : 3U) + 4 * 9 + 3);
  EXPECT_TRUE(report.ok()) << render(report);
  for (const auto& [claim, text] : nearest_of(report)) RecordProperty(claim, text);
  ASSERT_EQ(static_cast<int>(trace.ranks.size()), item.world_size());
  const std::vector<ParameterSpec> specs = make_model(item.config, item.attention)->parameters();
  std::int64_t whole_model = 0;
  for (const ParameterSpec& spec : specs) whole_model += c10::multiply_integers(spec.shape);
  for (const RankTrace& rank : trace.ranks) {
    EXPECT_GT(calls_on(rank, pair.axis, pair.purpose), 0) << "rank " << rank.rank;
    EXPECT_GT(gradient_elements(rank, specs), 0) << "rank " << rank.rank;
    EXPECT_LT(gradient_elements(rank, specs), whole_model) << "rank " << rank.rank;
  }
}

INSTANTIATE_TEST_SUITE_P(Runs, TorchNd,
                         testing::Combine(testing::ValuesIn(pairs()),
                                          testing::Values(Dtype::kFloat64, Dtype::kFloat32,
                                                          Dtype::kBFloat16)),
                         [](const auto& tested) {
                           return fmt::format("{}_{}", slug_of(std::get<0>(tested.param)),
                                              name_of(std::get<1>(tested.param)));
                         });

// ---- the comparison fails when it must

/// A bug, and the first claim that it must break.
struct Bug {
  const char* slug;
  Pair pair;
  std::string claim;
  Fault fault;
};

void PrintTo(const Bug& bug, std::ostream* out) {
  *out << bug.slug;
}

Fault skipped(Purpose purpose, Axis axis) {
  Fault fault{.id = "skipped"};
  fault.hooks.collective = [=](const Case&) { return skip_calls(purpose, axis); };
  return fault;
}

std::vector<Bug> bugs() {
  const Pair pipeline{.run = "pp2_1f1b"}, shards{.run = "hsdp2x2"}, all{.run = "pp2_dp2_cp2"};
  const Pair stages{.run = "pp2_zbv"};
  const Pair head_tail{.run = "cp2_head_tail"}, contiguous{.run = "cp2_contiguous"};
  const Pair gathered{.run = "cp2_contiguous", .attention = ContextAttention::kAllGather};
  return {
      {"micro_batches_divided_twice", pipeline, "gradients",
       find_fault("scaled_again_at_each_stage")},
      {"norm_of_one_stage", pipeline, "gradient norm", find_fault("clip_norm_per_stage")},
      {"other_layers_on_a_stage", pipeline, "logits", find_fault("stage_loads_local_layer_names")},
      {"micro_batches_divided_at_all_stages", stages, "gradients",
       find_fault("scaled_again_at_each_stage")},
      {"cp_divisor_missing", head_tail, "gradients", find_fault("cp_divisor_missing")},
      {"divided_by_cp_too", contiguous, "gradients", find_fault("seq_group_in_divisor")},
      {"positions_of_each_rank", head_tail, "logits", find_fault("rope_restarts_on_each_cp_rank")},
      {"ends_of_chunks_not_counted", head_tail, "gradients",
       find_fault("labels_shifted_after_cp_split")},
      {"gradients_of_keys_stay", gathered, "gradients", skipped(Purpose::kRingDkv, Axis::kCp)},
      {"replicas_apart", shards, "gradients", skipped(Purpose::kGradReduce, Axis::kDpReplicate)},
      {"all_with_a_wrong_divisor", all, "gradients", find_fault("cp_divisor_missing")},
      {"all_with_other_positions_later", all, "logits",
       find_fault("rope_table_whole_on_later_stages")},
  };
}

class TorchNdControl : public testing::TestWithParam<std::tuple<Bug, Dtype>> {};

TEST_P(TorchNdControl, IsOutsideOfTheBounds) {
  const auto& [bug, dtype] = GetParam();
  const Case item = case_of(bug.pair, dtype);
  const FaultProbe probe;

  const Trace trace = recorded(item, with_fault({}, bug.fault, item, probe));
  const OracleReport report = compare(bug.pair, item, trace);

  require_fired(probe, bug.slug, "the run");
  const auto failed =
      std::ranges::find_if(report.rows, [](const OracleRow& row) { return !row.ok(); });
  ASSERT_NE(failed, report.rows.end()) << render(report);
  EXPECT_EQ(failed->claim, bug.claim) << render(report);
}

INSTANTIATE_TEST_SUITE_P(Bugs, TorchNdControl,
                         testing::Combine(testing::ValuesIn(bugs()),
                                          testing::Values(Dtype::kFloat64, Dtype::kFloat32)),
                         [](const auto& tested) {
                           return fmt::format("{}_{}", std::get<0>(tested.param).slug,
                                              name_of(std::get<1>(tested.param)));
                         });

}  // namespace
}  // namespace isoshard
