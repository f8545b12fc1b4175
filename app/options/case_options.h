// SPDX-License-Identifier: Apache-2.0
/// Flags that say what a case is: model, degrees, sizes, data, settings, input files. `verify` and
/// `train` have them in common.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "app/options/verify_inputs.h"
#include "fixtures/cases/case.h"
#include "fixtures/cases/world_size.h"
#include "harness/cli/options.h"
#include "suite/reference/memory_needed.h"

namespace isoshard {

using Strings = std::vector<std::string>;

/// These degrees, with pp and cp of the options, where the subject has them.
[[nodiscard]] Degrees with_pp_and_cp(const ParsedOptions& options, const std::string& subject,
                                     Degrees degrees);
/// All but preset, subjects, dtype and steps, whose defaults differ; and other systems' names of
/// the flags.
void declare_case_options(OptionTable& table);

/// Gives every case this model: a built-in name, a config.json or a folder with its weights. Unless
/// `has_data`, one whose vocabulary is too small for the built-in text trains on random ids.
/// Errors   UsageError, FileError.
void use_model(const std::string& name, bool has_data, std::vector<Case>& cases);

/// Every given flag changes every case; subject, degrees and dtype are the command's own business.
/// Errors   UsageError and FileError: what is wrong with a flag or a file.
void apply_case_options(const ParsedOptions& options, const InputFiles& inputs,
                        std::vector<Case>& cases);

/// `--dtype fp32,bf16` and `--dtype fp32 bf16` are the same. Empty if it is not given.   Errors
/// UsageError for an empty list.
[[nodiscard]] Strings list_option(const ParsedOptions& options, const std::string& name);

/// --subjects, with the names that the published scripts use replaced by ours.
[[nodiscard]] Strings subjects_option(const ParsedOptions& options);

/// For before ranks start, once all is applied: sizes, memory, tokens, weights.   Errors
/// UsageError and FileError.
void require_usable(const std::vector<Case>& cases, Recorded recorded);

}  // namespace isoshard
