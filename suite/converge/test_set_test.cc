// SPDX-License-Identifier: Apache-2.0
#include "suite/converge/test_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "subjects/model/config/builtin.h"
#include "suite/converge/converge_presets.h"
#include "suite/converge/converge_rules.h"

namespace isoshard {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::ThrowsMessage;

Case control() {
  Case item = preset_control(find_converge_preset("fsdp"));
  item.steps = 3;
  return item;
}

auto refuses(const std::string& text, const std::string& words) {
  EXPECT_THAT([&] { (void)test_set(text, control()); }, ThrowsMessage<UsageError>(HasSubstr(words)))
      << text;
}

const ConvergeRule& rule_of(const std::vector<ConvergeRule>& rules, std::string_view name) {
  for (const ConvergeRule& rule : rules) {
    if (rule.name == name) return rule;
  }
  throw UsageError("no such rule");
}

std::vector<ConvergeRule> rules_of(const std::vector<TestSet>& sets) {
  RuleInputs inputs;
  inputs.control = control();
  inputs.seeds = {0};
  return check_rules(inputs, sets);
}

TEST(TestSets, SayWhatTheRunHasAndTheControlHasNot) {
  const TestSet set = test_set("tp=2, pp=2,cp=2,recompute,pipeline_schedule=GPipe", control());

  EXPECT_EQ(set.title, "FSDP 2, TP 2, CP 2, PP 2, recompute, pipeline-schedule=GPipe");
  EXPECT_EQ(set.name, "fsdp2_tp2_cp2_pp2_recompute_pipeline_schedule_gpipe");
  EXPECT_EQ(set.dimensions, 4);
  EXPECT_EQ(set.item.subject, "nd");
  EXPECT_EQ(set.item.degrees, (Degrees{.pp = 2, .dp = 2, .cp = 2, .tp = 2}));
  EXPECT_EQ(set.item.settings.recompute_every, 1);
  EXPECT_EQ(set.item.settings.nd.pipeline_schedule, "GPipe");
  EXPECT_THAT(set.techniques, ElementsAre("recompute", "pipeline-schedule=GPipe"));
}

TEST(TestSets, CutTheLocalBatchIntoAsManyMicroBatchesAsStages) {
  const TestSet two = test_set("pp=2", control()),
                four =
                    test_set("pp=2,stages-per-rank=2,pipeline-schedule=Interleaved1F1B", control()),
                asked = test_set("pp=2,micro-batches=4", control());

  EXPECT_EQ(two.item.micro_batches, 2);
  EXPECT_EQ(two.item.batch_size, 2);
  EXPECT_EQ(four.item.micro_batches, 4);
  EXPECT_EQ(asked.item.micro_batches, 4);
  EXPECT_EQ(asked.item.batch_size, 1);
}

TEST(TestSets, TakeTheNamesThatPeopleUse) {
  EXPECT_EQ(test_set("activation-checkpoint", control()).item.settings.recompute_every, 1);
  EXPECT_EQ(test_set("selective-ac=2", control()).item.settings.recompute_every, 2);
  EXPECT_EQ(test_set("tp=2,loss-parallel", control()).item.settings.make_vocab_size_divisible_by,
            1);
}

TEST(TestSets, RefuseByNameWhatThisBuildLacks) {
  for (const char* const name : {"async-tp", "compile", "fused-step", "float8"})
    refuses(name, std::string(name) + " is not built");
  refuses("async_tp",
          "known are tp, cp, pp, micro-batches, recompute, recompute-every, vocab-parallel");
}

TEST(TestSets, RefuseWhatTheyCannotBe) {
  refuses("", "must name what the run has");
  refuses("tpp=2", "did you mean 'tp'");
  refuses("tp=x", "tp must be a number, got 'x'");
  refuses("tp=0", "tp must be at least 1, got 0");
  refuses("tp", "tp must be a number");
  refuses("tp=2,tp=2", "tp must be given once");
  refuses("recompute=1", "recompute is a switch and must have no value");
  refuses("pipeline-schedule", "must have a value");
  refuses("dp=4", "rule dp-degree");
  refuses("learning-rate=1", "rule settings: learning-rate must be the same");
  refuses("distributed-optimizer", "only megatron takes distributed-optimizer");
}

TEST(TestSets, APipelineNeedsALocalBatchOfItsMicroBatches) {
  refuses("pp=8", "rule pipeline-batch");
  refuses("pp=2,micro-batches=3", "got a local batch of 4 for 3 micro-batches");
}

TEST(TestSets, ImplySetsOfFewerAxes) {
  EXPECT_THAT(implied_sets(test_set("tp=2,pp=2", control())),
              ElementsAre("FSDP 2, TP 2", "FSDP 2, PP 2"));
  EXPECT_THAT(implied_sets(test_set("tp=2,cp=2,pp=2", control())),
              ElementsAre("FSDP 2, TP 2", "FSDP 2, CP 2", "FSDP 2, PP 2", "FSDP 2, TP 2, CP 2",
                          "FSDP 2, TP 2, PP 2", "FSDP 2, CP 2, PP 2"));
  EXPECT_THAT(implied_sets(test_set("cp=2", control())), IsEmpty());
}

// Every row of the table that nd takes and that a reference does not depend on, with no list here.
TEST(TestSets, TechniquesAreTheRowsOfTheTable) {
  const std::vector<std::string> names = technique_names();

  for (const char* const name : {"recompute", "vocab-parallel", "reduce-dtype", "pipeline-schedule",
                                 "context-attention", "ring-merge-dtype", "dp-replicate"})
    EXPECT_THAT(names, Contains(name));
  for (const char* const name : {"zero-stage", "seq-length", "learning-rate", "output-dtype"})
    EXPECT_THAT(names, testing::Not(Contains(name)));
}

TEST(ConvergeRules, AllHoldOfARightPlan) {
  const std::vector<TestSet> sets = {test_set("tp=2,pp=2", control()),
                                     test_set("cp=2,reduce-dtype=bf16", control())};

  const std::vector<ConvergeRule> rules = rules_of(sets);

  EXPECT_NO_THROW(require_rules(rules));
  EXPECT_THAT(rule_of(rules, "tokens-per-step").sentence, HasSubstr("512 tokens"));
  EXPECT_THAT(rule_of(rules, "transitivity").sentence,
              HasSubstr("FSDP 2, TP 2, PP 2 covers FSDP 2, TP 2 | FSDP 2, PP 2"));
  EXPECT_THAT(rule_of(rules, "pipeline-batch").sentence,
              HasSubstr("local batch 4 >= 2 micro-batches >= 2 stages"));
}

/// The rule that alone is refused when a right set is changed.
template <class Change>
void expect_refused(const char* rule, const Change& change) {
  std::vector<TestSet> sets = {test_set("tp=2,pp=2", control())};
  change(sets.front());

  const std::vector<ConvergeRule> rules = rules_of(sets);

  EXPECT_EQ(rule_of(rules, rule).status, RuleStatus::kRefused) << rule;
  EXPECT_THAT([&] { require_rules(rules); },
              ThrowsMessage<UsageError>(HasSubstr(std::string("rule ") + rule)));
}

TEST(ConvergeRules, EachIsRefusedByItsName) {
  expect_refused("local-batch", [](TestSet& set) { set.item.batch_size = 4; });
  expect_refused("dp-degree", [](TestSet& set) { set.item.degrees.dp = 4; });
  expect_refused("tokens-per-step", [](TestSet& set) { set.item.seq_length = 32; });
  expect_refused("data-ids", [](TestSet& set) { set.item.data.shuffle = true; });
  expect_refused("settings",
                 [](TestSet& set) { set.item.settings.optimizer.learning_rate = 1e-4; });
  expect_refused("pipeline-batch", [](TestSet& set) { set.item.degrees.pp = 4; });
  expect_refused("degree", [](TestSet& set) {
    set.dimensions = 1;
    set.techniques.clear();
  });
}

// A technique that does nothing always converges, and the test would show nothing.
TEST(ConvergeRules, ATechniqueWithoutWhatItActsOnIsRefused) {
  for (const char* const text :
       {"cp=2,vocab-parallel", "tp=2,context-attention=ring", "tp=2,context-order=contiguous",
        "cp=2,ring-merge-dtype=bf16", "tp=2,pipeline-schedule=GPipe", "cp=2,sequence-parallel",
        "recompute-every=99"})
    EXPECT_EQ(rule_of(rules_of({test_set(text, control())}), "technique-acts").status,
              RuleStatus::kRefused)
        << text;
  for (const char* const text :
       {"tp=2,vocab-parallel", "cp=2,context-attention=ring,ring-merge-dtype=bf16",
        "pp=2,pipeline-schedule=GPipe", "recompute", "dp-replicate=2", "selective-ac=2",
        "tp=2,loss-parallel,sequence-parallel"})
    EXPECT_EQ(rule_of(rules_of({test_set(text, control())}), "technique-acts").status,
              RuleStatus::kPass)
        << text;
}

// How a step is cut into micro-batches does not change what it reads; another order does.
TEST(ConvergeRules, DataAreComparedByIdsAndNotByMicroBatches) {
  const TestSet set = test_set("pp=2,micro-batches=4", control());
  Case later = control();
  later.seed = 1;

  EXPECT_EQ(step_data_sha256(set.item), step_data_sha256(control()));
  EXPECT_NE(step_data_sha256(later), step_data_sha256(control()));
}

TEST(ConvergeRules, RateFollowsTheGlobalBatchOnlyIfAsked) {
  EXPECT_EQ(scaled_rate(3e-4, parse_rate_scaling("none"), 8, 64), 3e-4);
  EXPECT_EQ(scaled_rate(3e-4, parse_rate_scaling("linear"), 8, 64), 3e-4 / 8);
  EXPECT_EQ(scaled_rate(3e-4, parse_rate_scaling("sqrt"), 16, 64), 3e-4 / 2);
  EXPECT_THAT([] { (void)parse_rate_scaling("liner"); },
              ThrowsMessage<UsageError>(HasSubstr("did you mean 'linear'")));
}

TEST(ConvergePresets, ModelIsLlama3ByDivision) {
  const ModelConfig whole = builtin_config("meta-llama/Llama-3-8B"), scaled = scaled_llama3();

  EXPECT_EQ(scaled.hidden_size * 64, whole.hidden_size);
  EXPECT_EQ(scaled.intermediate_size * whole.hidden_size,
            whole.intermediate_size * scaled.hidden_size);
  EXPECT_EQ(scaled.num_heads * whole.num_kv_heads, whole.num_heads * scaled.num_kv_heads);
  EXPECT_EQ(scaled.num_heads * scaled.head_dim, scaled.hidden_size);
  EXPECT_EQ(scaled.num_layers * 8, whole.num_layers);
  EXPECT_EQ(scaled.rope.theta, whole.rope.theta);
  EXPECT_EQ(scaled.norm_eps, whole.norm_eps);
  EXPECT_FALSE(scaled.tie_word_embeddings);
  EXPECT_EQ(scaled_llama3(8).num_layers, 8);
}

TEST(ConvergePresets, AreTheRowsOfTheGuideline) {
  std::vector<std::string> titles;
  for (const char* const name : {"fsdp", "3d", "4d", "cp", "interleaved"}) {
    const ConvergePreset& preset = find_converge_preset(name);
    for (const std::string& text : preset.tests) {
      const TestSet set = test_set(text, preset_control(preset));
      EXPECT_NO_THROW(set.item.validate()) << name;
      titles.push_back(set.title.substr(0, set.title.find(", pipeline")));
    }
  }

  EXPECT_THAT(titles, ElementsAre("FSDP 2, TP 2, PP 2", "FSDP 2, TP 2, CP 2, PP 2", "FSDP 2, CP 8",
                                  "FSDP 2, PP 4"));
  EXPECT_EQ(find_converge_preset("table").tests.size(), 3U);
  EXPECT_EQ(find_converge_preset("interleaved").local_batch, 8);
  EXPECT_THAT([] { (void)find_converge_preset("4dd"); },
              ThrowsMessage<UsageError>(HasSubstr("did you mean '4d'")));
}

}  // namespace
}  // namespace isoshard
