// SPDX-License-Identifier: Apache-2.0
/// `isoshard doctor`: what this machine and build offer, and whether two ranks can talk.
#include <fmt/format.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <boost/program_options/value_semantic.hpp>
#include <charconv>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "app/cluster/cluster.h"
#include "app/cluster/probe.h"
#include "app/commands.h"
#include "app/options/attach_options.h"
#include "core/base/error.h"
#include "core/comm/backend.h"
#include "fixtures/inputs/inputs.h"
#include "fixtures/oracle/arithmetic_digest.h"
#include "harness/cli/output.h"
#include "harness/report/text/hanging.h"
#include "harness/verdict/exit_code.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/machine.h"

namespace isoshard {
namespace {

constexpr std::int64_t kEnoughFiles = 256;
constexpr std::string_view kGpuDevice = "nvidia";  // /dev/nvidia0, /dev/nvidia1, ...

void line(std::string_view name, const std::string& value) {
  print(hanging(fmt::format("{:<14} ", name), value));
}

std::string limit(std::int64_t value) {
  return value < 0 ? "no limit" : fmt::format("{}", value);
}

/// "yes", or "no" and the reason why this build lacks the backend.
std::string built(std::string_view why_not) {
  return why_not.empty() ? "yes" : fmt::format("no: {}", why_not);
}

/// Prints each problem where it is found, and counts.
class Problems {
 public:
  void add(const std::string& text) {
    ++count_;
    print("  problem: {}\n", text);
  }
  [[nodiscard]] int count() const noexcept { return count_; }

 private:
  int count_ = 0;
};

void show_machine(Problems& problems) {
  const Machine machine = this_machine();
  line("system", machine.system);
  line("cpu", fmt::format("{} ({})", machine.cpu,
                          machine.cpu_features.empty() ? "no vector features known"
                                                       : machine.cpu_features));
  line("cores", fmt::format("{}", machine.cores));
  line("memory",
       fmt::format("{}, {} available", gib(machine.memory_bytes), gib(machine.available_bytes)));
  if (machine.available_bytes > 0 && machine.available_bytes < kEnoughMemory) {
    problems.add(
        fmt::format("less than {} available; worlds may be killed for memory", gib(kEnoughMemory)));
  }
  line("/dev/shm", machine.shm_bytes < 0 ? "none (not needed: shared memory is anonymous)"
                                         : gib(machine.shm_bytes));
  line("limits", fmt::format("processes {}, open files {}", limit(machine.max_processes),
                             limit(machine.max_open_files)));
  if (machine.max_open_files >= 0 && machine.max_open_files < kEnoughFiles) {
    problems.add(
        fmt::format("fewer than {} open files are allowed; raise it with ulimit -n", kEnoughFiles));
  }
}

void show_build(Problems& problems) {
  line("libtorch", fmt::format("{} (CPU)", TORCH_VERSION));
  line("backends", "shm, thread");
  line("  mpi", built(why_mpi_is_not_built()));
  line("  nccl", built(why_nccl_is_not_built()));
  const std::uint64_t digest = arithmetic_digest();
  line("arithmetic",
       fmt::format("{} ({})", digest_text(digest),
                   rounds_like_the_oracle(digest)
                       ? "rounds as the machine that recorded the oracle"
                       : "rounds unlike the machine that recorded the oracle: bounds judge"));
  for (const auto& [name, value] : settings_in_environment())
    line("environment", fmt::format("{}={}", name, value));
  try {
    line("text", default_text_path().string());
  } catch (const Error& error) {
    line("text", "missing");
    problems.add(error.what());
  }
}

/// Two forked ranks add 1 and 2.
void self_test(Problems& problems) {
  const auto begin = std::chrono::steady_clock::now();
  const WorldReport report = run_forked({.size = 2, .name = "doctor"}, [](Rank& rank) {
    float value = static_cast<float>(rank.rank() + 1);
    rank.comm()
        .all_reduce({reinterpret_cast<std::byte*>(&value), 1, Dtype::kFloat32}, Reduction::kSum, {})
        .wait();
    rank.post_result(std::as_bytes(std::span(&value, 1)));
  });
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
  bool right = report.ok();
  for (const RankReport& rank : report.ranks) {
    float sum = 0;
    if (rank.result.size() == sizeof sum) std::memcpy(&sum, rank.result.data(), sizeof sum);
    right = right && sum == 3;
  }
  line("2-rank test", right ? fmt::format("passed in {:.1f} ms", took.count()) : "failed");
  if (!right)
    problems.add(report.ok() ? "two ranks did not get the sum of what they had"
                             : report.describe());
}

/// One slot for each NVIDIA GPU that this process may open, in the form of ctest's
/// --resource-spec-file.
std::string resource_spec() {
  std::vector<int> numbers;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", ignored)) {
    const std::string name = entry.path().filename().string();
    int number = 0;
    const char* const begin = name.c_str() + kGpuDevice.size();
    if (!name.starts_with(kGpuDevice)) continue;
    const auto [end, error] = std::from_chars(begin, name.c_str() + name.size(), number);
    if (error == std::errc() && *end == '\0') numbers.push_back(number);
  }
  std::ranges::sort(numbers);
  nlohmann::ordered_json gpus = nlohmann::ordered_json::array();
  for (const int number : numbers) gpus.push_back({{"id", std::to_string(number)}, {"slots", 1}});
  return nlohmann::ordered_json{{"version", {{"major", 1}, {"minor", 0}}},
                                {"local", {{{"gpus", std::move(gpus)}}}}}
      .dump(1);
}

int end(const Problems& problems, std::string_view ready) {
  if (problems.count() == 0) {
    print("ready: {}\n", ready);
    return kExitConforms;
  }
  print("{} problem{}\n", problems.count(), problems.count() == 1 ? "" : "s");
  return kExitInfrastructure;
}

/// The hosts of the job beside each other. All processes measure, and find the same.
int run_attached(int num_ranks) {
  HostFacts own = facts_of_this_host(library_of_job());
  // hosts are what they are in a run, whatever their names
  if (Peers* const peers = default_launcher().peers(); peers != nullptr) {
    const auto host = peers->hosts().host_of[static_cast<std::size_t>(peers->index())];
    own.host = host_labels(peers->hosts().names)[static_cast<std::size_t>(host)];
  }
  const Cluster cluster = probe_cluster(default_launcher(), num_ranks, own);
  print(cluster_table(cluster));
  Problems problems;
  for (const std::string& finding : cluster_findings(cluster)) problems.add(finding);
  return end(problems, fmt::format("mpirun -n {} isoshard verify --attach", num_ranks));
}

int run_doctor(const ParsedOptions& options) {
  const int num_ranks = ranks_of_job(options);
  if (num_ranks > 0 && options.get<bool>("resource-spec")) {
    throw UsageError(
        "--resource-spec is about the GPUs of one machine, and --attach about a job; leave one of "
        "them out");
  }
  if (num_ranks > 0) return run_attached(num_ranks);
  if (options.get<bool>("resource-spec")) {
    print("{}\n", resource_spec());
    return kExitConforms;
  }
  Problems problems;
  show_machine(problems);
  show_build(problems);
  self_test(problems);
  return end(problems, "isoshard verify");
}

}  // namespace

Command doctor_command() {
  return {
      "doctor",
      "show what is installed and what the machine offers, and run a 2-rank self-test; with "
      "--attach show what differs between the hosts of a job",
      "doctor [options]",
      "  isoshard doctor\n"
      "  mpirun -n 8 --hostfile hosts isoshard doctor --attach   versions, rounding, clocks, links "
      "and programs of all hosts\n"
      "  isoshard doctor --resource-spec > gpus.json   for ctest --resource-spec-file gpus.json",
      [](OptionTable& table) {
        declare_attach_options(table);
        table.group("output")(
            "resource-spec", boost::program_options::bool_switch(),
            "print the GPUs of this machine as ctest takes them, and nothing else");
      },
      run_doctor};
}

}  // namespace isoshard
