// SPDX-License-Identifier: Apache-2.0
/// Forks the ranks, waits for them, and shows what the others said.
#include "suite/testing/gpu/nccl_main.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "suite/testing/gpu/nccl_test_world.h"

namespace isoshard {
namespace {

constexpr int kNothingRan = 2, kInfrastructure = 4;

/// Takes "--name=value" out of the arguments.
std::string take_argument(int& argc, char** argv, std::string_view name, std::string_view usual) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (!argument.starts_with(name) || argument.substr(name.size(), 1) != "=") continue;
    std::string value(argument.substr(name.size() + 1));
    std::move(argv + i + 1, argv + argc + 1, argv + i);
    --argc;
    return value;
  }
  return std::string(usual);
}

/// A file without a name that takes what a rank prints.
int make_log() {
  return ::memfd_create("isoshard-rank", 0);
}

void show(int log, int rank) {
  std::fprintf(stderr, "---- rank %d printed:\n", rank);
  ::lseek(log, 0, SEEK_SET);
  std::array<char, 4096> piece{};
  for (ssize_t got = 0; (got = ::read(log, piece.data(), piece.size())) > 0;)
    (void)!::write(STDERR_FILENO, piece.data(), static_cast<std::size_t>(got));
}

int run_rank(int argc, char** argv, const Rendezvous& rendezvous, const GpuOfRank& gpu_of_rank,
             bool on_device) {
  try {
    std::shared_ptr<GpuApi> api = gpu_of_rank(rendezvous.rank, rendezvous.size);
    const int device = rendezvous.rank % std::max(api->num_devices(), 1);
    NcclTestWorld::attach(rendezvous, std::move(api), device, on_device);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rendezvous.rank, error.what());
    return kInfrastructure;
  }
  testing::InitGoogleTest(&argc, argv);
  if (rendezvous.rank != 0) GTEST_FLAG_SET(output, "");
  const int result = RUN_ALL_TESTS();
  if (result == 0 && NcclTestWorld::num_runs() == 0) {
    std::fputs("no world of this size ran: look at --gtest_filter\n", stderr);
    return kNothingRan;
  }
  return result;
}

}  // namespace

int run_on_gpu_ranks(int argc, char** argv, const GpuOfRank& gpu_of_rank) {
  if (std::any_of(argv + 1, argv + argc, [](const char* text) {
        return std::string_view(text) == "--gtest_list_tests";
      })) {
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
  }
  const int size = std::atoi(take_argument(argc, argv, "--ranks", "0").c_str());
  const std::string buffers = take_argument(argc, argv, "--buffers", "host");
  if (size < 1 || (buffers != "host" && buffers != "device")) {
    std::fputs("usage: PROGRAM --ranks=N [--buffers=host|device] [GoogleTest's arguments]\n",
               stderr);
    return kNothingRan;
  }
  const LoopbackListener listener;
  std::vector<pid_t> ranks;
  std::vector<int> logs;
  const pid_t parent = ::getpid();
  for (int rank = 0; rank < size; ++rank) {
    logs.push_back(make_log());
    const pid_t child = ::fork();
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(1);
      if (rank != 0) {
        ::dup2(logs.back(), STDOUT_FILENO);
        ::dup2(logs.back(), STDERR_FILENO);
      }
      const int result = run_rank(argc, argv,
                                  {.rank = rank,
                                   .size = size,
                                   .port = listener.port(),
                                   .listening_socket = listener.socket()},
                                  gpu_of_rank, buffers == "device");
      std::fflush(nullptr);
      ::_exit(result);
    }
    ranks.push_back(child);
  }
  int result = 0;
  for (int rank = 0; rank < size; ++rank) {
    int status = 0;
    ::waitpid(ranks[static_cast<std::size_t>(rank)], &status, 0);
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (code == 0) continue;
    result = std::max(result, code);
    std::fprintf(stderr, "rank %d ended with %d\n", rank, code);
    if (rank != 0) show(logs[static_cast<std::size_t>(rank)], rank);
  }
  return result;
}

}  // namespace isoshard
