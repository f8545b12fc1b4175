// SPDX-License-Identifier: Apache-2.0
// The bundle lies in a folder of this process, which is removed when it ends.
#include "fuzz/bundle_reader.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/base/sha256.h"
#include "harness/judge/compare_bundles.h"
#include "harness/testing/test_folder.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;

std::string content_of(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

void write(const fs::path& file, std::string_view content) {
  std::ofstream stream(file, std::ios::binary | std::ios::trunc);
  stream.write(content.data(), static_cast<std::streamsize>(content.size()));
}

std::string hash_of(std::string_view content) {
  return sha256_hex(std::as_bytes(std::span(content.data(), content.size())));
}

class ChangedBundle {
 public:
  ChangedBundle() {
    const fs::path stored = fs::path(ISOSHARD_FRAMEWORKS_DIR) / "ddp";
    fs::copy(stored / "reference", reference(), fs::copy_options::recursive);
    fs::copy(stored / "right", actual(), fs::copy_options::recursive);
    manifest_ = nlohmann::json::parse(content_of(actual() / "manifest.json"));
    for (const auto& [name, hash] : manifest_.at("files").items()) names_.push_back(name);
  }

  [[nodiscard]] fs::path reference() const { return folder_.path() / "reference"; }
  [[nodiscard]] fs::path actual() const { return folder_.path() / "actual"; }

  /// Whether the content is what was stored.
  bool change(std::size_t index, std::string_view content) {
    restore();
    if (index == names_.size()) {
      name_ = "manifest.json";
    } else {
      name_ = names_[index];
    }
    kept_ = content_of(actual() / name_);
    write(actual() / name_, content);
    if (name_ == "manifest.json") return content == kept_;
    nlohmann::json sealed = manifest_;
    sealed["files"][name_] = hash_of(content);
    write(actual() / "manifest.json", sealed.dump());
    return content == kept_;
  }
  [[nodiscard]] std::size_t num_files() const { return names_.size() + 1; }

 private:
  void restore() {
    if (name_.empty()) return;
    write(actual() / name_, kept_);
    write(actual() / "manifest.json", manifest_.dump());
  }

  TestFolder folder_;
  nlohmann::json manifest_;
  std::vector<std::string> names_;
  std::string name_, kept_;
};

}  // namespace

void judge_changed_bundle(std::string_view bytes) {
  static ChangedBundle bundle;
  if (bytes.empty()) return;
  const std::size_t index = static_cast<unsigned char>(bytes.front()) % bundle.num_files();
  const bool is_stored = bundle.change(index, bytes.substr(1));
  BundleRules rules;
  rules.mesh = MeshShape({{Axis::kDp, 2}});
  const Verdict verdict = compare_bundles(bundle.reference(), bundle.actual(), {}, rules);
  if (is_stored && verdict.status != Status::kConforms)
    throw std::logic_error("the stored bundle must conform");
}

}  // namespace isoshard
