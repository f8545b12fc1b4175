// SPDX-License-Identifier: Apache-2.0
/// The folder that a bundle is written to: what may be replaced, and how it is told.
#pragma once
#include <filesystem>
#include <string_view>

namespace isoshard::detail {

/// A file that lies in the folder from its first moment until the manifest is there. A folder that
/// has it holds nothing but a bundle whose writer was killed.
inline constexpr std::string_view kBundleMarker = ".isoshard-bundle";

/// Makes the folder, or takes an older or half-written bundle out of it, and puts the marker in.
/// No link is followed.
/// Errors   UsageError if the folder is a link or holds something that is not a bundle;
///          InfrastructureError if that cannot be done.
void prepare_bundle_folder(const std::filesystem::path& directory);

/// A folder in it. No error if it is there.
/// Errors   InfrastructureError.
void make_bundle_folder(const std::filesystem::path& folder);

/// Takes the marker away: call it when everything else is written.
/// Errors   InfrastructureError.
void finish_bundle_folder(const std::filesystem::path& directory);

}  // namespace isoshard::detail
