// SPDX-License-Identifier: Apache-2.0
/// Threads beside the one that takes the process's signals.
#pragma once
#include <pthread.h>

#include <csignal>
#include <thread>
#include <utility>

namespace isoshard {

/// Starts `act` on a thread that gets no signals, so that they interrupt the caller's waits and not
/// the thread's.   Errors   as std::thread.
template <class Act>
[[nodiscard]] std::thread quiet_thread(Act&& act) {
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread thread(std::forward<Act>(act));
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
}

}  // namespace isoshard
