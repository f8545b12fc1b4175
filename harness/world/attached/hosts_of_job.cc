// SPDX-License-Identifier: Apache-2.0
/// Everybody makes a segment, opens the first one of its host that it can, and takes its own away.
#include "harness/world/attached/hosts_of_job.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/system/leftovers.h"
#include "harness/world/forked/unique_fd.h"

namespace isoshard {
namespace {

constexpr CallInfo kFindHosts{.purpose = Purpose::kSetup, .axis = Axis::kWorld};
constexpr const char* kFolderOfSegments = "/dev/shm";
constexpr const char* kFirstPart = "isoshard-";

/// As each process sends it to all.
struct Offer {
  std::array<char, 256> host{};
  std::array<char, 96> segment{};  ///< its name; empty: there is none
  std::array<std::uint64_t, 2> token{};
  std::uint64_t pool_bytes = 0;
};

template <class T>
std::vector<T> gathered(Communicator& comm, T own) {
  std::vector<T> all(static_cast<std::size_t>(comm.size()));
  const auto as_buffer = [](std::span<T> values) {
    return Buffer{reinterpret_cast<std::byte*>(values.data()),
                  static_cast<std::int64_t>(values.size_bytes()), Dtype::kUint8};
  };
  comm.all_gather(as_buffer(std::span(&own, 1)), as_buffer(all), kFindHosts).wait();
  return all;
}

template <std::size_t size>
void copy_name(std::array<char, size>& to, const std::string& name) {
  std::copy_n(name.begin(), std::min(name.size(), size - 1), to.begin());
}

void remove_leftovers() {
  const UniqueFd folder(::open(kFolderOfSegments, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.is_open()) sweep_temporary_files(folder.get(), kFirstPart);
}

/// A name that lives as long as the object.
class NamedSegment {
 public:
  NamedSegment() = default;
  ~NamedSegment() {
    if (fd_.is_open()) ::shm_unlink(name_.c_str());
  }
  NamedSegment(const NamedSegment&) = delete;
  NamedSegment& operator=(const NamedSegment&) = delete;

  /// No pool where the system gives no segment.
  std::shared_ptr<MemoryPool> make(Offer& offer) {
    const auto pages = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES));
    const std::size_t bytes = pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    if (::getrandom(offer.token.data(), sizeof offer.token, 0) != sizeof offer.token) return {};
    // a later job finds by the mark whether the maker is gone
    name_ = fmt::format("/{}{:016x}{:016x}.tmp.{}.0", kFirstPart, offer.token[0], offer.token[1],
                        maker_mark());
    fd_.reset(::shm_open(name_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR));
    if (!fd_.is_open()) return {};
    hold(fd_.get());
    try {
      // first, as it looks at limits
      auto pool = std::make_shared<MemoryPool>(::dup(fd_.get()), bytes);
      const auto end = static_cast<off_t>(MemoryPool::file_bytes(bytes));
      if (::pwrite(fd_.get(), offer.token.data(), sizeof offer.token, end) != sizeof offer.token)
        return {};
      offer.pool_bytes = bytes;
      copy_name(offer.segment, name_);
      return pool;
    } catch (const Error&) {
      return {};
    }
  }

 private:
  std::string name_;
  UniqueFd fd_;
};

/// The memory behind an offer of another process; none if it is not to be seen from here.
std::shared_ptr<MemoryPool> opened(const Offer& offer) {
  if (offer.segment.front() == '\0') return {};
  UniqueFd fd(::shm_open(offer.segment.data(), O_RDWR | O_CLOEXEC, 0));
  if (!fd.is_open()) return {};
  std::array<std::uint64_t, 2> token{};
  const auto end = static_cast<off_t>(MemoryPool::file_bytes(offer.pool_bytes));
  if (::pread(fd.get(), token.data(), sizeof token, end) != sizeof token || token != offer.token)
    return {};
  try {
    return std::make_shared<MemoryPool>(::dup(fd.get()), offer.pool_bytes);
  } catch (const Error&) {
    return {};
  }
}

/// `found`: by process, whose segment it has.
Hosts hosts_of(const std::vector<Offer>& offers, const std::vector<int>& found) {
  const auto has_own = [&](int process) {
    return found[static_cast<std::size_t>(process)] == process;
  };
  std::vector<int> leaders = found;
  for (std::size_t process = 0; process < leaders.size(); ++process) {
    // who found a segment of one that has found another is alone
    if (!has_own(found[process])) leaders[process] = static_cast<int>(process);
  }
  Hosts hosts;
  std::vector<int> number(leaders.size());
  for (std::size_t process = 0; process < leaders.size(); ++process) {
    if (leaders[process] == static_cast<int>(process)) {
      number[process] = hosts.count();
      hosts.first.push_back(static_cast<int>(process));
      hosts.num_processes.push_back(0);
      hosts.names.emplace_back(offers[process].host.data());
    }
    const int host = number[static_cast<std::size_t>(leaders[process])];
    hosts.host_of.push_back(host);
    ++hosts.num_processes[static_cast<std::size_t>(host)];
  }
  return hosts;
}

}  // namespace

HostsOfJob find_hosts(Communicator& comm, const std::string& host) {
  remove_leftovers();
  Offer own;
  copy_name(own.host, host);
  NamedSegment segment;
  std::shared_ptr<MemoryPool> memory = segment.make(own);
  const std::vector<Offer> offers = gathered(comm, own);
  int owner = comm.rank();
  for (int process = 0; process < comm.rank(); ++process) {
    const Offer& offer = offers[static_cast<std::size_t>(process)];
    if (offer.host != own.host) continue;
    std::shared_ptr<MemoryPool> found = opened(offer);
    if (found == nullptr) continue;
    memory = std::move(found);
    owner = process;
    break;
  }
  // when all have said whose they have, all have opened it
  HostsOfJob result{.hosts = hosts_of(offers, gathered(comm, owner)), .memory = {}};
  const auto number =
      static_cast<std::size_t>(result.hosts.host_of[static_cast<std::size_t>(comm.rank())]);
  if (result.hosts.num_processes[number] > 1) result.memory = std::move(memory);
  return result;
}

}  // namespace isoshard
