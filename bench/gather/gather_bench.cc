// SPDX-License-Identifier: Apache-2.0
/// What a process holds while kept tensors come to every host: the growth of its largest resident
/// set beyond the kept bytes themselves.
///
///     mpirun -n 4 ... gather_bench --attach [MIB...]   default 64 256 512
///
/// The processes are taken as two hosts: the lower half, and the upper half. "sent": rank 0 keeps
/// so many MiB, and the second host gets them piece by piece. "on each host": both hosts keep the
/// same, and nothing is sent. One line a process; the resident set counts what it shares with the
/// other processes of its host too, if it has touched it.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "harness/run/trace_store.h"
#include "harness/world/attached/attached_launcher.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/warm_up.h"

namespace {

using namespace isoshard;  // NOLINT: a program of one file

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr const char* kUsage =
    "usage: mpirun -n RANKS gather_bench --attach [MIB...]   e.g. 64 256 512; its ranks are always "
    "processes of mpirun";

double mib_of(const std::string& field) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(field + ":")) return std::atof(line.c_str() + field.size() + 1) / 1024;
  }
  return 0;
}

/// The largest resident set is counted anew from here on.
void forget_peak() {
  std::ofstream("/proc/self/clear_refs") << "5";
}

struct Measured {
  double peak = 0, anonymous = 0, common = 0, seconds = 0;
};

Measured measure(AttachedLauncher& launcher, std::size_t bytes, bool on_each_host) {
  Peers& peers = *launcher.peers();
  const int num_ranks = on_each_host ? 1 : peers.count();
  const auto store = make_trace_store(launcher, num_ranks, bytes + kMiB,
                                      on_each_host ? Sharing::kOnEachHost : Sharing::kOwn);
  const auto body = [&](Rank& rank) {
    const std::vector<std::byte> tensor(kMiB, std::byte{65});
    for (std::size_t done = 0; rank.rank() == 0 && done < bytes; done += kMiB)
      (void)store->of_rank(0)->append(tensor);
  };
  WorldOptions options{.size = num_ranks, .name = "keep", .on_each_host = on_each_host};
  require_ok(launcher.launch(std::move(options), body)->wait());
  (void)peers.sum(1);
  forget_peak();
  const double before = mib_of("VmRSS"), anonymous = mib_of("RssAnon"), common = mib_of("RssShmem");
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::shared_ptr<const Arena>> kept;
  for (int rank = 0; rank < num_ranks; ++rank) kept.push_back(store->kept_by(rank));
  Measured result{
      .seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()};
  if (kept.front()->size() != bytes) throw InfrastructureError("bytes are missing");
  result.peak = mib_of("VmHWM") - before;
  result.anonymous = mib_of("RssAnon") - anonymous;
  result.common = mib_of("RssShmem") - common;
  return result;
}

void print(const Peers& peers, const char* what, std::size_t mib,
           const std::vector<Measured>& all) {
  if (peers.index() != 0) return;
  for (std::size_t process = 0; process < all.size(); ++process) {
    const Measured& one = all[process];
    fmt::print(
        "{:<12} {:>4} MiB  process {} on host {}: peak + {:7.1f} MiB, of it shared {:7.1f}; "
        "anonymous at the end + {:5.1f}; {:.2f} s\n",
        what, mib, process, peers.hosts().host_of[process], one.peak, one.common, one.anonymous,
        one.seconds);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::size_t> sizes;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--help") == 0) return fmt::print("{}\n", kUsage), 0;
    if (std::strcmp(argv[i], "--attach") == 0) continue;
    sizes.push_back(static_cast<std::size_t>(std::max(1, std::atoi(argv[i]))));
  }
  if (sizes.empty()) sizes = {64, 256, 512};
  make_controller();
  try {
    const auto job = attach_mpi_job();
    allow_threads_of_now();
    AttachedLauncher launcher(*job, job->rank() < (job->size() + 1) / 2 ? "lower" : "upper");
    Peers& peers = *launcher.peers();
    (void)measure(launcher, kMiB, /*on_each_host=*/false);  // connections of MPI
    for (const bool on_each_host : {false, true}) {
      for (const std::size_t mib : sizes) {
        const Measured own = measure(launcher, mib * kMiB, on_each_host);
        std::vector<Measured> all(static_cast<std::size_t>(job->size()));
        peers.gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
        print(peers, on_each_host ? "on each host" : "sent", mib, all);
      }
    }
    (void)launcher.ended_together("");
    job->finish();
    return 0;
  } catch (const Error& error) {
    fmt::print(stderr, "{}\n{}\n", error.what(), kUsage);
    return 4;
  }
}
