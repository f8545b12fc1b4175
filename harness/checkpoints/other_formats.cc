// SPDX-License-Identifier: Apache-2.0
// Checkpoints that are not read here: what each is, and how to convert it.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string>

#include "core/base/error.h"
#include "core/io/json.h"
#include "harness/checkpoints/stored_checkpoint.h"
#include "harness/ids/rule.h"

namespace isoshard::detail {
namespace {

namespace fs = std::filesystem;

constexpr std::array<std::string_view, 5> kPickleSuffixes{".pt", ".pth", ".bin", ".ckpt", ".pkl"};

bool is_pickle(const fs::path& file) {
  const std::string suffix = file.extension().string();
  return std::find(kPickleSuffixes.begin(), kPickleSuffixes.end(), suffix) != kPickleSuffixes.end();
}

/// "", or what the folder is.
std::string format_of_folder(const fs::path& folder) {
  const auto has = [&](const char* name) {
    std::error_code ignored;
    return fs::exists(folder / name, ignored);
  };
  if (has("metadata.json")) return "a checkpoint of Megatron (torch_dist)";
  if (has(".metadata")) return "a distributed checkpoint of PyTorch (.metadata is a pickle)";
  if (has("latest_checkpointed_iteration.txt")) return "a folder of Megatron's checkpoints";
  std::error_code error;
  bool has_pickles = false, has_safetensors = false, has_deepspeed = has("latest");
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename().string();
    has_deepspeed =
        has_deepspeed || name.ends_with("_optim_states.pt") || name.ends_with("_model_states.pt");
    has_pickles = has_pickles || is_pickle(at->path());
    has_safetensors = has_safetensors || name.ends_with(".safetensors");
  }
  if (error)
    throw FileError(fmt::format("{}: cannot be listed: {}", folder.string(), error.message()));
  if (has_deepspeed) return "a checkpoint of DeepSpeed (its files are pickles)";
  return has_pickles && !has_safetensors ? "a folder of pickles" : "";
}

}  // namespace

std::string convert_command(const fs::path& path) {
  std::string text = path.string();
  while (text.size() > 1 && text.ends_with('/')) text.pop_back();
  const fs::path plain(text);
  fs::path target = plain;
  if (is_pickle(plain)) target.replace_extension();
  return fmt::format("python -m isoshard convert {} {}.safetensors", text, target.string());
}

void refuse_other_checkpoints(const fs::path& path) {
  std::error_code ignored;
  if (!fs::exists(path, ignored)) refuse(path, RuleId::kNoFile);
  const auto refuse_format = [&](std::string_view format) {
    refuse(path, RuleId::kCheckpointToConvert,
           {{"format", format}, {"command", convert_command(path)}});
  };
  if (fs::is_directory(path, ignored)) {
    if (const std::string format = format_of_folder(path); !format.empty()) refuse_format(format);
  } else if (is_pickle(path)) {
    refuse_format("a pickle (it can run code)");
  }
}

bool is_own_checkpoint(const fs::path& folder) {
  const fs::path manifest = folder / "manifest.json";
  std::error_code ignored;
  if (!fs::exists(manifest, ignored)) return false;
  const nlohmann::json content = read_json_file(manifest);
  if (!content.is_object()) return false;
  if (content.contains("run") && content.contains("steps"))
    refuse(manifest, RuleId::kBundleForCheckpoint);
  return content.contains("streams") && content.contains("tensors");
}

}  // namespace isoshard::detail
