// SPDX-License-Identifier: Apache-2.0
/// The variables of each launcher, and what they have in common.
#include "core/comm/nccl/rank_variables.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <optional>
#include <string_view>

#include "core/base/error.h"
#include "core/comm/collective.h"

namespace isoshard {
namespace {

constexpr int kUsualPort = 29500;  ///< torchrun's, too
constexpr int kMostPorts = 65535;

/// The names that one launcher has for the same three numbers.
struct Launcher {
  const char* name;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};
constexpr std::array kLaunchers = {
    Launcher{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    Launcher{"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
             "OMPI_COMM_WORLD_LOCAL_SIZE"},
    Launcher{"mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    Launcher{"srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", nullptr},
};

class Reader {
 public:
  explicit Reader(const std::function<const char*(const char*)>& environment)
      : environment_(environment) {}

  [[nodiscard]] std::optional<std::string_view> text(const char* name) const {
    const char* const value = name == nullptr ? nullptr : environment_(name);
    if (value == nullptr || *value == '\0') return std::nullopt;
    return value;
  }
  [[nodiscard]] std::optional<int> number(const char* name, int least, int most) const {
    const auto value = text(name);
    if (!value) return std::nullopt;
    int result = 0;
    const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), result);
    if (error != std::errc() || end != value->data() + value->size() || result < least ||
        result > most) {
      throw UsageError(
          fmt::format("the environment variable {} must be a number from {} to {}, "
                      "got '{}'",
                      name, least, most, *value));
    }
    return result;
  }
  [[nodiscard]] int needed(const char* name, int least, int most, std::string_view launcher) const {
    if (const auto value = number(name, least, most)) return *value;
    throw UsageError(
        fmt::format("the environment variable {} must be set by {}, which started "
                    "this process",
                    name, launcher));
  }

 private:
  const std::function<const char*(const char*)>& environment_;
};

void check_against(const Reader& reader, const Launcher& other, const RankVariables& found) {
  const auto rank = reader.number(other.rank, 0, kMaxRanks - 1);
  const auto size = reader.number(other.size, 1, kMaxRanks);
  if ((!rank || *rank == found.rank) && (!size || *size == found.size)) return;
  throw UsageError(fmt::format(
      "{} and {} must agree on who this process is, got rank {} of {} and rank {} of {}; start "
      "the ranks by one launcher alone",
      found.launcher, other.name, found.rank, found.size,
      rank ? std::to_string(*rank) : "(not set)", size ? std::to_string(*size) : "(not set)"));
}

/// FNV-1a: a number for a job that each of its processes finds.
std::uint64_t hash(std::uint64_t so_far, std::string_view text) {
  for (const char c : text) so_far = (so_far ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return so_far;
}

std::uint64_t job_of(const Reader& reader) {
  std::uint64_t number = 0xcbf29ce484222325U;
  for (const char* name : {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "PMIX_NAMESPACE",
                           "SLURM_JOB_ID", "SLURM_STEP_ID"}) {
    if (const auto value = reader.text(name)) number = hash(number, *value);
  }
  return number;
}

void find_place(const Reader& reader, const Launcher& launcher, RankVariables& found) {
  const auto local_size = reader.number(launcher.local_size, 1, kMaxRanks);
  if (const auto address = reader.text("MASTER_ADDR")) {
    found.address = *address;
  } else if (found.size == 1 || (local_size && *local_size == found.size)) {
    found.address = "127.0.0.1";
  } else {
    throw UsageError(fmt::format(
        "MASTER_ADDR must be the address of rank 0's host where {} starts ranks on several hosts; "
        "set it for all of them (mpirun -x MASTER_ADDR=HOST, srun --export=ALL,MASTER_ADDR=HOST)",
        found.launcher));
  }
  if (const auto port = reader.number("ISOSHARD_MASTER_PORT", 1, kMostPorts)) {
    found.port = *port;
    return;
  }
  found.port = reader.number("MASTER_PORT", 1, kMostPorts).value_or(kUsualPort);
  const auto agent = reader.text("TORCHELASTIC_USE_AGENT_STORE");
  if (agent && (*agent == "True" || *agent == "1")) {
    if (found.port == kMostPorts)
      throw UsageError(
          "MASTER_PORT must be below 65535, because torchrun's agent uses it and "
          "ranks meet one port above; set ISOSHARD_MASTER_PORT");
    ++found.port;
  }
}

}  // namespace

RankVariables read_rank_variables(const std::function<const char*(const char*)>& environment) {
  const Reader reader(environment);
  for (const Launcher& launcher : kLaunchers) {
    if (!reader.text(launcher.rank) || !reader.text(launcher.size)) continue;
    RankVariables found;
    found.launcher = launcher.name;
    found.size = reader.needed(launcher.size, 1, kMaxRanks, launcher.name);
    found.rank = reader.needed(launcher.rank, 0, found.size - 1, launcher.name);
    found.local_rank =
        reader.number(launcher.local_rank, 0, kMaxRanks - 1).value_or(found.size == 1 ? 0 : -1);
    if (found.local_rank < 0) {
      throw UsageError(
          fmt::format("the environment variable {} must be set, as each rank of a "
                      "host takes the GPU of that number",
                      launcher.local_rank));
    }
    for (const Launcher& other : kLaunchers) {
      // mpirun inside a job of Slurm chooses its own number
      if (&other != &launcher && std::string_view(other.name) != "srun")
        check_against(reader, other, found);
    }
    found.local_size = reader.number(launcher.local_size, 1, kMaxRanks).value_or(1);
    find_place(reader, launcher, found);
    constexpr int kMostDescriptors = 1 << 20;
    if (found.rank == 0) {
      found.listening_socket =
          reader.number("ISOSHARD_MASTER_SOCKET", 0, kMostDescriptors).value_or(-1);
    }
    found.job = job_of(reader);
    return found;
  }
  throw UsageError(
      "backend nccl must be started by torchrun, mpirun or srun, got a process with neither RANK "
      "and WORLD_SIZE nor their variables; use torchrun --nproc-per-node RANKS --no-python");
}

}  // namespace isoshard
