// SPDX-License-Identifier: Apache-2.0
// A marker first, then what was there goes.
#include "harness/bundle/bundle_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <system_error>
#include <vector>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/system/folder.h"
#include "harness/bundle/redrawn_json.h"

namespace isoshard::detail {
namespace {

namespace fs = std::filesystem;
constexpr const char* kManifestName = "manifest.json";

bool is_of_a_bundle(const std::string& name) {
  return name.starts_with("step") || name == "scalars.jsonl" || name == "responses.json" ||
         name == kRedrawnFile || name == kManifestName || name.find(".tmp.") != std::string::npos;
}

[[noreturn]] void fail(const fs::path& folder, std::string_view doing, const std::exception& why) {
  throw InfrastructureError(fmt::format("{}: {}: {}", folder.string(), doing, why.what()));
}

}  // namespace

void prepare_bundle_folder(const fs::path& directory) {
  std::error_code none;
  if (fs::is_symlink(fs::symlink_status(directory, none)))
    throw UsageError(
        fmt::format("{} is a symbolic link; name the folder itself", directory.string()));
  const std::string marker(kBundleMarker);
  try {
    const Folder folder = Folder::make(directory);
    const std::vector<std::string> names = folder.names();
    const auto is_file = [&](const std::string& name) {
      return folder.type_of(name) == fs::file_type::regular;
    };
    // whose writing began with the marker, and was killed before that was in place
    const bool has_nothing = std::ranges::all_of(
        names, [&](const std::string& name) { return name.starts_with(marker + ".tmp."); });
    if (!has_nothing && !is_file(kManifestName) && !is_file(marker))
      throw UsageError(fmt::format("{} holds something that is not a bundle; give an empty folder",
                                   directory.string()));
    write_file_atomically(directory / marker,
                          "a bundle is being written; if no isoshard runs, it was killed\n");
    folder.remove_file(kManifestName);  // first: what is left is no bundle any more
    for (const std::string& name : names) {
      if (is_of_a_bundle(name)) folder.remove_tree(name);
    }
  } catch (const std::system_error& error) {
    fail(directory, "cannot make the folder ready for a bundle", error);
  }
}

void make_bundle_folder(const fs::path& folder) {
  try {
    (void)Folder::make(folder);
  } catch (const std::system_error& error) {
    fail(folder, "cannot create the folder", error);
  }
}

void finish_bundle_folder(const fs::path& directory) {
  try {
    Folder::open(directory).remove_file(std::string(kBundleMarker));
  } catch (const std::system_error& error) {
    fail(directory, "cannot finish the bundle", error);
  }
}

}  // namespace isoshard::detail
