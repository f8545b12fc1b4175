// SPDX-License-Identifier: Apache-2.0
// Training steps on a device that is not the CPU: the one of tests, which computes as the CPU does
// and refuses what a GPU refuses. So whatever assumes host memory shows here, without a GPU.
#include <ATen/Context.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "harness/judge/judge.h"
#include "harness/recorder/device_digest.h"
#include "harness/report/json/verdict_json.h"
#include "harness/stats/device/emulated_grid.h"
#include "harness/testing/device/test_device.h"
#include "harness/verdict/equal_runs.h"
#include "subjects/model/zoo/registry.h"
#include "suite/reference/policy.h"
#include "suite/reference/reference.h"
#include "suite/testing/emulated_cases.h"
#include "suite/testing/every_subject.h"
#include "suite/testing/nd_cases.h"

namespace isoshard {
namespace {

// Before the first world, in the controller: ranks are forked with it.
const c10::Device kTestDevice = test_device();

Case on_device(Case item) {
  item.device = Device::Kind::kCuda;
  return item;
}

Case dropped_step(const Combination& c) {
  Case item = step_case(c.subject, c.degrees, c.dtype, "gpt2");
  set_dropout(item.config, 0.1);
  item.micro_batches = 2;
  item.data.unequal_labels = true;
  return item;
}

std::vector<Case> all_cases() {
  return every_subject(Coverage::kPairs, dropped_step).cases;
}

/// Of each subject one, on more than one axis where it has them; the others are under slow.
bool is_usual(const Case& item) {
  static const std::set<std::string> usual = [] {
    std::map<std::string, Case> of_subject;
    for (const Case& c : all_cases()) {
      const auto [found, is_first] = of_subject.emplace(c.subject, c);
      if (c.degrees.tp > 1 && c.degrees.dp > 1 && found->second.degrees.tp == 1) found->second = c;
    }
    std::set<std::string> slugs;
    for (const auto& [subject, c] : of_subject) slugs.insert(c.slug());
    return slugs;
  }();
  return usual.contains(item.slug());
}

std::vector<Case> cases(bool usual) {
  std::vector<Case> result = all_cases();
  std::erase_if(result, [usual](const Case& item) { return is_usual(item) != usual; });
  return result;
}

/// What every_subject has not: pipelines, context and sequence parallelism, split vocabularies,
/// ZeRO, masters, loss scales, AdamW, recomputation, and a run that goes on from its checkpoint.
std::vector<Case> feature_cases() {
  std::vector<Case> all;
  all.push_back(in_pipeline(nd_case({.pp = 2, .cp = 2})));
  all.push_back(in_ring(nd_case({.cp = 2, .tp = 2}, Dtype::kBFloat16)));
  all.push_back(in_sequence(nd_case({.cp = 2, .tp = 2})));
  all.push_back(in_sequence(step_case("megatron", {.tp = 2}, Dtype::kFloat64)));
  Case zero = split(step_case("autotp", {.dp = 2, .tp = 2}, Dtype::kBFloat16), 8);
  zero.settings.zero_stage = 2;
  zero.settings.master_dtype = Dtype::kFloat32;
  zero.settings.optimizer.kind = OptimizerSettings::Kind::kAdamW;
  all.push_back(zero);
  Case scaled = step_case("ddp", {.dp = 2}, Dtype::kFloat16);
  scaled.settings.master_dtype = Dtype::kFloat32;
  scaled.settings.loss_scale.kind = LossScaleSettings::Kind::kDynamic;
  all.push_back(scaled);
  Case recomputed = step_case("fsdp_tp", {.dp = 2, .tp = 2}, Dtype::kFloat32, "llama");
  recomputed.settings.recompute_every = 1;
  all.push_back(recomputed);
  Case reloaded = step_case("fsdp_tp", {.dp = 2});
  reloaded.steps = 2;
  reloaded.reload_after = 1;
  reloaded.settings.optimizer.kind = OptimizerSettings::Kind::kAdamW;
  all.push_back(reloaded);
  return all;
}

/// What a run recorded, as digests.
Trace recorded(const Case& item) {
  return run_case(item, Reference(), digests_only({}));
}

void expect_bits_of_host_memory(const Case& item) {
  ASSERT_EQ(kTestDevice.type(), c10::DeviceType::PrivateUse1);

  const RunEquality equality = equality_of(recorded(item), recorded(on_device(item)));

  EXPECT_EQ(equality.difference, "");
  EXPECT_GT(equality.tensors, 50);
}

class DeviceStep : public ::testing::TestWithParam<Case> {};
class DeviceStepWide : public DeviceStep {};

TEST_P(DeviceStep, HasTheBitsOfTheSameStepInHostMemory) {
  expect_bits_of_host_memory(GetParam());
}
TEST_P(DeviceStepWide, HasTheBitsOfTheSameStepInHostMemory) {
  expect_bits_of_host_memory(GetParam());
}
INSTANTIATE_TEST_SUITE_P(EverySubject, DeviceStep, ::testing::ValuesIn(cases(true)), case_name);
INSTANTIATE_TEST_SUITE_P(EverySubject, DeviceStepWide, ::testing::ValuesIn(cases(false)),
                         case_name);

INSTANTIATE_TEST_SUITE_P(Features, DeviceStepWide, ::testing::ValuesIn(feature_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Pipeline, DeviceStep, ::testing::Values(feature_cases().front()),
                         case_name);

// Stages of a pipeline take turns in another order than their emulation.
void expect_bits_of_emulation(const Case& item) {
  const EmulatedAndActual both = run_beside_its_emulation(on_device(item));

  EXPECT_EQ(equality_of(both.emulated, both.actual).difference, "");
}

class DeviceEmulated : public ::testing::TestWithParam<Case> {};
class DeviceEmulatedWide : public DeviceEmulated {};

TEST_P(DeviceEmulated, IsBitEqualToItsDeclaredArithmeticOnTheDevice) {
  expect_bits_of_emulation(GetParam());
}
TEST_P(DeviceEmulatedWide, IsBitEqualToItsDeclaredArithmeticOnTheDevice) {
  expect_bits_of_emulation(GetParam());
}
INSTANTIATE_TEST_SUITE_P(EverySubject, DeviceEmulated, ::testing::ValuesIn(cases(true)), case_name);
INSTANTIATE_TEST_SUITE_P(EverySubject, DeviceEmulatedWide, ::testing::ValuesIn(cases(false)),
                         case_name);

INSTANTIATE_TEST_SUITE_P(Features, DeviceEmulatedWide, ::testing::ValuesIn(feature_cases()),
                         case_name);

/// What ranks, which are forked, tell of themselves.
class ToldByRanks {
 public:
  ToldByRanks() {
    void* const memory =
        ::mmap(nullptr, sizeof(Counts), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw InfrastructureError("no shared memory for a test");
    counts_ = new (memory) Counts;
  }
  ~ToldByRanks() { ::munmap(counts_, sizeof(Counts)); }
  ToldByRanks(const ToldByRanks&) = delete;
  ToldByRanks& operator=(const ToldByRanks&) = delete;

  struct Counts {
    std::atomic<std::int64_t> digests{0};
    std::atomic<std::int64_t> bytes[16] = {};  ///< by rank: fetched from the device
  };
  [[nodiscard]] Counts& counts() const { return *counts_; }
  [[nodiscard]] std::int64_t bytes_fetched() const {
    std::int64_t sum = 0;
    for (const auto& of_rank : counts_->bytes) sum += of_rank;
    return sum;
  }

 private:
  Counts* counts_;
};

class CountedDigest final : public DeviceDigest {
 public:
  explicit CountedDigest(ToldByRanks::Counts& counts) : counts_(&counts) {}
  std::uint64_t digest_of(const at::Tensor& tensor) override {
    ++counts_->digests;
    return device::emulate_digest(static_cast<const std::byte*>(tensor.const_data_ptr()),
                                  tensor.nbytes());
  }

 private:
  ToldByRanks::Counts* counts_;
};

/// The case against its reference; with digests on the device, or without.
Trace compared_run(const Case& item, const ToldByRanks& told, bool has_digests) {
  RunOptions options;
  options.observers.push_back([&told](int rank) {
    return [&told, rank](const Site&, const at::Tensor&) {
      told.counts().bytes[rank] = bytes_from_test_device();
    };
  });
  const Reference& reference = reference_of(item);
  DeviceDigestMaker make;
  if (has_digests) make = [&told] { return std::make_unique<CountedDigest>(told.counts()); };
  set_device_digest(kTestDevice.type(), std::move(make));
  Trace trace = run_case(item, reference, options);
  set_device_digest(kTestDevice.type(), {});
  return trace;
}

class DeviceRecords : public ::testing::TestWithParam<Case> {};

TEST_P(DeviceRecords, HaveTheSameBytesThoughEqualTensorsWereLeftOnTheDevice) {
  const Case item = on_device(GetParam());
  const ToldByRanks fetching, leaving;

  const Trace fetched = compared_run(item, fetching, false);
  const Trace left = compared_run(item, leaving, true);

  ASSERT_EQ(left.ranks.size(), fetched.ranks.size());
  for (std::size_t r = 0; r < left.ranks.size(); ++r) {
    EXPECT_EQ(left.ranks[r].serialize(), fetched.ranks[r].serialize());
    for (const Record& record : left.ranks[r].records) {
      if (!record.kept) continue;
      const HostTensor own = left.ranks[r].tensor(record), other = fetched.ranks[r].tensor(record);
      EXPECT_TRUE(std::ranges::equal(own.bytes, other.bytes)) << describe(record.key);
    }
  }
  const auto verdict_on = [&](const Trace& trace) {
    return verdict_json(judge(reference_of(item), trace, policy_of(item))).dump();
  };
  EXPECT_EQ(verdict_on(left), verdict_on(fetched));
  EXPECT_EQ(fetching.counts().digests, 0);
  EXPECT_GT(leaving.counts().digests, 10);
  EXPECT_LT(leaving.bytes_fetched(), fetching.bytes_fetched());
}
INSTANTIATE_TEST_SUITE_P(EverySubject, DeviceRecords, ::testing::ValuesIn(cases(true)), case_name);

/// The case, where every activation and gradient that passes must be on the device.
void run_watched(const Case& item) {
  RunOptions options = digests_only({});
  options.observers.push_back([](int /*rank*/) {
    return [](const Site& site, const at::Tensor& value) {
      if (value.device() != kTestDevice) throw UsageError(site.name + " is in host memory");
    };
  });
  (void)run_case(item, Reference(), options);
}

// What a run on the CPU shows: the watcher sees values, and can fail.
TEST(DeviceControl, ActivationsAndGradientsOfEverySubjectAreOnTheDevice) {
  for (const Case& item : cases(true)) {
    SCOPED_TRACE(item.slug());
    EXPECT_NO_THROW(run_watched(on_device(item)));
    EXPECT_THAT([&] { run_watched(item); }, ::testing::ThrowsMessage<std::exception>(
                                                ::testing::HasSubstr("is in host memory")));
  }
}

// Settings of a GPU hold in ranks, and a rank that changes one ends the run by name.
TEST(DeviceControl, ARankThatChangesASettingOfTheGpuIsNamed) {
  const Case item = on_device(cases(true).front());
  RunOptions options = digests_only({});
  options.observers.push_back([](int /*rank*/) {
    return [](const Site&, const at::Tensor&) { at::globalContext().setAllowTF32CuBLAS(true); };
  });

  EXPECT_THAT([&] { (void)run_case(item, Reference(), options); },
              ::testing::ThrowsMessage<std::exception>(
                  ::testing::HasSubstr("tf32_matmul must read back as off, got on")));
}

}  // namespace
}  // namespace isoshard
