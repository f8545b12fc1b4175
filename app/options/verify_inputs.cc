// SPDX-License-Identifier: Apache-2.0
// Which file is read, which is written.
#include "app/options/verify_inputs.h"

#include <fmt/format.h>

#include <boost/program_options/value_semantic.hpp>

#include "core/base/error.h"
#include "subjects/data/batch_file.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;
namespace fs = std::filesystem;

constexpr const char* kWeightsName = "init_weights.safetensors";
constexpr const char* kBatchName = "batch.safetensors";

std::string text_of(const ParsedOptions& options, const std::string& name) {
  return options.given(name) ? options.get<std::string>(name) : std::string();
}

struct Ways {
  fs::path read, save;
};

Ways ways_of(const ParsedOptions& options, const std::string& read, const std::string& save,
             const char* file_name) {
  Ways ways{text_of(options, read), text_of(options, save)};
  if (options.given(read) && ways.read.empty())
    throw UsageError(fmt::format("--{} must name a file", read));
  if (options.given("input-dir")) {
    if (!ways.read.empty())
      throw UsageError(
          fmt::format("--input-dir and --{} both say what to read; leave one out", read));
    const fs::path there = fs::path(options.get<std::string>("input-dir")) / file_name;
    std::error_code ignored;
    if (fs::exists(there, ignored)) ways.read = there;
  }
  if (!options.given(save) || !ways.save.empty()) return ways;
  if (options.given(read)) {
    ways.save = std::exchange(ways.read, {});
  } else if (options.given("output-dir")) {
    ways.save = fs::path(options.get<std::string>("output-dir")) / file_name;
  } else {
    throw UsageError(
        fmt::format("--{} must know where to write: give --{} FILE, --{} FILE or --output-dir DIR",
                    save, save, read));
  }
  return ways;
}

}  // namespace

void declare_input_options(OptionTable& table) {
  auto add = table.group("weights and data");
  const auto optional_file = [] { return po::value<std::string>()->implicit_value(""); };
  add("init-weights", po::value<std::string>(),
      "read the initial weights from this safetensors file");
  add("save-init-weights", optional_file(),
      "write the initial weights to this safetensors file (none named: to that of --init-weights, "
      "or init_weights.safetensors in "
      "--output-dir)");
  add("batch", po::value<std::string>(),
      "train on the samples of this safetensors file: input_ids, and maybe labels and sample_ids");
  add("save-batch", optional_file(),
      "write the samples of all steps to this safetensors file (none named: to that of --batch, or "
      "batch.safetensors in --output-dir)");
  add("input-dir", po::value<std::string>(),
      "read init_weights.safetensors and batch.safetensors of this folder");
}

InputFiles input_files_of(const ParsedOptions& options) {
  const Ways weights = ways_of(options, "init-weights", "save-init-weights", kWeightsName);
  const Ways batch = ways_of(options, "batch", "save-batch", kBatchName);
  if (options.given("input-dir") && weights.read.empty() && batch.read.empty()) {
    throw FileError(
        fmt::format("--input-dir {}: has neither {} nor {}; a run with --save-init-weights "
                    "--save-batch writes them",
                    options.get<std::string>("input-dir"), kWeightsName, kBatchName));
  }
  for (const char* other : {"data", "data-dtype", "tail"}) {
    if (!batch.read.empty() && options.given(other))
      throw UsageError(fmt::format(
          "--{}: a batch file fixes the samples and their order; leave one of the two out", other));
  }
  if (!batch.read.empty() && options.get<bool>("shuffle"))
    throw UsageError(
        "--shuffle: a batch file fixes the samples and their order; leave one of the two out");
  return {weights.read, batch.read, weights.save, batch.save};
}

void read_inputs_from(const InputFiles& files, bool has_seq_length, Case& item) {
  if (!files.weights.empty()) item.weights_path = files.weights;
  if (files.batch.empty()) return;
  item.data = DataSource{};
  item.data.kind = DataSource::Kind::kBatchFile;
  item.data.path = files.batch;
  if (!has_seq_length)
    item.seq_length = BatchFile(files.batch, item.config.vocab_size).seq_length();
}

}  // namespace isoshard
