// SPDX-License-Identifier: Apache-2.0
/// The public face of forked worlds.
#include "harness/world/forked/forked_world.h"

#include <utility>

#include "core/base/error.h"
#include "harness/world/forked/world_state.h"

namespace isoshard {

struct ForkedWorld::Impl {
  WorldState state;
  bool has_waited = false;
};

ForkedWorld::ForkedWorld(WorldOptions options, Body body)
    : impl_(new Impl{.state = {std::move(options), std::move(body)}}) {}
ForkedWorld::ForkedWorld(ForkedWorld&&) noexcept = default;
ForkedWorld& ForkedWorld::operator=(ForkedWorld&&) noexcept = default;
ForkedWorld::~ForkedWorld() = default;

WorldReport ForkedWorld::wait() {
  if (std::exchange(impl_->has_waited, true))
    throw UsageError("ForkedWorld::wait() was called twice; a world has one report");
  serve_until_done(impl_->state);
  return impl_->state.take_report();
}

WorldReport run_forked(WorldOptions options, ForkedWorld::Body body) {
  return ForkedWorld(std::move(options), std::move(body)).wait();
}

namespace {

class Running final : public RunningWorld {
 public:
  Running(WorldOptions options, ForkedWorld::Body body)
      : world_(std::move(options), std::move(body)) {}
  WorldReport wait() override { return world_.wait(); }

 private:
  ForkedWorld world_;
};

}  // namespace

std::unique_ptr<RunningWorld> ForkedLauncher::launch(WorldOptions options, Body body) {
  return std::make_unique<Running>(std::move(options), std::move(body));
}

Launcher& forked_launcher() noexcept {
  static ForkedLauncher launcher;
  return launcher;
}

namespace {
Launcher* set_launcher = nullptr;
}  // namespace

Launcher& default_launcher() noexcept {
  return set_launcher == nullptr ? forked_launcher() : *set_launcher;
}

void set_default_launcher(Launcher& launcher) noexcept {
  set_launcher = &launcher;
}

void require_ok(const WorldReport& report) {
  if (!report.file_error.empty()) throw FileError(report.file_error);
  if (!report.ok()) throw InfrastructureError(report.describe());
}

}  // namespace isoshard
