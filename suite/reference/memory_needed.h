// SPDX-License-Identifier: Apache-2.0
/// How much memory a case takes at least, so that what cannot fit is refused before ranks start.
#pragma once
#include <cstdint>

#include "fixtures/cases/case.h"
#include "harness/world/machine.h"

namespace isoshard {

/// What a run of a case keeps: tensors of every step, or numbers only.
enum class Recorded : std::uint8_t { kEveryStep, kNumbers };

/// In bytes; floating-point, because sizes that no machine has must not overflow on their way to
/// being refused. Each is less than what is really taken: optimizer states, masters, workspaces
/// and what a subject copies are left out, and of activations only the widest are counted.
struct MemoryNeeded {
  double records = 0;    ///< of the reference: what is kept while runs are compared with it
  double reference = 0;  ///< weights, gradients and activations of one process
  double ranks = 0;      ///< the same of all ranks of the subject together
  /// Ranks start when the reference has ended, and may be given its records' memory.
  [[nodiscard]] double total() const noexcept;
};

/// Requires   a case that is valid.
[[nodiscard]] MemoryNeeded memory_needed(const Case& c, Recorded recorded);

/// Errors   UsageError "CASE needs at least N GiB of memory, the machine has M GiB: ...".
void require_memory(const Case& c, Recorded recorded, const MachineMemory& there);

}  // namespace isoshard
