// SPDX-License-Identifier: Apache-2.0
// Main gradients: added up in fp32, averaged over dp, stepped
// in parts and gathered, on ranks as threads.
#include "subjects/parallel/megatron/main_gradients.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "core/comm/thread/thread_world.h"

namespace isoshard {
namespace {

DataParallelSetup two_parameters(Mesh& mesh) {
  DataParallelSetup setup;
  setup.mesh = &mesh;
  setup.master_dtype = Dtype::kFloat32;
  for (const auto& [name, size] : {std::pair<const char*, std::int64_t>{"a", 70}, {"b", 50}}) {
    setup.parameters.push_back({name, ParamClass::kMatrix, replicated({size}),
                                at::ones({size}, at::kBFloat16).requires_grad_(true)});
  }
  return setup;
}

// bf16 has 8 bits: 256 + 1 is 256 there, so sums in fp32 are told apart.
void backward_of(MainGradients& main, double gradient, bool reduces) {
  main.before_backward(reduces);
  for (const auto& [name, parameter] : main.before_forward())
    (parameter * gradient).sum().backward();
  main.after_backward(reduces, reduces);
}

TEST(MainGradients, AddMicroBatchesInFp32AndAverageOverDp) {
  ThreadWorld world(3);
  world.run([](Communicator& comm) {
    ASSERT_EQ(comm.size(), 3);
    Mesh mesh(MeshShape({{Axis::kDp, 3}, {Axis::kTp, 1}}), comm);
    MainGradients main(MainGradients::Steps::kEverywhere);
    main.setup(two_parameters(mesh));
    main.clear_gradients();
    backward_of(main, 256, false);
    backward_of(main, 1.0 + 3 * comm.rank(), true);

    const NamedTensors gradients = main.gradients();

    EXPECT_EQ(gradients.at("a").scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(gradients.at("a"), at::full({70}, 260.0)));
    EXPECT_FALSE(main.held().at("a").grad().defined());
  });
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_EQ(world.journal().num_calls(rank, CollectiveOp::kAllReduce, Purpose::kGradReduce), 1U);
}

TEST(MainGradients, OfTheDistributedOptimizerAreEachRanksPartAndParametersAreGathered) {
  ThreadWorld world(2);
  world.run([](Communicator& comm) {
    ASSERT_EQ(comm.size(), 2);
    Mesh mesh(MeshShape({{Axis::kDp, 2}, {Axis::kTp, 1}}), comm);
    MainGradients main(MainGradients::Steps::kDistributed);
    main.setup(two_parameters(mesh));
    main.clear_gradients();
    backward_of(main, 1.0 + comm.rank(), true);

    // b lies at 0, a at 64; the bucket has 256 elements, so rank 0 has [0, 128) of it.
    const NamedTensors gradients = main.gradients();
    EXPECT_EQ(gradients.at("b").numel(), comm.rank() == 0 ? 50 : 0);
    EXPECT_EQ(gradients.at("a").numel(), comm.rank() == 0 ? 64 : 6);
    EXPECT_TRUE(at::equal(gradients.at("a"), at::full_like(gradients.at("a"), 1.5)));
    for (auto& [name, master] : main.masters()) master.fill_(comm.rank() + 2);
    main.publish();

    const at::Tensor a = main.held().at("a");
    EXPECT_TRUE(at::equal(a.narrow(0, 0, 64).detach(), at::full({64}, 2, at::kBFloat16)));
    EXPECT_TRUE(at::equal(a.narrow(0, 64, 6).detach(), at::full({6}, 3, at::kBFloat16)));
    EXPECT_TRUE(at::equal(main.held().at("b").detach(), at::full({50}, 2, at::kBFloat16)));
  });
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(world.journal().num_calls(rank, CollectiveOp::kReduceScatter, Purpose::kGradReduce),
              1U);
    EXPECT_EQ(world.journal().num_calls(rank, CollectiveOp::kAllGather, Purpose::kParamGather), 1U);
  }
}

// Queries lie between keys, so the half that a rank steps holds them in several runs of unequal
// sizes: rank 0 has 40, 40 and 8 elements of 120.
TEST(MainGradients, OfFusedLayersArePublishedWhereEachRunLies) {
  ThreadWorld world(2);
  world.run([](Communicator& comm) {
    ASSERT_EQ(comm.size(), 2);
    Mesh mesh(MeshShape({{Axis::kDp, 2}, {Axis::kTp, 1}}), comm);
    DataParallelSetup setup;
    setup.mesh = &mesh;
    setup.master_dtype = Dtype::kFloat32;
    for (const auto& [name, rows] :
         {std::pair<const char*, std::int64_t>{"x.q_proj.weight", 6}, {"x.k_proj.weight", 3}}) {
      setup.parameters.push_back({name, ParamClass::kMatrix, replicated({rows, 20}),
                                  at::ones({rows, 20}, at::kBFloat16).requires_grad_(true)});
    }
    MainGradients main(MainGradients::Steps::kDistributed, {{{"x.q_proj", "x.k_proj"}, 3, {2, 1}}});
    main.setup(std::move(setup));

    std::int64_t own = 0;
    for (auto& [name, master] : main.masters()) {
      const Layout layout = main.piece_layout(name);
      for (const FlatRange& range : layout.flat)
        master.narrow(0, range.local_begin, range.count)
            .copy_(at::arange(range.global_begin, range.global_begin + range.count));
      own += master.numel();
    }
    main.publish();

    EXPECT_EQ(own, comm.rank() == 0 ? 128 : 52);
    for (const auto& [name, held] : main.held()) {
      EXPECT_TRUE(at::equal(held.detach().reshape({-1}), at::arange(held.numel(), at::kBFloat16)))
          << name;
    }
  });
}

}  // namespace
}  // namespace isoshard
