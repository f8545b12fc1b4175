// SPDX-License-Identifier: Apache-2.0
/// A network cable of a given delay between two network namespaces, for kernels without netem.
///
/// Usage: slow_link DELAY_MS NAMESPACE INTERFACE NAMESPACE INTERFACE
///
/// Makes a TAP device in each namespace, prints "ready", and hands what one sends to the other,
/// each frame so many milliseconds later and in order, until it is killed or its parent ends.
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void fail(const std::string& what) {
  std::perror(("slow_link: " + what).c_str());
  std::exit(1);
}

/// A device belongs to the namespace in which its file was opened.
int open_tap(const std::string& name_space, const char* interface) {
  const std::string path = "/run/netns/" + name_space;
  const int home = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (home < 0 || ::setns(home, CLONE_NEWNET) != 0) fail("cannot enter " + path);
  ::close(home);
  const int tap = ::open("/dev/net/tun", O_RDWR | O_CLOEXEC | O_NONBLOCK);
  if (tap < 0) fail("cannot open /dev/net/tun");
  ifreq request{};
  request.ifr_flags = IFF_TAP | IFF_NO_PI;
  std::strncpy(request.ifr_name, interface, IFNAMSIZ - 1);
  if (::ioctl(tap, TUNSETIFF, &request) != 0) fail(std::string("cannot make ") + interface);
  return tap;
}

struct Frame {
  Clock::time_point due;
  int to = 0;
  std::vector<char> bytes;
};

void relay(const std::array<int, 2>& taps, std::chrono::milliseconds delay) {
  std::deque<Frame> on_the_way;
  std::vector<char> buffer(65536);
  for (;;) {
    int timeout_ms = -1;
    if (!on_the_way.empty()) {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(on_the_way.front().due - Clock::now());
      timeout_ms = static_cast<int>(std::max<std::int64_t>(left.count(), 0));
    }
    std::array<pollfd, 2> ends{{{taps[0], POLLIN, 0}, {taps[1], POLLIN, 0}}};
    if (::poll(ends.data(), ends.size(), timeout_ms) < 0 && errno != EINTR) fail("cannot poll");
    for (std::size_t from = 0; from < ends.size(); ++from) {
      for (;;) {
        const ssize_t size = ::read(taps[from], buffer.data(), buffer.size());
        if (size <= 0) break;
        on_the_way.push_back(
            {Clock::now() + delay, taps[1 - from], {buffer.begin(), buffer.begin() + size}});
      }
    }
    while (!on_the_way.empty() && on_the_way.front().due <= Clock::now()) {
      const Frame& frame = on_the_way.front();
      // a full queue loses frames, as cables do
      (void)!::write(frame.to, frame.bytes.data(), frame.bytes.size());
      on_the_way.pop_front();
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: slow_link DELAY_MS NAMESPACE INTERFACE NAMESPACE INTERFACE\n");
    return 2;
  }
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const std::array taps{open_tap(argv[2], argv[3]), open_tap(argv[4], argv[5])};
  std::puts("ready");
  std::fflush(stdout);
  relay(taps, std::chrono::milliseconds(std::atoi(argv[1])));
}
