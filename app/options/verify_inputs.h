// SPDX-License-Identifier: Apache-2.0
/// Files of weights and batches that `verify` reads and saves, so that runs made one by one start
/// from the same.
#pragma once
#include <filesystem>

#include "fixtures/cases/case.h"
#include "harness/cli/options.h"

namespace isoshard {

/// Each may be empty: not from, not to a file.
struct InputFiles {
  std::filesystem::path weights, batch;
  std::filesystem::path save_weights, save_batch;
};

void declare_input_options(OptionTable& table);

/// `--input-dir DIR` stands for DIR/init_weights.safetensors and DIR/batch.safetensors, of which
/// one must be there. `--save-init-weights` without a file saves to the file of `--init-weights`
/// (which is then not read), or else to init_weights.safetensors in `--output-dir`; `--save-batch`
/// likewise.
/// Errors   UsageError for flags that contradict each other or do not say where; FileError for a
///          folder without inputs.
[[nodiscard]] InputFiles input_files_of(const ParsedOptions& options);

/// Makes the case read its inputs from the files. The batch file gives the sequence length unless
/// `has_seq_length`.
/// Errors   FileError as BatchFile.
void read_inputs_from(const InputFiles& files, bool has_seq_length, Case& item);

}  // namespace isoshard
