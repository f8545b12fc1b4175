// SPDX-License-Identifier: Apache-2.0
// Contract oracle.averages: averages over three ranks and clip norms have the bits that DDP, FSDP2
// and DeepSpeed gave on a CPU (fixtures/oracle/make_average_oracle.py).
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/comm/tensor.h"
#include "core/comm/thread/thread_world.h"
#include "core/mesh/mesh.h"
#include "subjects/parallel/ddp/replicas.h"
#include "subjects/parallel/fsdp/dim_shards.h"
#include "subjects/parallel/grad_average.h"
#include "subjects/parallel/zero/zero_optimizer_shards.h"
#include "subjects/train/torch_norm.h"
#include "suite/emulation/emulated_reduction.h"

namespace isoshard {
namespace {

using json = nlohmann::ordered_json;  // parameters in model order

const json& stored() {
  static const json all =
      json::parse(std::ifstream(std::string(ISOSHARD_ORACLE_DIR) + "/averages/averages.json"));
  return all;
}

/// Values by their bits, in the row's dtype.
at::Tensor tensor_of(const json& bits, const std::string& dtype) {
  const at::ScalarType type = float_type_of(parse_dtype(dtype));
  const std::vector<std::int64_t> values = bits.get<std::vector<std::int64_t>>();
  const at::Tensor wide = at::tensor(values, at::kLong);
  const at::ScalarType integer = type == at::kDouble  ? at::kLong
                                 : type == at::kFloat ? at::kInt
                                                      : at::kShort;
  return wide.to(integer).view(type);
}

/// Elements whose bits differ; of tensors of one dtype.
std::int64_t num_unequal(const at::Tensor& a, const at::Tensor& b) {
  EXPECT_EQ(a.scalar_type(), b.scalar_type());
  const at::ScalarType integer = a.element_size() == 8   ? at::kLong
                                 : a.element_size() == 4 ? at::kInt
                                                         : at::kShort;
  const auto bits = [integer](const at::Tensor& x) {
    return x.flatten().contiguous().view(integer);
  };
  return bits(a).ne(bits(b)).sum().item<std::int64_t>();
}

/// What each rank has in the end is compared; the largest number of elements that differ.
std::int64_t averaged_unlike(const json& row, GradAverage average) {
  const auto ranks = static_cast<int>(row["gradients"].size());
  const std::string dtype = row["dtype"];
  ThreadWorld world(ranks);
  std::vector<std::int64_t> unequal(row["gradients"].size());
  world.run([&](Communicator& dp) {
    const auto rank = static_cast<std::size_t>(dp.rank());
    const at::Tensor own = tensor_of(row["gradients"][rank], dtype);
    const AveragedReduction how(average, dp.size());
    how.scale_before(own);
    all_reduce(dp, own, how.reduction(), {Purpose::kGradReduce, Axis::kDp, {}}).wait();
    how.scale_after(own);
    unequal[rank] = num_unequal(own, tensor_of(row["average"], dtype));
  });
  return *std::max_element(unequal.begin(), unequal.end());
}

TEST(OracleAverages, HaveTheBitsOfTheFrameworks) {
  std::set<std::string> frameworks;
  for (const json& row : stored()["averages"]) {
    ASSERT_EQ(row["gradients"].size(), 3U);
    frameworks.insert(row["framework"].get<std::string>());

    EXPECT_EQ(averaged_unlike(row, parse_grad_average(row["grad_average"].get<std::string>())), 0)
        << row["framework"] << " in " << row["dtype"];
  }
  EXPECT_EQ(frameworks.size(), 9U);
}

// What every setting is for: DDP's average in fp32 is that of no other one.
TEST(OracleAverages, OfDdpAreThoseOfOneSettingAlone) {
  const json& rows = stored()["averages"];
  const auto found = std::ranges::find_if(rows, [](const json& row) {
    return row["framework"] == "PyTorch DDP" && row["dtype"] == "fp32";
  });
  ASSERT_NE(found, rows.end());
  const json& ddp = *found;

  for (const GradAverage other :
       {GradAverage::kInCollective, GradAverage::kDivideFirst, GradAverage::kMultiplyLast,
        GradAverage::kDivideLast, GradAverage::kDivideAround})
    EXPECT_GT(averaged_unlike(ddp, other), 0) << name_of(other);
}

// The emulation's loops share no code with these.
TEST(OracleAverages, AreEmulatedBitByBit) {
  for (const json& row : stored()["averages"]) {
    const std::string dtype = row["dtype"];
    std::vector<at::Tensor> parts;
    for (const json& bits : row["gradients"]) parts.push_back(tensor_of(bits, dtype));
    ReductionPoint point;
    AveragedReduction(parse_grad_average(row["grad_average"].get<std::string>()), 3).declare(point);

    EXPECT_EQ(num_unequal(emulated_reduction(parts, point), tensor_of(row["average"], dtype)), 0)
        << row["framework"] << " in " << dtype;
  }
}

std::unique_ptr<DataParallel> autotp_over_dp(const json& row) {
  const GradAverage average = parse_grad_average(row["grad_average"].get<std::string>());
  const Dtype dtype = parse_dtype(row["accumulate_dtype"].get<std::string>());
  const auto accumulate = dtype == Dtype::kBFloat16 ? std::nullopt : std::optional<Dtype>(dtype);
  const int stage = row["zero_stage"];
  if (stage == 0)
    return std::make_unique<Replicas>(Replicas::Reduces::kOverDp, average, accumulate);
  return std::make_unique<ZeroOptimizerShards>(stage, average, accumulate);
}

/// Elements of the gradient after all micro-batches that differ, over all ranks.
std::int64_t accumulated_unlike(const json& row) {
  const auto ranks = static_cast<int>(row["gradients"].size());
  ThreadWorld world(ranks);
  std::vector<std::int64_t> unequal(row["gradients"].size()), compared = unequal;
  world.run([&](Communicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    Mesh mesh(MeshShape({{Axis::kDp, ranks}, {Axis::kTp, 1}}), comm);
    const json& micro_batches = row["gradients"][rank];
    const at::Tensor expected = tensor_of(row["average"], "fp32");
    const at::Tensor leaf =
        at::zeros({expected.numel()}, at::TensorOptions().dtype(at::kBFloat16)).requires_grad_();
    const std::unique_ptr<DataParallel> dp = autotp_over_dp(row);
    DataParallelSetup setup;
    setup.parameters.push_back({"w", ParamClass::kMatrix, replicated({expected.numel()}), leaf});
    setup.mesh = &mesh;
    setup.master_dtype = Dtype::kFloat32;
    dp->setup(std::move(setup));
    dp->clear_gradients();
    for (std::size_t m = 0; m < micro_batches.size(); ++m) {
      const bool is_last = m + 1 == micro_batches.size();
      const at::Tensor own = tensor_of(micro_batches[m], "bf16");
      dp->before_backward(is_last);
      dp->before_forward().at("w").mul(own).backward(at::ones_like(own));
      dp->after_backward(is_last, is_last);
    }
    dp->finish();
    const at::Tensor gradient = dp->gradients().at("w").flatten();
    const Layout piece = dp->piece_layout("w");
    const std::int64_t begin = piece.flat.empty() ? 0 : piece.flat.front().global_begin;
    unequal[rank] = num_unequal(gradient, expected.narrow(0, begin, gradient.numel()));
    compared[rank] = gradient.numel();
  });
  EXPECT_GE(std::accumulate(compared.begin(), compared.end(), std::int64_t{0}), 96);
  return std::accumulate(unequal.begin(), unequal.end(), std::int64_t{0});
}

TEST(OracleAverages, AndSumsOfMicroBatchesHaveThoseOfDeepSpeed) {
  std::set<int> stages;
  for (json row : stored()["accumulations"]) {
    SCOPED_TRACE(row["framework"].get<std::string>() + " in " +
                 row["accumulate_dtype"].get<std::string>());
    stages.insert(row["zero_stage"].get<int>());

    EXPECT_EQ(accumulated_unlike(row), 0);

    const bool is_wide = row["accumulate_dtype"] == "fp32";
    row["accumulate_dtype"] = is_wide ? "bf16" : "fp32";
    EXPECT_GT(accumulated_unlike(row), 0) << "in the other dtype";
  }
  EXPECT_EQ(stages, (std::set<int>{0, 1, 2}));
}

/// Norm and clipped gradients of a row, on as many ranks; whether they have torch's bits.
void expect_torchs_norm(const json& row) {
  const int ranks = row["ranks"];
  const std::string dtype = row["dtype"];
  ThreadWorld world(ranks);
  world.run([&](Communicator& dp) {
    std::vector<ParameterSpec> specs;
    NamedTensors own, clipped;
    for (const auto& [name, gradient] : row["gradients"].items()) {
      const Shape shape = gradient["shape"].get<Shape>();
      const Range rows = dim0_shards(shape, ranks).rows[static_cast<std::size_t>(dp.rank())];
      const auto rows_of = [&](const json& bits) {
        return tensor_of(bits, dtype).view(shape).narrow(0, rows.begin, rows.count).clone();
      };
      specs.push_back({name, shape});
      own[name] = rows_of(gradient["bits"]);
      clipped[name] = rows_of(row["clipped"][name]);
    }
    TorchGradNorm torchs(specs, ranks == 1 ? nullptr : &dp);

    const double norm = torchs.norm(own);
    const double factor = torchs.factor(norm, row["max_norm"]);

    EXPECT_EQ(norm, tensor_of(json::array({row["norm"]}), dtype).item<double>());
    for (const auto& [name, gradient] : own)
      EXPECT_EQ(num_unequal(gradient.mul(factor), clipped.at(name)), 0) << name;
  });
}

TEST(OracleAverages, AndClipNormsHaveTheBitsOfTorch) {
  int cut = 0;
  for (const json& row : stored()["norms"]) {
    SCOPED_TRACE(row["dtype"].get<std::string>() + " on " + row["ranks"].dump() + " ranks");
    cut += row["ranks"] == 3 ? 1 : 0;
    expect_torchs_norm(row);
  }
  EXPECT_EQ(cut, 3);
}

}  // namespace
}  // namespace isoshard
