// SPDX-License-Identifier: Apache-2.0
/// A counter in an anonymous shared mapping, inherited by fork.
#include "harness/fault/probe.h"

#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>

#include "core/base/error.h"

namespace isoshard {
namespace {
using Counter = std::atomic<std::int64_t>;
static_assert(Counter::is_always_lock_free);
}  // namespace

FaultProbe::FaultProbe() {
  void* memory =
      mmap(nullptr, sizeof(Counter), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    throw InfrastructureError(std::string("cannot get shared memory for a fault probe: ") +
                              std::strerror(errno));
  counter_ =
      std::shared_ptr<void>(new (memory) Counter(0), [](void* p) { munmap(p, sizeof(Counter)); });
}

void FaultProbe::fired() const noexcept {
  static_cast<Counter*>(counter_.get())->fetch_add(1, std::memory_order_relaxed);
}

std::int64_t FaultProbe::count() const noexcept {
  return static_cast<Counter*>(counter_.get())->load(std::memory_order_relaxed);
}

}  // namespace isoshard
