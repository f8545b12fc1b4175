// SPDX-License-Identifier: Apache-2.0
// On a GPU: every subject's step against its declared arithmetic and the plain process there, and
// whether products of cuBLAS depend on the number of output columns.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "core/comm/nccl/nccl_world.h"
#include "core/tensor/device.h"
#include "core/tensor/pinned_settings.h"
#include "harness/testing/run_world.h"
#include "harness/verdict/equal_runs.h"
#include "subjects/model/zoo/registry.h"
#include "suite/reference/device/device_collectives.h"
#include "suite/testing/emulated_cases.h"
#include "suite/testing/every_subject.h"

namespace isoshard {
namespace {

Case with_dropout(const Combination& c) {
  Case item = step_case(c.subject, c.degrees, c.dtype, "gpt2");
  set_dropout(item.config, 0.1);
  item.micro_batches = 2;
  item.data.unequal_labels = true;
  return item;
}

// Chosen as cases of a CPU: a case of a device is refused where there is none, and a program
// without a GPU must list the same suites.
std::vector<Case> few_cases() {
  std::vector<Case> cases = every_subject(Coverage::kPairs, with_dropout).cases;
  for (Case& item : cases) item.device = Device::Kind::kCuda;
  return cases;
}

class GpuStep : public ::testing::TestWithParam<Case> {};

TEST_P(GpuStep, IsBitEqualToItsDeclaredArithmetic) {
  (void)run_bit_equal_to_its_emulation(GetParam());
}
TEST_P(GpuStep, MatchesTheSingleProcessOnTheGpu) {
  expect_matches_single_process(GetParam());
}
INSTANTIATE_TEST_SUITE_P(EverySubject, GpuStep, ::testing::ValuesIn(few_cases()), case_name);

/// x [rows, in], weight [out, in].
struct Product {
  const char* name;
  std::int64_t rows, in, out;
};
// seeds/000: Qwen2.5-0.5B at sequence 512; seeds/002: the column and row experiment.
constexpr Product kProducts[] = {{"q_proj", 1024, 896, 896},
                                 {"k_proj", 1024, 896, 128},
                                 {"gate_proj", 1024, 896, 4864},
                                 {"lm_head", 1024, 896, 151'936},
                                 {"column", 8192, 4096, 4096}};

/// How many elements of a column-parallel output differ from those of the whole product.
std::int64_t unequal_elements(const Product& product, int tp, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  const at::TensorOptions on_device = at::TensorOptions().dtype(dtype).device(device_of_rank(0));
  const auto drawn = [&](std::int64_t rows, std::int64_t columns, double step) {
    const at::Tensor places = at::arange(rows * columns, at::TensorOptions().dtype(at::kDouble));
    return (places * step).sin().view({rows, columns}).to(on_device.dtype()).to(on_device.device());
  };
  const at::Tensor x = drawn(product.rows, product.in, 0.7);
  const at::Tensor weight = drawn(product.out, product.in, 0.3);
  std::vector<at::Tensor> parts;
  for (const at::Tensor& part : weight.chunk(tp, 0))
    parts.push_back(at::linear(x, part.contiguous()));
  return at::cat(parts, 1).ne(at::linear(x, weight)).sum().item<std::int64_t>();
}

class GpuColumn : public ::testing::TestWithParam<Product> {};

// Whether it is so depends on the kernel that cuBLAS takes for a shape. The facts are printed; what
// is claimed is that they are the same each time.
TEST_P(GpuColumn, SaysTheSameInEveryRun) {
  for (const bool tf32 : {false, true}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const int tp : {2, 4}) {
        std::vector<std::int64_t> unequal;
        for (int run = 0; run < 2; ++run) {
          const std::vector<std::int64_t> of_rank = run_world<std::int64_t>(1, [&](Rank&) {
            const SettingsPin pin(pinned_values({{"tf32_matmul", tf32 ? "on" : "off"}}));
            return unequal_elements(GetParam(), tp, dtype);
          });
          ASSERT_EQ(of_rank.size(), 1U);
          unequal.push_back(of_rank[0]);
        }

        EXPECT_EQ(unequal[0], unequal[1]);
        std::printf("column %s %s tp %d tf32 %s: %lld elements differ\n", GetParam().name,
                    at::toString(dtype), tp, tf32 ? "on" : "off",
                    static_cast<long long>(unequal[0]));
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Shapes, GpuColumn, ::testing::ValuesIn(kProducts),
                         [](const auto& of) { return std::string(of.param.name); });

/// NCCL of this program is out of sight while it lives.
class WithoutNccl {
 public:
  WithoutNccl() : kept_(gpu_api()) {
    set_gpu_api({});
    forget_shared_gpus();
  }
  ~WithoutNccl() {
    set_gpu_api(kept_);
    forget_shared_gpus();
  }
  WithoutNccl(const WithoutNccl&) = delete;
  WithoutNccl& operator=(const WithoutNccl&) = delete;

 private:
  GpuApiFactory kept_;
};

Trace digests_of(const Case& item) {
  return run_case(item, Reference(), digests_only({}));
}

class GpuCollectives : public ::testing::TestWithParam<Case> {};

// Both add in the same order: what NCCL moves is reduced by our kernels.
TEST_P(GpuCollectives, HaveTheBitsOfThoseThatAreStagedThroughHostMemory) {
  const std::string words = device_collectives(GetParam()).words;
  std::printf("ranks meet by %s\n", words.c_str());
  if (!words.starts_with("nccl")) GTEST_SKIP() << words;
  const Trace through_nccl = digests_of(GetParam());
  const WithoutNccl staging;
  ASSERT_TRUE(device_collectives(GetParam()).words.starts_with("shm, staged"));

  const RunEquality equality = equality_of(digests_of(GetParam()), through_nccl);

  EXPECT_EQ(equality.difference, "");
  EXPECT_GT(equality.tensors, 50);
}
INSTANTIATE_TEST_SUITE_P(EverySubject, GpuCollectives, ::testing::ValuesIn(few_cases()), case_name);

}  // namespace
}  // namespace isoshard
