// SPDX-License-Identifier: Apache-2.0
// Steps of nd are those of one process; degrees that do not fit are refused with the numbers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/base/error.h"
#include "harness/judge/judge.h"
#include "suite/record/expected_calls.h"
#include "suite/testing/nd_cases.h"

namespace isoshard {
namespace {

using ::testing::HasSubstr;

class NdStep : public ::testing::TestWithParam<Case> {};

TEST_P(NdStep, MatchesSingleProcess) {
  const Case& item = GetParam();
  const Reference reference = make_reference(item);

  const Trace run = run_case(item, reference);

  EXPECT_EQ(static_cast<int>(run.ranks.size()), item.world_size());
  EXPECT_THAT(run, conforms_to(reference, with_collectives(policy_of(item), item)));
}

// The same samples with and without documents: only what turns by position differs at first.
TEST(NdStep, CountsPositionsWithinPackedDocuments) {
  const Case whole = in_pipeline(nd_case({.pp = 2, .cp = 2}));
  Case packed = whole;
  packed.data.end_of_document = ' ';
  const Reference& reference = reference_of(whole);

  const Verdict verdict = judge(reference, run_case(packed, reference), policy_of(packed));

  ASSERT_EQ(verdict.status, Status::kDiverges);
  EXPECT_THAT(describe(verdict.findings.front().key),
              ::testing::HasSubstr("model.layers.0.self_attn.q_rope"));
}

// Nothing is cut, so nothing is added: the same bits as one process.
TEST(NdRanks, OfAWorldOfOneGiveTheBitsOfTheReference) {
  for (const Case& item : {nd_case({}), in_pipeline(nd_case({}), 2, "Interleaved1F1B"),
                           in_pipeline(nd_case({}), 2, "InterleavedZeroBubble")}) {
    SCOPED_TRACE(item.slug());
    const Reference reference = make_reference(item);
    EXPECT_TRUE(is_bit_equal(reference, run_case(item, reference)));
  }
}

struct Misfit {
  Case item;
  std::string numbers;
};

TEST(NdRefusals, NameTheNumbers) {
  Case few_layers = in_pipeline(nd_case({.pp = 2}));
  few_layers.config.num_layers = 1;
  Case odd_length = nd_case({.cp = 2});
  odd_length.seq_length = 22;
  Case few_micro_batches = in_pipeline(nd_case({.pp = 2}), 2, "Interleaved1F1B");
  few_micro_batches.micro_batches = 3;
  Case odd_replicas = with_replicas(nd_case({.dp = 3}), 2);
  Case recomputed = in_pipeline(nd_case({.pp = 2}), 2, "ZBVZeroBubble");
  recomputed.settings.recompute_every = 1;
  Case tied_on_a_v = in_pipeline(nd_case({.pp = 2}, Dtype::kFloat32, "gpt2"), 2, "ZBVZeroBubble");
  Case odd_parts = in_sequence(nd_case({.cp = 2, .tp = 3}));
  odd_parts.seq_length = 16;
  Case whole_vocabulary = in_sequence(nd_case({.tp = 2}));
  whole_vocabulary.settings.make_vocab_size_divisible_by = 0;
  Case split = in_pipeline(nd_case({.pp = 2}));
  split.settings.nd.layers_per_stage = {1, 2};
  for (const Misfit& misfit : std::vector<Misfit>{{recomputed, "ZBVZeroBubble"},
                                                  {odd_parts, "tp 3 x cp 2"},
                                                  {whole_vocabulary, "--vocab-parallel"},
                                                  {tied_on_a_v, "rank 0"},
                                                  {split, "1,2"},
                                                  {few_layers, "2"},
                                                  {odd_length, "22"},
                                                  {few_micro_batches, "3"},
                                                  {odd_replicas, "3"}}) {
    SCOPED_TRACE(misfit.item.slug());
    try {
      misfit.item.validate();
      ADD_FAILURE() << "was not refused";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr(misfit.numbers));
    }
  }
}

std::vector<Case> cases() {
  return {in_pipeline(nd_case({.pp = 2, .dp = 3})),
          in_pipeline(nd_case({.pp = 2}), 2, "Interleaved1F1B"),
          in_pipeline(nd_case({.pp = 2}, Dtype::kBFloat16), 1, "GPipe"),
          nd_case({.cp = 3}),
          in_pipeline(nd_case({.pp = 2, .tp = 2}), 1, "InterleavedZeroBubble"),
          in_pipeline(nd_case({.pp = 2, .cp = 2}, Dtype::kBFloat16), 2, "ZBVZeroBubble"),
          in_pipeline(nd_case({.pp = 4}, Dtype::kFloat32, "gpt2")),
          in_ring(nd_case({.dp = 2, .cp = 2})),
          in_sequence(in_pipeline(nd_case({.pp = 2, .dp = 2, .tp = 2}))),
          recomputing_every_second(in_sequence(nd_case({.cp = 2, .tp = 2}, Dtype::kBFloat16))),
          in_ring(nd_case({.cp = 2}, Dtype::kBFloat16)),
          with_replicas(nd_case({.dp = 4}), 2),
          nd_case({.dp = 2, .cp = 2, .tp = 2}),
          in_pipeline(nd_case({.pp = 2, .cp = 2}, Dtype::kFloat32, "gpt2"))};
}
INSTANTIATE_TEST_SUITE_P(Cases, NdStep, ::testing::ValuesIn(cases()), case_name);

// Every value of every step is exact, whoever adds what when.
class NdLattice : public ::testing::TestWithParam<Case> {};

TEST_P(NdLattice, IsEqualToTheSingleProcess) {
  const Case& item = GetParam();
  const Reference reference = make_reference(item);

  EXPECT_THAT(run_case(item, reference), conforms_to(reference, exact_policy_of(item)));
}

std::vector<Case> lattice_cases() {
  std::vector<Case> result;
  const auto add = [&](const Degrees& degrees, Dtype dtype, int stages, int replicas) {
    Case item = lattice_case(1);
    item.subject = "nd";
    item.degrees = degrees;
    item.dtype = dtype;
    item.seq_length = 4 * degrees.cp;
    if (degrees.pp * stages > 1) {
      item.micro_batches = degrees.pp * stages;
      item.batch_size = 1;
      item.settings.nd.stages_per_rank = stages;
      if (stages > 1) item.settings.nd.pipeline_schedule = "Interleaved1F1B";
      item = with_layers(item, degrees.pp * stages);
    }
    result.push_back(with_replicas(item, replicas));
  };
  add({.pp = 2}, Dtype::kFloat32, 1, 1);
  add({.pp = 2}, Dtype::kFloat64, 2, 1);
  add({.cp = 2}, Dtype::kBFloat16, 1, 1);
  add({.cp = 4}, Dtype::kFloat32, 1, 1);
  add({.pp = 2, .tp = 2}, Dtype::kFloat32, 1, 1);
  add({.dp = 2, .cp = 2, .tp = 2}, Dtype::kFloat32, 1, 1);
  add({.dp = 4}, Dtype::kBFloat16, 1, 2);
  add({.pp = 2, .dp = 2, .cp = 2, .tp = 2}, Dtype::kFloat32, 1, 1);
  result.push_back(in_sequence(result.back()));
  return result;
}
INSTANTIATE_TEST_SUITE_P(Cases, NdLattice, ::testing::ValuesIn(lattice_cases()), case_name);

}  // namespace
}  // namespace isoshard
