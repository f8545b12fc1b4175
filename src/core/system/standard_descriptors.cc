// SPDX-License-Identifier: Apache-2.0
// open gives the lowest number that is free.
#include "core/system/standard_descriptors.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <initializer_list>

namespace isoshard {

void occupy_standard_descriptors() noexcept {
  for (const int wanted : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(wanted, F_GETFD) >= 0 || errno != EBADF) continue;
    // All below are taken, so this is the number that open gives. It stays open in programs that
    // this one starts, as a standard descriptor does.
    const int fd = ::open("/dev/null", O_RDWR);
    if (fd < 0) (void)::open("/", O_PATH);
  }
}

}  // namespace isoshard
