// SPDX-License-Identifier: Apache-2.0
/// Standard input, output and error of a process that was started without them.
#pragma once

namespace isoshard {

/// Opens /dev/null on each of the descriptors 0, 1 and 2 that is closed. Else the next file that
/// the process opens would get that number, and what is meant for the terminal would be written
/// into it. Call it before anything is opened that stays open.
///
/// Guarantees   0, 1 and 2 are taken afterwards: without a /dev/null by a descriptor on which
///              every read and write fails. Open descriptors are left as they are.
void occupy_standard_descriptors() noexcept;

}  // namespace isoshard
