// SPDX-License-Identifier: Apache-2.0
/// Launches that all processes make together, and their reports for all.
#include "harness/world/attached/attached_launcher.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <functional>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/mapped_file.h"
#include "core/comm/shm/shm_world.h"
#include "harness/world/attached/control.h"
#include "harness/world/attached/hosts_of_job.h"
#include "harness/world/attached/last_words.h"
#include "harness/world/attached/report_message.h"
#include "harness/world/forked/crash_handler.h"
#include "harness/world/forked/forked_world.h"

namespace isoshard {
namespace {

constexpr std::chrono::milliseconds kGrace{2000};

class AttachedRank final : public Rank {
 public:
  AttachedRank(int rank, int size, std::unique_ptr<Communicator> comm)
      : rank_(rank), size_(size), comm_(std::move(comm)) {}
  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return size_; }
  [[nodiscard]] Communicator& comm() noexcept override { return *comm_; }
  void post_result(std::span<const std::byte> bytes) override {
    if (std::exchange(has_posted_, true))
      throw UsageError("post_result was called twice; a rank has one result");
    result_.assign(bytes.begin(), bytes.end());
  }
  void set_phase(std::string_view phase) noexcept override {
    phase_ = phase;
    set_phase_of_last_words(phase);
  }
  [[nodiscard]] const std::string& phase() const noexcept { return phase_; }
  [[nodiscard]] std::vector<std::byte> take_result() { return std::move(result_); }

 private:
  int rank_;
  int size_;
  std::unique_ptr<Communicator> comm_;
  std::string phase_;
  std::vector<std::byte> result_;
  bool has_posted_ = false;
};

long peak_rss_kib() {
  rusage usage{};
  return ::getrusage(RUSAGE_SELF, &usage) == 0 ? usage.ru_maxrss : 0;
}

/// The body on this process, with what it threw as an end.
RankReport report_of_body(AttachedRank& rank, const Launcher::Body& body, const Journal& journal,
                          std::string& file_error) {
  RankReport report;
  report.rank = rank.rank();
  try {
    body(rank);
    require_unchanged_inputs();
  } catch (const CommError& error) {
    report.end = RankEnd::kReleased;
    report.message = error.what();
  } catch (const FileError& error) {
    report.end = RankEnd::kThrew;
    report.message = file_error = error.what();
  } catch (...) {
    report.end = RankEnd::kThrew;
    report.message = current_exception_in_words();
  }
  report.where = journal.last_call_in_words(rank.rank());
  report.phase = rank.phase();
  report.peak_rss_kib = peak_rss_kib();
  report.result = rank.take_result();
  return report;
}

/// The first rank that threw, or what released the others.
void name_cause(WorldReport& report) {
  const auto first = [&](RankEnd end) {
    return std::ranges::find(report.ranks, end, &RankReport::end);
  };
  if (const auto thrower = first(RankEnd::kThrew); thrower != report.ranks.end()) {
    report.culprit = thrower->rank;
    report.cause =
        fmt::format("rank {} threw {}: {}", thrower->rank, thrower->where, thrower->message);
  } else if (const auto released = first(RankEnd::kReleased); released != report.ranks.end()) {
    report.cause = released->message;
  }
}

/// While it lives, a signal's line says where this process is in the world.
class Watched {
 public:
  explicit Watched(const Journal& journal) { set_journal_of_last_words(&journal); }
  ~Watched() {
    set_journal_of_last_words(nullptr);
    set_phase_of_last_words("");
  }
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;
};

/// What happens while processes wait for each other.
class Idle {
 public:
  Idle(Control& control, std::function<void()> act) : control_(control) {
    control_.set_idle(std::move(act));
  }
  ~Idle() { control_.set_idle({}); }
  Idle(const Idle&) = delete;
  Idle& operator=(const Idle&) = delete;

 private:
  Control& control_;
};

/// A world that runs in the processes of the job.
class WorldOfProcesses final : public RunningWorld {
 public:
  WorldOfProcesses(Control& control, WorldOptions options, Launcher::Body body)
      : control_(control), options_(std::move(options)), body_(std::move(body)) {}

  // All of it happens here: worlds that were launched earlier are waited for in the same order on
  // all processes, and launches are no meetings.
  WorldReport wait() override {
    control_.barrier();  // a process that is elsewhere is named, instead of waited for
    std::string file_error;
    const auto world = control_.job().make_world(options_.order);
    const RankReport own = run(*world, file_error);
    WorldReport report;
    report.name = options_.name;
    // Ranks that are still leaving the world come here only when this one has taken what they sent.
    const Idle idle(control_, [&] { world->serve(); });
    const auto messages = gather(own, file_error);
    for (int rank = 0; rank < options_.size; ++rank) {
      std::string error;
      report.ranks.push_back(rank_report_of(messages[static_cast<std::size_t>(rank)], error));
      if (report.file_error.empty()) report.file_error = error;
    }
    name_cause(report);
    return report;
  }

 private:
  RankReport run(AttachedWorld& world, std::string& file_error) {
    const AttachedJob& job = control_.job();
    world.set_patience(options_.deadline);
    const Watched watched(world.journal());
    std::unique_ptr<Communicator> comm = world.communicator(job.rank());
    const bool is_rank = job.rank() < options_.size;
    if (options_.size < job.size()) comm = comm->split(is_rank ? 0 : 1, job.rank());
    RankReport report;
    report.rank = -1;
    if (!is_rank) return report;
    if (options_.decorate) comm = options_.decorate(std::move(comm), job.rank());
    AttachedRank rank(job.rank(), options_.size, std::move(comm));
    report = report_of_body(rank, body_, world.journal(), file_error);
    if (report.end != RankEnd::kReturned)
      world.abort(fmt::format("rank {} failed: {}", job.rank(), report.message));
    return report;
  }

  std::vector<std::vector<std::byte>> gather(const RankReport& own, const std::string& file_error) {
    // a process without a rank cannot say how long the others may take together
    if (own.rank < 0) return control_.gather({});
    // Those that wait for this rank in a collective give up first, and say so in their reports.
    const auto patience = 2 * options_.deadline + kGrace;
    try {
      return control_.gather(message_of(own, file_error), patience);
    } catch (const TimeoutError& error) {
      const std::string line = fmt::format(
          "isoshard: rank {} on {}: not all ranks of world {} came to its end within {} ms: {}\n",
          own.rank, host_name(), options_.name, patience.count(),
          own.end == RankEnd::kReturned ? error.what() : own.message);
      write_line(line);
      control_.job().end_all(kHungJob);
      throw;  // never: compilers do not see it through a virtual function
    }
  }

  Control& control_;
  WorldOptions options_;
  Launcher::Body body_;
};

/// A world of one rank in this process, which may not fork. So its deadline does not count, and
/// what ends the process ends the job.
class WorldHere final : public RunningWorld {
 public:
  WorldHere(WorldOptions options, Launcher::Body body)
      : options_(std::move(options)), body_(std::move(body)) {}

  WorldReport wait() override {
    ShmWorld world(1, options_.order);
    const Watched watched(world.journal());
    std::unique_ptr<Communicator> comm = world.communicator(0);
    if (options_.decorate) comm = options_.decorate(std::move(comm), 0);
    AttachedRank rank(0, 1, std::move(comm));
    WorldReport report;
    report.name = options_.name;
    report.ranks.push_back(report_of_body(rank, body_, world.journal(), report.file_error));
    name_cause(report);
    return report;
  }

 private:
  WorldOptions options_;
  Launcher::Body body_;
};

/// How a world of one rank ended on a host; exceptions by what all processes throw.
enum class HostEnd : std::uint64_t { kOk, kNotOk, kUsage, kFile, kOther };

/// A world of one rank, forked from process 0, or from the first process of each host; or where
/// they may not fork, in them.
class WorldOfOne final : public RunningWorld {
 public:
  WorldOfOne(Control& control, WorldOptions options, Launcher::Body body)
      : control_(control),
        name_(options.name),
        on_each_host_(options.on_each_host),
        runs_here_(on_each_host_ ? control.hosts().is_first(control.index())
                                 : control.index() == 0) {
    if (!runs_here_) return;
    if (!control.job().may_fork()) {
      world_ = std::make_unique<WorldHere>(std::move(options), std::move(body));
      return;
    }
    catching([&] { world_ = forked_launcher().launch(std::move(options), std::move(body)); });
  }

  // The report is that of process 0, unless its world was right and another host's was not.
  WorldReport wait() override {
    std::vector<std::byte> message;
    std::function<void()> work;
    if (runs_here_ && end_ == HostEnd::kOk)
      work = [&] { catching([&] { message = message_of(waited_for()); }); };
    control_.finish_together(work);
    if (is_exception()) message = as_bytes(words_);
    const std::vector<State> states = all_states();
    int from = 0;
    for (const int first : control_.hosts().first) {
      if (states[static_cast<std::size_t>(from)].end == HostEnd::kOk) from = first;
      if (!on_each_host_) break;
    }
    if (states[static_cast<std::size_t>(from)].end == HostEnd::kOk) {
      from = 0;
      compare(states);
    }
    const std::vector<std::byte> all = control_.broadcast_message(std::move(message), from);
    const std::string words(reinterpret_cast<const char*>(all.data()), all.size());
    switch (states[static_cast<std::size_t>(from)].end) {
      case HostEnd::kOk:
      case HostEnd::kNotOk:
        return world_report_of(all);
      case HostEnd::kUsage:
        throw UsageError(words);
      case HostEnd::kFile:
        throw FileError(words);
      case HostEnd::kOther:
        break;
    }
    throw InfrastructureError(words);
  }

 private:
  /// As it is sent to all.
  struct State {
    HostEnd end = HostEnd::kOk;
    std::uint64_t digest = 0;  ///< of the rank's result
  };

  static std::vector<std::byte> as_bytes(const std::string& text) {
    const auto bytes = std::as_bytes(std::span(text));
    return {bytes.begin(), bytes.end()};
  }
  [[nodiscard]] bool is_exception() const noexcept {
    return end_ != HostEnd::kOk && end_ != HostEnd::kNotOk;
  }

  WorldReport waited_for() {
    WorldReport report = world_->wait();
    if (!report.ok()) {
      end_ = HostEnd::kNotOk;
      if (control_.own_host() != 0) {
        report.name += " on " + own_name();
        if (!report.file_error.empty()) report.file_error += " on " + own_name();
      }
    } else {
      const std::vector<std::byte>& result = report.ranks.front().result;
      digest_ = XXH3_64bits(result.data(), result.size());
    }
    return report;
  }
  [[nodiscard]] std::string own_name() const {
    return control_.hosts().names[static_cast<std::size_t>(control_.own_host())];
  }

  std::vector<State> all_states() {
    std::vector<State> states(static_cast<std::size_t>(control_.count()));
    const State own{end_, digest_};
    if (on_each_host_) {
      control_.gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(states)));
    } else {
      states.front() = own;
      control_.broadcast(std::as_writable_bytes(std::span(states).first(1)), 0);
    }
    return states;
  }

  void compare(const std::vector<State>& states) {
    if (!on_each_host_) return;
    const Hosts& hosts = control_.hosts();
    for (int host = 1; host < hosts.count(); ++host) {
      const int first = hosts.first[static_cast<std::size_t>(host)];
      if (states[static_cast<std::size_t>(first)].digest == states.front().digest) continue;
      control_.add_difference(fmt::format("{} on {} (rank {}) is not that on {} (rank 0)", name_,
                                          hosts.names[static_cast<std::size_t>(host)], first,
                                          hosts.names.front()));
    }
  }

  template <class Act>
  void catching(const Act& act) {
    try {
      act();
    } catch (const std::exception& error) {
      words_ = error.what();
      if (control_.own_host() != 0) words_ = own_name() + ": " + words_;
      end_ = dynamic_cast<const UsageError*>(&error) != nullptr  ? HostEnd::kUsage
             : dynamic_cast<const FileError*>(&error) != nullptr ? HostEnd::kFile
                                                                 : HostEnd::kOther;
    }
  }

  Control& control_;
  std::string name_;
  bool on_each_host_;
  bool runs_here_;
  std::unique_ptr<RunningWorld> world_;
  HostEnd end_ = HostEnd::kOk;
  std::uint64_t digest_ = 0;
  std::string words_;
};

}  // namespace

struct AttachedLauncher::Impl {
  Impl(AttachedJob& job, const std::string& host) : control(job, host) {}
  Control control;
};

AttachedLauncher::AttachedLauncher(AttachedJob& job) : AttachedLauncher(job, host_name()) {}
AttachedLauncher::AttachedLauncher(AttachedJob& job, const std::string& host)
    : impl_(std::make_unique<Impl>(job, host)) {}
AttachedLauncher::~AttachedLauncher() = default;

Peers* AttachedLauncher::peers() noexcept {
  return &impl_->control;
}

bool AttachedLauncher::ended_together(std::string_view words) {
  try {
    return impl_->control.ended_together(words);
  } catch (const CommError&) {
    return false;
  }
}

bool AttachedLauncher::peer_ended() const noexcept {
  return impl_->control.peer_ended();
}

std::unique_ptr<RunningWorld> AttachedLauncher::launch(WorldOptions options, Body body) {
  if (options.size < 1 || options.size > impl_->control.count()) {
    throw UsageError(fmt::format(
        "a world on attached ranks must have from 1 to {} ranks, got {}; start more with mpirun -n",
        impl_->control.count(), options.size));
  }
  if (options.transport.make) {
    throw UsageError(fmt::format("attached ranks must talk through mpi, got transport {}",
                                 name_of(options.transport.backend)));
  }
  impl_->control.allow(options.deadline);
  if (options.size == 1)
    return std::make_unique<WorldOfOne>(impl_->control, std::move(options), std::move(body));
  return std::make_unique<WorldOfProcesses>(impl_->control, std::move(options), std::move(body));
}

}  // namespace isoshard
