// SPDX-License-Identifier: Apache-2.0
// Reads what the kernel says about the machine.
#include "harness/world/machine.h"

#include <fmt/format.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/sysinfo.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>

#include "core/base/printable.h"

namespace isoshard {
namespace {

// The value of the first line "key<separator> value" of a file; empty if there is none.
std::string value_in(const char* path, std::string_view key, char separator) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::size_t end = line.find(separator);
    if (end == std::string::npos || !std::string_view(line).starts_with(key)) continue;
    if (line.find_first_not_of(" \t", key.size()) != end) continue;  // a longer key
    const std::size_t begin = line.find_first_not_of(" \t\"", end + 1);
    const std::size_t last = line.find_last_not_of(" \t\"");
    return begin == std::string::npos ? std::string() : line.substr(begin, last - begin + 1);
  }
  return {};
}

std::int64_t kib_of(std::string_view key) {
  const std::string text = value_in("/proc/meminfo", key, ':');
  return text.empty() ? 0 : std::stoll(text) * 1024;
}

// No limit ("max", or a number near 2^63) is 0.
std::int64_t limit_in(const std::filesystem::path& file_path) {
  std::ifstream file(file_path);
  std::int64_t limit = 0;
  return file >> limit && limit < (std::int64_t{1} << 60) ? limit : 0;
}

// The least of `file` in the groups from the root down to `group` ("/a/b").
std::int64_t least_limit(const std::filesystem::path& root, const std::filesystem::path& group,
                         const char* file) {
  std::int64_t least = 0;
  std::filesystem::path folder = root;
  const auto look = [&] {
    const std::int64_t limit = limit_in(folder / file);
    if (limit > 0 && (least == 0 || limit < least)) least = limit;
  };
  look();
  for (const std::filesystem::path& name : group.relative_path()) {
    folder /= name;
    look();
  }
  return least;
}

// Of the control groups of this process. A container may see its own one as the root, or find the
// path that /proc says nowhere.
std::int64_t control_group_limit() {
  const std::filesystem::path root = "/sys/fs/cgroup";
  std::string unified = "/", memory = "/";
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "4:memory:/a/b", "0::/a/b"
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (controllers.empty()) unified = line.substr(second + 1);
    if (("," + controllers + ",").find(",memory,") != std::string::npos)
      memory = line.substr(second + 1);
  }
  const std::int64_t new_limit = least_limit(root, unified, "memory.max");
  return new_limit > 0 ? new_limit : least_limit(root / "memory", memory, "memory.limit_in_bytes");
}

std::int64_t limit_of(int resource) {
  rlimit limit{};
  if (getrlimit(static_cast<__rlimit_resource_t>(resource), &limit) != 0 ||
      limit.rlim_cur == RLIM_INFINITY)
    return -1;
  return static_cast<std::int64_t>(limit.rlim_cur);
}

std::string features_of(const std::string& flags) {
  std::istringstream stream(flags);
  std::string found;
  for (std::string flag; stream >> flag;) {
    for (const std::string_view known :
         {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "bf16"}) {
      if (flag == known) found += (found.empty() ? "" : " ") + flag;
    }
  }
  return found;
}

}  // namespace

std::map<std::string, std::string> settings_in_environment() {
  constexpr std::string_view kPrefixes[] = {"ISOSHARD_", "OMP_",    "GOMP_", "KMP_",    "MKL_",
                                            "OPENBLAS_", "ATEN_",   "DNNL_", "ONEDNN_", "TORCH_",
                                            "PYTORCH_",  "NCCL_",   "GLOO_", "OMPI_",   "MASTER_",
                                            "CUDA_",     "MALLOC_", "LD_",   "GTEST_"};
  constexpr std::string_view kNames[] = {"RANK",           "LOCAL_RANK", "WORLD_SIZE",
                                         "GLIBC_TUNABLES", "LC_ALL",     "TZ"};
  std::map<std::string, std::string> settings;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::string_view name = text.substr(0, text.find('='));
    const auto begins = [&](std::string_view prefix) { return name.starts_with(prefix); };
    if (name.size() == text.size() || (std::ranges::none_of(kPrefixes, begins) &&
                                       std::ranges::find(kNames, name) == std::end(kNames)))
      continue;
    settings.emplace(printable(name), printable(text.substr(name.size() + 1)));
  }
  return settings;
}

MachineMemory memory_of_machine() {
  MachineMemory memory{kib_of("MemTotal"), kib_of("MemAvailable")};
  struct sysinfo system {};
  if (memory.bytes == 0 && ::sysinfo(&system) == 0) {  // there is no /proc
    memory.bytes = static_cast<std::int64_t>(system.totalram * system.mem_unit);
    memory.available_bytes =
        static_cast<std::int64_t>((system.freeram + system.bufferram) * system.mem_unit);
  }
  if (const std::int64_t limit = control_group_limit(); limit > 0) {
    memory.bytes = std::min(memory.bytes, limit);
    memory.available_bytes = std::min(memory.available_bytes, limit);
  }
  return memory;
}

Machine this_machine() {
  Machine machine;
  utsname kernel{};
  if (uname(&kernel) == 0)
    machine.system = fmt::format("{} {} {}", kernel.sysname, kernel.release, kernel.machine);
  if (const std::string name = value_in("/etc/os-release", "PRETTY_NAME", '='); !name.empty())
    machine.system = name + ", " + machine.system;
  machine.cpu = value_in("/proc/cpuinfo", "model name", ':');
  machine.cpu_features = features_of(value_in("/proc/cpuinfo", "flags", ':') + " " +
                                     value_in("/proc/cpuinfo", "Features", ':'));
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) machine.cores = std::max(1, CPU_COUNT(&set));
  const MachineMemory memory = memory_of_machine();
  machine.memory_bytes = memory.bytes;
  machine.available_bytes = memory.available_bytes;
  struct statvfs shm {};
  if (statvfs("/dev/shm", &shm) == 0)
    machine.shm_bytes = static_cast<std::int64_t>(shm.f_blocks * shm.f_frsize);
  machine.max_processes = limit_of(RLIMIT_NPROC);
  machine.max_open_files = limit_of(RLIMIT_NOFILE);
  return machine;
}

}  // namespace isoshard
