// SPDX-License-Identifier: Apache-2.0
/// Variables of mpirun, PMIx, PMI, Slurm and torchrun.
#include "core/comm/mpi/launcher.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "core/base/error.h"

namespace isoshard {
namespace {

constexpr std::array kOfMpi = {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"};

std::optional<int> number_in(const Environment& environment, const char* name) {
  const char* const text = environment(name);
  if (text == nullptr || *text == '\0') return std::nullopt;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*end != '\0') return std::nullopt;
  return static_cast<int>(value);
}

void check_number(const Environment& environment, const char* name, int value, const char* what) {
  const auto said = number_in(environment, name);
  if (!said || *said == value) return;
  throw UsageError(
      fmt::format("{} must be MPI's {}, got {}={} and {} from MPI; start the ranks by one launcher "
                  "alone: mpirun -n RANKS, or srun --mpi=pmix (torchrun starts no MPI world)",
                  name, what, name, *said, value));
}

}  // namespace

void check_launcher(const Environment& environment) {
  const bool is_mpi =
      std::ranges::any_of(kOfMpi, [&](const char* name) { return environment(name) != nullptr; });
  if (is_mpi) return;
  if (const auto size = number_in(environment, "WORLD_SIZE")) {
    throw UsageError(
        fmt::format("backend mpi must be started by mpirun or srun, got WORLD_SIZE={} of torchrun, "
                    "with which MPI would make {} worlds of one rank; use mpirun -n {}",
                    *size, *size, *size));
  }
  const auto num_tasks = number_in(environment, "SLURM_NTASKS");
  if (num_tasks && environment("SLURM_PROCID") != nullptr) {
    throw UsageError(
        fmt::format("backend mpi must be started by srun with PMIx, got SLURM_NTASKS={} without "
                    "it, with which MPI would make {} worlds of one rank; use srun --mpi=pmix",
                    *num_tasks, *num_tasks));
  }
  throw UsageError(
      "backend mpi must be started by mpirun or srun, got a process that neither started; use "
      "mpirun -n RANKS");
}

void check_attached_world(const Environment& environment, int rank, int size, int expected_size) {
  check_number(environment, "WORLD_SIZE", size, "number of ranks");
  check_number(environment, "RANK", rank, "rank");
  check_number(environment, "OMPI_COMM_WORLD_SIZE", size, "number of ranks");
  // mpirun inside a job of Slurm chooses its own number; mpirun of another MPI says PMI_SIZE, and
  // each of its processes would be a world of one
  if (environment("OMPI_COMM_WORLD_SIZE") == nullptr) {
    check_number(environment, "PMI_SIZE", size, "number of ranks");
    check_number(environment, "PMI_RANK", rank, "rank");
    check_number(environment, "SLURM_NTASKS", size, "number of ranks");
  }
  if (expected_size != 0 && expected_size != size) {
    throw UsageError(
        fmt::format("the attached world must have {} ranks, as expected, got {}; start it with "
                    "mpirun -n {}",
                    expected_size, size, expected_size));
  }
}

}  // namespace isoshard
