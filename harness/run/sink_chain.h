// SPDX-License-Identifier: Apache-2.0
/// What a value passes on a rank: a fault, then those who look, then what records it.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "core/observe/sink.h"
#include "harness/fault/probe.h"

namespace isoshard {

/// Replaces a value that passes at a tap; returns it unchanged where the fault does not apply.
using TapMutation = std::function<at::Tensor(const Site& site, at::Tensor value)>;

/// Looks at a value that passes at a tap, an activation or its gradient, and at recorded gradients
/// of parameters, and changes nothing.
using TapObserver = std::function<void(const Site& site, const at::Tensor& value)>;

/// The sink that a rank's subject is given: `mutation` (a fault; may be empty), then `observers` in
/// their order, then `end`, which must outlive it. Without the former it is `end` itself.
class SinkChain {
 public:
  SinkChain(TapMutation mutation, std::vector<TapObserver> observers, Sink& end);
  [[nodiscard]] Sink& head() const noexcept { return *head_; }

 private:
  std::unique_ptr<Sink> own_;
  Sink* head_;
};

/// The same mutation; what returns another tensor than it was given is counted as fired.
[[nodiscard]] TapMutation counted(TapMutation mutation, const FaultProbe& probe);

}  // namespace isoshard
