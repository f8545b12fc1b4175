// SPDX-License-Identifier: Apache-2.0
// Threads that meet.
#include "suite/emulation/emulated_world.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "core/base/error.h"
#include "suite/emulation/emulated_reduction.h"

namespace isoshard {
namespace {

// What waiting ranks are released with when another one failed; never seen outside.
struct Released {};

}  // namespace

EmulatedWorld::EmulatedWorld(MeshShape mesh, int num_at_once)
    : mesh_(std::move(mesh)), free_cores_(num_at_once) {}

void EmulatedWorld::run(int num_threads, const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < mesh_.world_size(); ++rank) {
    threads.emplace_back([this, num_threads, &body, rank] {
      try {
        {
          std::unique_lock lock(mutex_);
          changed_.wait(lock, [&] { return free_cores_ > 0; });
          --free_cores_;
          // LibTorch sets its pools up for each thread, and not for two at once
          at::set_num_threads(num_threads);
          (void)at::get_num_threads();
        }
        body(rank);
      } catch (const Released&) {
        // The rank that failed has said why.
      } catch (...) {
        fail(std::current_exception());
      }
      const std::lock_guard lock(mutex_);
      ++free_cores_;
      changed_.notify_all();
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (error_ != nullptr) std::rethrow_exception(error_);
}

at::Tensor EmulatedWorld::reduce_over(Axis axis, int rank, std::string_view what, at::Tensor part,
                                      const ReductionPoint& point) {
  return reduce(rank, mesh_.group_of(rank, axis), what, std::move(part), point);
}

at::Tensor EmulatedWorld::gather_over(Axis axis, int rank, std::string_view what,
                                      const at::Tensor& part) {
  return gather(rank, mesh_.group_of(rank, axis), what, part);
}

at::Tensor EmulatedWorld::reduce(int rank, const std::vector<int>& members, std::string_view what,
                                 at::Tensor part, const ReductionPoint& point) {
  if (!point.is_made) return part.detach().clone(at::MemoryFormat::Contiguous);
  return meet(rank, members, what, std::move(part),
              [&](std::vector<at::Tensor>& parts) { return emulated_reduction(parts, point); });
}

at::Tensor EmulatedWorld::gather(int rank, const std::vector<int>& members, std::string_view what,
                                 const at::Tensor& part) {
  return meet(rank, members, what, part.reshape({-1}),
              [](std::vector<at::Tensor>& parts) { return at::cat(parts); });
}

at::Tensor EmulatedWorld::from_one(int rank, const std::vector<int>& members, std::size_t giver,
                                   std::string_view what, at::Tensor part) {
  return meet(rank, members, what, std::move(part),
              [giver](std::vector<at::Tensor>& parts) { return std::move(parts.at(giver)); });
}

at::Tensor EmulatedWorld::meet(
    int rank, const std::vector<int>& members, std::string_view what, at::Tensor part,
    const std::function<at::Tensor(std::vector<at::Tensor>&)>& result_of) {
  const auto member =
      static_cast<std::size_t>(std::find(members.begin(), members.end(), rank) - members.begin());
  std::unique_lock lock(mutex_);
  if (failed_) throw Released{};
  Group& group = groups_[members];
  group.parts.resize(members.size());
  if (group.arrived == 0) group.what = what;
  if (group.what != what)
    throw ShapeError(
        fmt::format("emulated ranks meet at different points: {} and {}", group.what, what));
  group.parts.at(member) = std::move(part);
  if (++group.arrived < group.parts.size()) {
    const std::uint64_t round = group.round;
    ++free_cores_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return (failed_ || group.round != round) && free_cores_ > 0; });
    --free_cores_;
    if (group.round == round) throw Released{};
  } else {
    lock.unlock();  // the others of this group wait: nobody touches it meanwhile
    at::Tensor result = result_of(group.parts);
    lock.lock();
    group.result = std::move(result);
    group.arrived = 0;
    group.waiting = group.parts.size();
    for (at::Tensor& held : group.parts) held.reset();
    ++group.round;
    changed_.notify_all();
  }
  // The next round ends only when this rank has come back. Ranks write into what they get: each
  // takes a copy, and the result itself only where all others have theirs.
  at::Tensor result = group.result;
  if (group.waiting > 1) {
    lock.unlock();
    result = result.clone();
    lock.lock();
  }
  if (--group.waiting == 0) group.result.reset();
  return result;
}

void EmulatedWorld::fail(std::exception_ptr error) noexcept {
  const std::lock_guard lock(mutex_);
  if (error_ == nullptr) error_ = std::move(error);
  failed_ = true;
  changed_.notify_all();
}

}  // namespace isoshard
