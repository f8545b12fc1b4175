// SPDX-License-Identifier: Apache-2.0
/// One world: names of hosts, a sum, clocks, links; each rank's part comes back as JSON.
#include "app/cluster/probe.h"

#include <fmt/format.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/error.h"
#include "core/base/sha256.h"
#include "fixtures/oracle/arithmetic_digest.h"
#include "harness/world/attached/last_words.h"
#include "harness/world/machine.h"

namespace isoshard {
namespace {

using Steady = std::chrono::steady_clock;

constexpr CallInfo kInfo{.purpose = Purpose::kSetup, .axis = Axis::kWorld};
constexpr int kClockProbes = 16;
constexpr int kLatencyProbes = 20;
constexpr int kBandwidthProbes = 6;
constexpr std::int64_t kSmallProbe = std::int64_t{128} << 10;
constexpr std::int64_t kLargeProbe = std::int64_t{4} << 20;
/// A link on which the small probe takes longer is too slow for the large one.
constexpr double kSlowProbe_s = 0.05;
constexpr std::size_t kNameBytes = 256;

double ms_since_1970() {
  return std::chrono::duration<double, std::milli>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

template <class T>
Buffer as_buffer(T& value) {
  return {reinterpret_cast<std::byte*>(&value), static_cast<std::int64_t>(sizeof value),
          Dtype::kUint8};
}

class Prober {
 public:
  Prober(Communicator& comm, const std::string& host) : comm_(comm) { gather_hosts(host); }

  void check_sum() {
    auto sum = static_cast<std::int64_t>(comm_.rank());
    comm_.all_reduce({reinterpret_cast<std::byte*>(&sum), 1, Dtype::kInt64}, Reduction::kSum, kInfo)
        .wait();
    const std::int64_t right = std::int64_t{comm_.size()} * (comm_.size() - 1) / 2;
    if (sum == right) return;
    throw InfrastructureError(fmt::format(
        "the sum of all rank numbers must be {}, got {} on rank {}", right, sum, comm_.rank()));
  }

  /// On rank 0.
  std::vector<ClockOffset> clocks() {
    std::vector<ClockOffset> offsets;
    for (std::size_t host = 1; host < hosts_.size(); ++host) {
      const int peer = hosts_[host].front();
      if (comm_.rank() == 0) offsets.push_back(clock_of(peer));
      if (comm_.rank() == peer) answer_clock();
    }
    comm_.barrier(kInfo);
    return offsets;
  }

  /// In each round a host has one link at most: numbers i and j meet where i + j is the round's.
  std::vector<Link> links() {
    std::vector<Link> own;
    const std::size_t num = hosts_.size();
    for (std::size_t round = 0; num > 1 && round < num; ++round) {
      for (std::size_t i = 0; i < num; ++i) {
        const std::size_t j = (round + num - i) % num;
        if (i < j) measure(hosts_[i].front(), hosts_[j].front(), own);
      }
      comm_.barrier(kInfo);
    }
    for (const std::vector<int>& ranks : hosts_) {
      if (ranks.size() > 1) measure(ranks[0], ranks[1], own);
    }
    comm_.barrier(kInfo);
    return own;
  }

 private:
  void gather_hosts(const std::string& host) {
    std::array<char, kNameBytes> name{};
    std::copy_n(host.begin(), std::min(host.size(), name.size() - 1), name.begin());
    std::vector<std::array<char, kNameBytes>> names(static_cast<std::size_t>(comm_.size()));
    comm_
        .all_gather(as_buffer(name),
                    {reinterpret_cast<std::byte*>(names.data()),
                     static_cast<std::int64_t>(names.size() * kNameBytes), Dtype::kUint8},
                    kInfo)
        .wait();
    std::vector<std::string> texts;
    for (const auto& one : names) texts.emplace_back(one.data());
    hosts_ = ranks_by_host(texts);
  }

  ClockOffset clock_of(int peer) {
    ClockOffset best{.rank = peer, .within_ms = 1e30};
    for (int probe = 0; probe < kClockProbes; ++probe) {
      double theirs = 0;
      const double asked = ms_since_1970();
      comm_.send(as_buffer(theirs), peer, kInfo).wait();
      comm_.recv(as_buffer(theirs), peer, kInfo).wait();
      const double answered = ms_since_1970(), within = (answered - asked) / 2;
      if (within >= 0 && within < best.within_ms)
        best = {.rank = peer, .ahead_ms = theirs - (asked + answered) / 2, .within_ms = within};
    }
    return best;
  }

  void answer_clock() {
    for (int probe = 0; probe < kClockProbes; ++probe) {
      double own = 0;
      comm_.recv(as_buffer(own), 0, kInfo).wait();
      own = ms_since_1970();
      comm_.send(as_buffer(own), 0, kInfo).wait();
    }
  }

  /// Half of the best of round trips, in seconds. Local for ranks that are neither.
  double one_way(int from, int to, std::int64_t bytes, int probes) {
    buffer_.resize(static_cast<std::size_t>(bytes));
    const Buffer data{buffer_.data(), bytes, Dtype::kUint8};
    double best = 1e30;
    for (int probe = 0; probe < probes; ++probe) {
      const auto start = Steady::now();
      if (comm_.rank() == from) {
        comm_.send(data, to, kInfo).wait();
        comm_.recv(data, to, kInfo).wait();
      } else {
        comm_.recv(data, from, kInfo).wait();
        comm_.send(data, from, kInfo).wait();
      }
      best = std::min(best, std::chrono::duration<double>(Steady::now() - start).count() / 2);
    }
    // both must take the same way from here
    comm_.rank() == from ? comm_.send(as_buffer(best), to, kInfo).wait()
                         : comm_.recv(as_buffer(best), from, kInfo).wait();
    return std::max(best, 1e-9);
  }

  void measure(int from, int to, std::vector<Link>& links) {
    if (comm_.rank() != from && comm_.rank() != to) return;
    const double latency = one_way(from, to, 8, kLatencyProbes);
    std::int64_t bytes = kSmallProbe;
    double time = one_way(from, to, bytes, kBandwidthProbes);
    if (time < kSlowProbe_s) {
      bytes = kLargeProbe;
      time = one_way(from, to, bytes, kBandwidthProbes);
    }
    if (comm_.rank() != from) return;
    links.push_back({.from = from,
                     .to = to,
                     .latency_us = latency * 1e6,
                     .mib_per_s = static_cast<double>(bytes) / (1 << 20) / time});
  }

  Communicator& comm_;
  std::vector<std::vector<int>> hosts_;
  std::vector<std::byte> buffer_;
};

nlohmann::json json_of(const HostFacts& facts) {
  return {{"host", facts.host},         {"cpu", facts.cpu},
          {"cores", facts.cores},       {"memory", facts.memory_bytes},
          {"shm", facts.shm_bytes},     {"available", facts.available_bytes},
          {"program", facts.program},   {"arithmetic", facts.arithmetic},
          {"libtorch", facts.libtorch}, {"mpi", facts.mpi}};
}

HostFacts facts_of(const nlohmann::json& json) {
  return {.host = json.at("host"),
          .cpu = json.at("cpu"),
          .cores = json.at("cores"),
          .memory_bytes = json.at("memory"),
          .available_bytes = json.at("available"),
          .shm_bytes = json.at("shm"),
          .arithmetic = json.at("arithmetic"),
          .program = json.at("program"),
          .libtorch = json.at("libtorch"),
          .mpi = json.at("mpi")};
}

std::string message_of(const HostFacts& facts, const std::vector<ClockOffset>& clocks,
                       const std::vector<Link>& links) {
  nlohmann::json json{{"facts", json_of(facts)},
                      {"clocks", nlohmann::json::array()},
                      {"links", nlohmann::json::array()}};
  for (const ClockOffset& clock : clocks)
    json["clocks"].push_back({clock.rank, clock.ahead_ms, clock.within_ms});
  for (const Link& link : links)
    json["links"].push_back({link.from, link.to, link.latency_us, link.mib_per_s});
  return json.dump();
}

void add_message(Cluster& cluster, const std::vector<std::byte>& message) {
  const auto json = nlohmann::json::parse(
      std::string_view(reinterpret_cast<const char*>(message.data()), message.size()));
  cluster.ranks.push_back(facts_of(json.at("facts")));
  for (const auto& clock : json.at("clocks"))
    cluster.clocks.push_back({clock.at(0), clock.at(1), clock.at(2)});
  for (const auto& link : json.at("links"))
    cluster.links.push_back({link.at(0), link.at(1), link.at(2), link.at(3)});
}

}  // namespace

HostFacts facts_of_this_host(std::string mpi) {
  const Machine machine = this_machine();
  return {.host = host_name(),
          .cpu = machine.cpu,
          .cores = machine.cores,
          .memory_bytes = machine.memory_bytes,
          .available_bytes = machine.available_bytes,
          .shm_bytes = machine.shm_bytes,
          .arithmetic = digest_text(arithmetic_digest()),
          .program = sha256_hex_of_file("/proc/self/exe"),
          .libtorch = TORCH_VERSION,
          .mpi = std::move(mpi)};
}

Cluster probe_cluster(Launcher& launcher, int num_ranks, const HostFacts& own) {
  const auto body = [&own](Rank& rank) {
    Prober prober(rank.comm(), own.host);
    prober.check_sum();
    rank.set_phase("clocks");
    const auto clocks = prober.clocks();
    rank.set_phase("links");
    const auto links = prober.links();
    const std::string message = message_of(own, clocks, links);
    rank.post_result(std::as_bytes(std::span(message)));
  };
  const auto running = launcher.launch({.size = num_ranks, .name = "doctor"}, body);
  const WorldReport report = running->wait();
  require_ok(report);
  Cluster cluster;
  for (const RankReport& rank : report.ranks) add_message(cluster, rank.result);
  return cluster;
}

}  // namespace isoshard
