// SPDX-License-Identifier: Apache-2.0
/// Input and output embeddings of which a checkpoint holds one for both.
#pragma once
#include <string>
#include <vector>

#include "harness/checkpoints/stored_checkpoint.h"

namespace isoshard {

/// Adds to each of two checkpoints the output embedding (or the input embedding) that only the
/// other one has, with the values of the one that is there, if config.json of either says that they
/// are tied. Values that are not equal are so found all the same. Returns one sentence for each
/// embedding that only one of the two has: what stands for it, or why nothing does.
[[nodiscard]] std::vector<std::string> fill_tied(StoredCheckpoint& reference,
                                                 StoredCheckpoint& actual);

}  // namespace isoshard
