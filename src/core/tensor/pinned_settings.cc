// SPDX-License-Identifier: Apache-2.0
/// The table, by at::globalContext() and the environment.
#include "core/tensor/pinned_settings.h"

#include <ATen/Context.h>
#include <fmt/format.h>

#include <cstdlib>
#include <utility>

#include "core/base/error.h"

namespace isoshard {
namespace {

using Option = at::CuBLASReductionOption;

at::Context& context() {
  return at::globalContext();
}

std::string word(bool on) {
  return on ? "on" : "off";
}

bool is_on(const std::string& value) {
  if (value == "on") return true;
  if (value == "off") return false;
  throw UsageError(fmt::format("a setting must be on or off, got {}", value));
}

std::string word(Option option) {
  switch (option) {
    case Option::AllowReducedPrecisionWithSplitK:
      return "reduced";
    case Option::DisallowReducedPrecisionAllowSplitK:
      return "fp32";
    case Option::DisallowReducedPrecisionDisallowSplitK:
      return "fp32 without split-k";
  }
  return "unknown";
}

/// Reduced precision, and split-k.
std::pair<bool, bool> reduction_of(const std::string& value) {
  if (value == "reduced") return {true, true};
  if (value == "fp32") return {false, true};
  if (value == "fp32 without split-k") return {false, false};
  throw UsageError(fmt::format(
      "how cuBLAS reduces must be reduced, fp32 or fp32 without split-k, got {}", value));
}

/// The kernels that scaled_dot_product_attention may choose, each with a comma before the next.
std::string attention_kernels() {
  std::string all;
  const auto add = [&](bool enabled, const char* name) {
    if (enabled) all += (all.empty() ? "" : ",") + std::string(name);
  };
  add(context().userEnabledMathSDP(), "math");
  add(context().userEnabledFlashSDP(), "flash");
  add(context().userEnabledMemEfficientSDP(), "mem_efficient");
  add(context().userEnabledCuDNNSDP(), "cudnn");
  return all;
}

void set_attention_kernels(const std::string& value) {
  const std::string all = "," + value + ",";
  const auto has = [&](const char* name) {
    return all.find(fmt::format(",{},", name)) != std::string::npos;
  };
  context().setSDPUseMath(has("math"));
  context().setSDPUseFlash(has("flash"));
  context().setSDPUseMemEfficient(has("mem_efficient"));
  context().setSDPUseCuDNN(has("cudnn"));
  if (attention_kernels() == value) return;
  throw UsageError(fmt::format(
      "attention kernels must be some of math,flash,mem_efficient,cudnn in this order, got {}",
      value));
}

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

void set_variable(const char* name, const std::string& value) {
  if (value.empty()) {
    ::unsetenv(name);
  } else {
    ::setenv(name, value.c_str(), 1);
  }
}

constexpr const char* kCublasWorkspace = "CUBLAS_WORKSPACE_CONFIG";
constexpr const char* kNcclAlgorithm = "NCCL_ALGO";
constexpr const char* kNcclProtocol = "NCCL_PROTO";

const PinnedSetting kSettings[] = {
    {"tf32_matmul", "off", "at::Context::setAllowTF32CuBLAS",
     "fp32 products round their operands to 11 bits",
     [] { return word(context().allowTF32CuBLAS()); },
     [](const std::string& value) { context().setAllowTF32CuBLAS(is_on(value)); }},
    {"tf32_cudnn", "off", "at::Context::setAllowTF32CuDNN", "the same of cuDNN's convolutions",
     [] { return word(context().allowTF32CuDNN()); },
     [](const std::string& value) { context().setAllowTF32CuDNN(is_on(value)); }},
    {"bf16_reduction", "fp32", "at::Context::setAllowBF16ReductionCuBLAS",
     "whether parts of a bf16 product's sum are added in bf16",
     [] { return word(context().allowBF16ReductionCuBLAS()); },
     [](const std::string& value) {
       const auto [reduced, split] = reduction_of(value);
       context().setAllowBF16ReductionCuBLAS(reduced, split);
     }},
    {"fp16_reduction", "fp32", "at::Context::setAllowFP16ReductionCuBLAS", "the same of fp16",
     [] { return word(context().allowFP16ReductionCuBLAS()); },
     [](const std::string& value) {
       const auto [reduced, split] = reduction_of(value);
       context().setAllowFP16ReductionCuBLAS(reduced, split);
     }},
    {"fp16_accumulation", "off", "at::Context::setAllowFP16AccumulationCuBLAS",
     "whether fp16 products add up in fp16",
     [] { return word(context().allowFP16AccumulationCuBLAS()); },
     [](const std::string& value) { context().setAllowFP16AccumulationCuBLAS(is_on(value)); }},
    {"deterministic_algorithms", "on", "at::Context::setDeterministicAlgorithms",
     "kernels that add with atomics are replaced, or are an error",
     [] { return word(context().deterministicAlgorithms()); },
     [](const std::string& value) {
       context().setDeterministicAlgorithms(is_on(value), /*warn_only=*/false);
     }},
    {"fill_uninitialized_memory", "on", "at::Context::setDeterministicFillUninitializedMemory",
     "memory that nobody wrote is NaN, and never what was there before",
     [] { return word(context().deterministicFillUninitializedMemory()); },
     [](const std::string& value) {
       context().setDeterministicFillUninitializedMemory(is_on(value));
     }},
    {"deterministic_cudnn", "on", "at::Context::setDeterministicCuDNN",
     "cuDNN's kernels that add in any order are left out",
     [] { return word(context().deterministicCuDNN()); },
     [](const std::string& value) { context().setDeterministicCuDNN(is_on(value)); }},
    {"benchmark_cudnn", "off", "at::Context::setBenchmarkCuDNN",
     "the fastest of cuDNN's kernels is found by timing, so it may be another one next time",
     [] { return word(context().benchmarkCuDNN()); },
     [](const std::string& value) { context().setBenchmarkCuDNN(is_on(value)); }},
    {"attention_kernels", "math", "at::Context::setSDPUseMath and its like",
     "the kernels that scaled_dot_product_attention chooses from", &attention_kernels,
     &set_attention_kernels},
    {"cublas_workspace", ":4096:8", kCublasWorkspace,
     "cuBLAS on several streams gives the same bits in each run only with such a workspace",
     [] { return variable(kCublasWorkspace); },
     [](const std::string& value) { set_variable(kCublasWorkspace, value); }},
    {"nccl_algorithm", "Ring", kNcclAlgorithm, "the order in which native reductions add",
     [] { return variable(kNcclAlgorithm); },
     [](const std::string& value) { set_variable(kNcclAlgorithm, value); }},
    {"nccl_protocol", "Simple", kNcclProtocol, "how native reductions cut what they add",
     [] { return variable(kNcclProtocol); },
     [](const std::string& value) { set_variable(kNcclProtocol, value); }},
};

void write_all(const SettingValues& values) {
  for (const PinnedSetting& setting : kSettings) {
    const std::string& value = values.find(setting.name)->second;
    if (setting.read() != value) setting.write(value);
  }
}

}  // namespace

std::span<const PinnedSetting> pinned_settings() {
  return kSettings;
}

SettingValues pinned_values(const SettingValues& changes) {
  SettingValues values;
  for (const PinnedSetting& setting : kSettings) values.emplace(setting.name, setting.pinned);
  for (const auto& [name, value] : changes) {
    const auto found = values.find(name);
    if (found == values.end())
      throw UsageError(fmt::format("no setting of a GPU is called {}", name));
    found->second = value;
  }
  return values;
}

SettingValues read_settings() {
  SettingValues values;
  for (const PinnedSetting& setting : kSettings) values.emplace(setting.name, setting.read());
  return values;
}

SettingsPin::SettingsPin(SettingValues values)
    : values_(std::move(values)), before_(read_settings()) {
  try {
    write_all(values_);
    check();
  } catch (...) {
    write_all(before_);
    throw;
  }
}

SettingsPin::~SettingsPin() {
  write_all(before_);
}

void SettingsPin::check() const {
  for (const PinnedSetting& setting : kSettings) {
    const std::string& wanted = values_.find(setting.name)->second;
    const std::string got = setting.read();
    if (got == wanted) continue;
    throw InfrastructureError(fmt::format(
        "setting {} must read back as {}, got {}: something in the process has changed it ({})",
        setting.name, wanted, got, setting.how));
  }
}

}  // namespace isoshard
