// SPDX-License-Identifier: Apache-2.0
// Safetensors files and Hugging Face folders.
#include "harness/checkpoints/stored_checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "core/base/error.h"
#include "core/base/printable.h"
#include "core/base/refuse.h"
#include "core/io/json.h"
#include "core/io/safetensors.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::string_view kWeights = "model.safetensors";
constexpr std::string_view kIndex = "model.safetensors.index.json";
/// Written by `python -m isoshard convert`: what it could not convert, one line each.
constexpr std::string_view kLeftOutKey = "isoshard.left_out";
/// Written beside it: which of these lines are of tensors.
constexpr std::string_view kTensorsLeftOutKey = "isoshard.tensors_left_out";
/// Written by torch.distributed.checkpoint into safetensors files that hold parts of tensors.
constexpr std::string_view kPartsKey = "DCP_SHARDING_INFO";

bool is_file(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored) && !fs::is_directory(path, ignored);
}

std::vector<fs::path> files_in(const fs::path& folder) {
  std::error_code error;
  std::vector<fs::path> files;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
    files.push_back(at->path());
  if (error) refuse(folder, "cannot be listed: " + error.message());
  std::sort(files.begin(), files.end());
  return files;
}

/// Adds the tensors of one file.
void add_file(const SafetensorsFile& file, StoredCheckpoint& checkpoint) {
  const std::string path = file.path().string();
  if (file.metadata().contains(std::string(kPartsKey)))
    refuse(file.path(), fmt::format("holds parts of tensors ({}); put them together with "
                                    "consolidate_safetensors_files of torch.distributed.checkpoint",
                                    kPartsKey));
  if (const auto said = file.metadata().find(std::string(kLeftOutKey));
      said != file.metadata().end()) {
    for (std::size_t begin = 0; begin < said->second.size();) {
      const std::size_t end = std::min(said->second.find('\n', begin), said->second.size());
      checkpoint.left_out.push_back(
          fmt::format("{}: not converted: {}", checkpoint.path.string(),
                      printable(std::string_view(said->second).substr(begin, end - begin), 300)));
      begin = end + 1;
    }
  }
  checkpoint.lacks_tensors |= file.metadata().contains(std::string(kTensorsLeftOutKey));
  for (const std::string& name : file.names()) {
    const SafetensorsInfo& info = file.info(name);
    const auto [place, is_new] = checkpoint.tensors.try_emplace(
        name, StoredTensor{RecordKind::kParam, info.dtype, info.shape, path,
                           [file, name] { return file.tensor(name); }});
    if (!is_new) refuse(file.path(), fmt::format("{} is also in {}", name, place->second.file));
  }
}

/// The files that an index names, with the tensors of each.
std::map<std::string, std::set<std::string>> tensors_by_file(const fs::path& index) {
  const json content = read_json_file(index);
  if (!content.is_object() || !content.contains("weight_map") ||
      !content.at("weight_map").is_object())
    refuse(index, "must be an object with the field weight_map (from tensor to file)");
  std::map<std::string, std::set<std::string>> files;
  for (const auto& [name, file] : content.at("weight_map").items()) {
    if (!file.is_string())
      refuse(index, fmt::format("the file of '{}' must be a string, got a JSON {}", printable(name),
                                file.type_name()));
    const auto& text = file.get_ref<const std::string&>();
    if (fs::path(text).filename() != text || text == ".." || text == "." || text.empty())
      refuse(index, fmt::format("the file of '{}' must be a name in the same folder, got '{}'",
                                printable(name), printable(text)));
    files[text].insert(name);
  }
  if (files.empty()) refuse(index, "weight_map must name at least one tensor, got none");
  return files;
}

/// Returns the names of the files.
std::set<std::string> add_indexed_files(const fs::path& index, StoredCheckpoint& checkpoint) {
  std::set<std::string> read;
  for (const auto& [file_name, names] : tensors_by_file(index)) {
    const fs::path path = index.parent_path() / file_name;
    if (!is_file(path))
      refuse(path, fmt::format("is missing; {} says that it holds {} tensors, first {}",
                               index.filename().string(), names.size(), *names.begin()));
    const SafetensorsFile file = SafetensorsFile::open(path);
    for (const std::string& name : names) {
      if (!file.contains(name))
        refuse(path, fmt::format("lacks {}, which {} says that it holds", printable(name),
                                 index.filename().string()));
    }
    for (const std::string& name : file.names()) {
      if (!names.contains(name))
        refuse(path, fmt::format("holds {}, which {} does not list for it", name,
                                 index.filename().string()));
    }
    add_file(file, checkpoint);
    read.insert(file_name);
  }
  return read;
}

/// tie_word_embeddings of a model, or of the text part of one that also sees.
std::optional<bool> tied_in(const json& config) {
  if (!config.is_object()) return std::nullopt;
  const auto field = config.find("tie_word_embeddings");
  if (field != config.end() && field->is_boolean()) return field->get<bool>();
  const auto text = config.find("text_config");
  return text != config.end() && text->is_object() ? tied_in(*text) : std::nullopt;
}

void read_config(const fs::path& folder, StoredCheckpoint& checkpoint) {
  const fs::path file = folder / "config.json";
  if (!is_file(file)) return;
  const std::optional<bool> tied = tied_in(read_json_file(file));
  checkpoint.is_tied = tied.value_or(false);
  checkpoint.tied_words = !tied.has_value() ? "config.json says nothing of tie_word_embeddings"
                          : *tied           ? "config.json says tie_word_embeddings"
                                            : "config.json says that tie_word_embeddings is false";
}

/// What a Trainer's folder holds beside its weights.
void note_pickles(const std::vector<fs::path>& files, StoredCheckpoint& checkpoint) {
  constexpr std::array<std::string_view, 4> kPickled{".pt", ".pth", ".bin", ".ckpt"};
  for (const fs::path& file : files) {
    const std::string extension = file.extension().string();
    if (std::find(kPickled.begin(), kPickled.end(), extension) == kPickled.end()) continue;
    checkpoint.lacks_tensors = true;
    checkpoint.left_out.push_back(fmt::format(
        "{}: not compared: a pickle is never loaded (it can run code); `{}` converts it",
        file.string(), detail::convert_command(file)));
  }
}

void add_folder(const fs::path& folder, StoredCheckpoint& checkpoint) {
  const std::vector<fs::path> files = files_in(folder);
  const bool has_index = is_file(folder / kIndex), has_weights = is_file(folder / kWeights);
  std::set<std::string> read;  // names of files
  if (has_index && has_weights)
    refuse(folder,
           fmt::format("must hold {} or {}, got both; name the one to compare", kWeights, kIndex));
  if (has_index) {
    read = add_indexed_files(folder / kIndex, checkpoint);
  } else {
    std::vector<fs::path> found;
    for (const fs::path& file : files) {
      if (file.extension() == ".safetensors") found.push_back(file);
    }
    if (has_weights) found = {folder / kWeights};
    if (found.size() != 1)
      refuse(folder, fmt::format("must hold {}, {} or one safetensors file, got {} safetensors "
                                 "files; name the one to compare",
                                 kWeights, kIndex, found.size()));
    add_file(SafetensorsFile::open(found.front()), checkpoint);
    read.insert(found.front().filename().string());
  }
  for (const fs::path& file : files) {
    if (file.extension() != ".safetensors" || read.contains(file.filename().string())) continue;
    checkpoint.lacks_tensors = true;
    checkpoint.left_out.push_back(
        fmt::format("{}: not compared: the weights are in {}; name the file to compare it",
                    file.string(), has_index ? kIndex : kWeights));
  }
  note_pickles(files, checkpoint);
  read_config(folder, checkpoint);
}

bool is_digit(char c) noexcept {
  return c >= '0' && c <= '9';
}

}  // namespace

bool NaturalOrder::operator()(std::string_view a, std::string_view b) const noexcept {
  std::size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    if (is_digit(a[i]) && is_digit(b[j])) {
      const auto number_at = [](std::string_view text, std::size_t& at) {
        const std::size_t begin = at;
        while (at < text.size() && is_digit(text[at])) ++at;
        const std::size_t first = std::min(text.find_first_not_of('0', begin), at);
        return text.substr(first, at - first);
      };
      const std::string_view x = number_at(a, i), y = number_at(b, j);
      if (x.size() != y.size()) return x.size() < y.size();
      if (x != y) return x < y;
    } else {
      if (a[i] != b[j]) return a[i] < b[j];
      ++i, ++j;
    }
  }
  const std::size_t left = a.size() - i, right = b.size() - j;
  return left != right ? left < right : a < b;
}

RecordKind kind_of_stored(std::string_view name,
                          const std::function<bool(std::string_view)>& is_tensor) {
  constexpr std::array<std::string_view, 4> kStates{"exp_avg", "exp_avg_sq", "max_exp_avg_sq",
                                                    "momentum_buffer"};
  const RecordName parts = parse_record_name(RecordKind::kOptimizer, name);
  if (parts.role == NameRole::kPlain) return RecordKind::kParam;
  const bool is_usual = parts.role == NameRole::kMaster ||
                        std::find(kStates.begin(), kStates.end(), parts.state) != kStates.end();
  return is_usual || is_tensor(parts.base) ||
                 is_tensor(to_string(RecordName{parts.base, NameRole::kState, "exp_avg"}))
             ? RecordKind::kOptimizer
             : RecordKind::kParam;
}

StoredCheckpoint open_checkpoint(const fs::path& path) {
  detail::refuse_other_checkpoints(path);
  std::error_code ignored;
  const bool is_folder = fs::is_directory(path, ignored);
  if (is_folder && detail::is_own_checkpoint(path)) return detail::open_own_checkpoint(path);
  StoredCheckpoint checkpoint;
  checkpoint.path = path;
  if (is_folder) {
    add_folder(path, checkpoint);
  } else if (path.filename().string().ends_with(".safetensors.index.json")) {
    add_indexed_files(path, checkpoint);
    read_config(path.parent_path(), checkpoint);
  } else {
    add_file(SafetensorsFile::open(path), checkpoint);
    if (path.filename() == kWeights) read_config(path.parent_path(), checkpoint);
  }
  const auto is_tensor = [&](std::string_view name) {
    return checkpoint.tensors.contains(std::string(name));
  };
  for (auto& [name, tensor] : checkpoint.tensors) tensor.kind = kind_of_stored(name, is_tensor);
  if (checkpoint.tensors.empty()) refuse(path, "must hold at least one tensor, got none");
  return checkpoint;
}

}  // namespace isoshard
