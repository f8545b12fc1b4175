// SPDX-License-Identifier: Apache-2.0
/// A run of any subject, as data: what record() (harness/run/record.h) is given.
#pragma once
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/mesh/mesh.h"
#include "core/observe/sink.h"
#include "harness/run/sink_chain.h"
#include "harness/trace/judge_policy.h"
#include "harness/world/batch.h"
#include "harness/world/rank.h"
#include "harness/world/subject.h"
#include "harness/world/world.h"

namespace isoshard {

/// A world of one subject. Copies share nothing but what the functions capture.
///
/// A rank does one of three things: it makes a Subject and trains `steps` steps of `batches`; or it
/// runs `body`; or one process runs `body_of_all` for all ranks of the mesh.
struct RunSpec {
  std::string name = "subject";  ///< of the run in reports and of its world
  std::string subject = {};      ///< whose run it is; empty: the name
  /// Of its processes (harness/world/process_name.h); empty: made of the subject and the number 1
  std::string process_name = {};
  MeshShape mesh = {};
  /// Makes the subject of one rank, where that rank runs. Rank and sink outlive it.
  std::function<std::unique_ptr<Subject>(Rank& rank, Sink& sink)> make = {};
  /// The micro-batches of one rank in one step; called on the rank.
  std::function<std::vector<Batch>(int rank, int step)> batches = {};
  int steps = 1;
  /// Instead of make, batches and steps
  std::function<void(Rank& rank, Sink& sink)> body = {};
  /// Instead of these: a world of one process, with one sink for each rank of the mesh
  std::function<void(Rank& process, std::span<Sink* const> sinks)> body_of_all = {};

  /// The same for the reference, its perturbed runs and the run that is judged
  JudgePolicy policy = {};
  ReductionOrder order = ReductionOrder::kOrdered;
  Transport transport = {};  ///< without `make`: the launcher's usual one

  CommDecorator decorate = {};                                       ///< a fault, or nothing
  std::function<TapMutation(int rank)> mutation = {};                ///< a fault, or nothing
  std::vector<std::function<TapObserver(int rank)>> observers = {};  ///< see values after the fault

  /// Of memory for what one rank keeps; pages not used cost nothing
  std::size_t trace_bytes = std::size_t{64} << 20;
  std::chrono::milliseconds deadline{60'000};
  /// As WorldOptions::on_each_host. Only of a run of one rank, and of none of `body_of_all`, whose
  /// ranks keep their tensors in the order of their threads.
  bool on_each_host = false;
};

}  // namespace isoshard
