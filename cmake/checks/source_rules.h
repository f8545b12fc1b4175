// SPDX-License-Identifier: Apache-2.0
// Rules about the source tree that a compiler does not know: layers, licence lines, device
// literals, forgotten tests.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace isoshard {

/// One row of docs/internals/layers.md: files below `folder` may include files below `folder` and
/// below each of `may_include`.
struct LayerRow {
  std::string folder;
  std::vector<std::string> may_include;
};

/// Reads the table of docs/internals/layers.md.
///
/// Errors   std::runtime_error if the file is missing or holds no row.
[[nodiscard]] std::vector<LayerRow> read_layers(const std::filesystem::path& layers_md);

// Each rule returns one line "file:line: what is wrong and what to do" for each violation, sorted;
// empty means the tree conforms. Errors   std::runtime_error if a rule found no file to look at: a
// rule that looks at nothing must not pass.

/// Every `#include "..."` follows the layers, and GoogleTest stays out of the code that ships.
[[nodiscard]] std::vector<std::string> check_layering(const std::filesystem::path& root,
                                                      const std::vector<LayerRow>& rows);

/// No two folders include each other, directly or through others (tests apart).
[[nodiscard]] std::vector<std::string> check_folder_cycles(const std::filesystem::path& root);

/// No folder holds more than 25 source files (.cc and .h, tests apart).
[[nodiscard]] std::vector<std::string> check_folder_sizes(const std::filesystem::path& root);

/// The judge needs no LibTorch: its folders, and those of src/core that it stands on, include
/// neither ATen, c10 nor torch, directly or through headers of the tree (tests, and the thin layers
/// that take at::Tensor, apart).
[[nodiscard]] std::vector<std::string> check_judge_without_libtorch(
    const std::filesystem::path& root);

/// No line of a source, build or script file is longer than 100 columns.
[[nodiscard]] std::vector<std::string> check_line_lengths(const std::filesystem::path& root);

/// No test is given less than 600 s. A time limit ends what would never end; a test that needs a
/// minute on an idle machine needs many where other things run.
[[nodiscard]] std::vector<std::string> check_time_limits(const std::filesystem::path& root);

/// Nobody compares with a subject's name outside src/subjects/registry (tests apart): its row is
/// asked. The names are those of the rows there.
[[nodiscard]] std::vector<std::string> check_subject_names(const std::filesystem::path& root);

/// No function takes two degrees or two coordinates as a pair of ints, which can be swapped:
/// Degrees and MeshShape name them.
[[nodiscard]] std::vector<std::string> check_degree_pairs(const std::filesystem::path& root);

/// No source file takes names of records apart or puts them together (tests apart), but for the
/// parser, src/core/observe/record_name.cc: none has a literal that ends with one of its suffixes
/// and begins with no name, and none gives a scalar's name as a literal. src/subjects/optim names
/// its own state; examples are projects of their own.
[[nodiscard]] std::vector<std::string> check_record_names(const std::filesystem::path& root);

/// No source file takes a sentence of a verdict apart (tests apart): nobody searches in a
/// diagnosis, a reason, an evidence or the text of a cause or rule, or reads a number from one. Ids
/// and named values have what they say.
[[nodiscard]] std::vector<std::string> check_sentences(const std::filesystem::path& root);

/// Every source, script and build file names its licence in its first three lines.
[[nodiscard]] std::vector<std::string> check_licence_lines(const std::filesystem::path& root);

/// No device is hard-wired in src/subjects/model, src/subjects/parallel and src/subjects/optim:
/// tensors carry it.
[[nodiscard]] std::vector<std::string> check_device_literals(const std::filesystem::path& root);

/// Every *_test.cc is compiled by some target, as listed in `compile_commands`
/// (compile_commands.json of the build folder).
[[nodiscard]] std::vector<std::string> check_orphan_tests(
    const std::filesystem::path& root, const std::filesystem::path& compile_commands);

/// Every test and fault that docs/reference/contracts.md names exists: `Suite.Case` in some
/// *_test.cc, a fault in docs/reference/faults.md; and every `Suite.Case` of
/// docs/internals/failures.md.
[[nodiscard]] std::vector<std::string> check_contracts_page(const std::filesystem::path& root);

}  // namespace isoshard
