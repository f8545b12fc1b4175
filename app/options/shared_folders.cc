// SPDX-License-Identifier: Apache-2.0
/// Process 0 makes a file of a random name in each folder; the others look for it.
#include "app/options/shared_folders.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "app/options/peers_words.h"
#include "core/base/error.h"
#include "core/system/folder.h"
#include "core/system/leftovers.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;

/// The name is that of a temporary file, which a later run removes where this one was killed.
std::string random_name() {
  std::uint64_t token = 0;
  if (::getrandom(&token, sizeof token, 0) != sizeof token)
    throw InfrastructureError(fmt::format("getrandom failed: {}", std::strerror(errno)));
  return fmt::format(".isoshard-probe-{:016x}.tmp.{}.0", token, maker_mark());
}

/// A file that is there as long as the object.
class ProbeFile {
 public:
  ProbeFile(const fs::path& folder, const std::string& name, std::string_view option)
      : path_(folder / name) {
    const int fd =
        ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) {
      throw UsageError(
          fmt::format("{} {}: not writable: {}", option, folder.string(), std::strerror(errno)));
    }
    ::close(fd);  // other hosts see a file when it is closed
  }
  ~ProbeFile() { ::unlink(path_.c_str()); }
  ProbeFile(const ProbeFile&) = delete;
  ProbeFile& operator=(const ProbeFile&) = delete;

 private:
  fs::path path_;
};

/// The folder, if this process sees `probe` in it.
std::optional<Folder> folder_with(const fs::path& path, const std::string& probe) {
  try {
    Folder folder = Folder::open(path);
    if (folder.type_of(probe) != fs::file_type::not_found) return folder;
  } catch (const std::system_error&) {  // for whatever reason, this process does not see the file
  }
  return std::nullopt;
}

void require_seen(const Peers& peers, const fs::path& folder, const std::string& probe,
                  std::string_view option) {
  const std::optional<Folder> seen = folder_with(folder, probe);
  if (!seen.has_value()) {
    throw UsageError(fmt::format(
        "{} {}: must be a folder that all hosts share, and {} does not see at {} what {} made "
        "there; name one on a shared file system (--storage-path)",
        option, folder.string(), who_is(peers, peers.index()),
        fs::absolute(folder).lexically_normal().string(), who_is(peers, 0)));
  }
  try {
    require_writable(folder, seen->fd(), option);
  } catch (const UsageError& error) {
    throw UsageError(fmt::format("{} ({})", error.what(), who_is(peers, peers.index())));
  }
}

/// Throws the problem of the first process that has one, on all; `text` is what process 0 tells.
std::string agree(Peers& peers, const std::string& problem, const std::string& text) {
  std::vector<std::byte> has_problem(static_cast<std::size_t>(peers.count()));
  const std::byte own{problem.empty() ? std::uint8_t{0} : std::uint8_t{1}};
  peers.gather(std::span(&own, 1), has_problem);
  for (std::size_t process = 0; process < has_problem.size(); ++process) {
    if (has_problem[process] == std::byte{0}) continue;
    throw UsageError(broadcast_text(peers, problem, static_cast<int>(process)));
  }
  return broadcast_text(peers, text, 0);
}

/// What `act` says is wrong with how the program was called; empty: nothing.
template <class Act>
std::string problem_of(Act&& act) {
  try {
    act();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

SharedFolders::SharedFolders(Launcher& launcher, const std::vector<fs::path>& folders,
                             std::string_view option) {
  Peers* const peers = launcher.peers();
  const bool makes = peers == nullptr || peers->index() == 0;
  const std::string own_name = random_name();
  std::vector<std::unique_ptr<ProbeFile>> probes;
  std::string problem = problem_of([&] {
    for (const fs::path& folder : folders) {
      if (!makes) break;
      folders_.push_back(std::make_unique<OutputFolder>(folder, option));
      if (peers != nullptr) probes.push_back(std::make_unique<ProbeFile>(folder, own_name, option));
    }
  });
  if (peers == nullptr) {
    if (!problem.empty()) throw UsageError(problem);
    return;
  }
  const std::string name = agree(*peers, problem, own_name);
  problem = problem_of([&] {
    for (const fs::path& folder : folders) {
      if (!makes) require_seen(*peers, folder, name, option);
    }
  });
  agree(*peers, problem, "");
}

}  // namespace isoshard
