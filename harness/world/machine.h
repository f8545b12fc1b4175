// SPDX-License-Identifier: Apache-2.0
/// The resources of the machine for worlds of forked ranks.
#pragma once
#include <cstdint>
#include <map>
#include <string>

namespace isoshard {

struct Machine {
  std::string system;  ///< "Debian GNU/Linux 12 (bookworm), Linux 6.1.0"
  std::string cpu;     ///< model name
  /// Of those that choose kernels: "avx2 avx512f avx512_bf16 amx_bf16"
  std::string cpu_features;
  int cores = 1;                  ///< that this process may use
  std::int64_t memory_bytes = 0;  ///< of the machine, or of the control group where that is less
  std::int64_t available_bytes = 0;
  /// Of /dev/shm (worlds do not need it: their shared memory is anonymous); -1: there is none.
  std::int64_t shm_bytes = -1;
  std::int64_t max_processes = -1;  ///< of this user, -1: no limit
  std::int64_t max_open_files = -1;
};

/// The variables that are set and may decide how kernels compute or ranks find each other (OMP_*,
/// MKL_*, ATEN_*, NCCL_*, MASTER_*, LD_PRELOAD, ISOSHARD_*, ...), with their values made printable.
/// For reports: none of them is cleared.
[[nodiscard]] std::map<std::string, std::string> settings_in_environment();

/// Memory of the machine, or of the control group where that is less, and what of it is available.
struct MachineMemory {
  std::int64_t bytes = 0, available_bytes = 0;
};
/// Local. A small part of this_machine(), for frequent calls.
[[nodiscard]] MachineMemory memory_of_machine();

/// Local. Reads /proc, /sys and limits; what cannot be read stays at its default.
[[nodiscard]] Machine this_machine();

}  // namespace isoshard
