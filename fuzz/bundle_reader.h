// SPDX-License-Identifier: Apache-2.0
/// A stored bundle of which one file is replaced, read and judged.
#pragma once
#include <string_view>

namespace isoshard {

/// The first byte chooses a file of a small stored bundle, the others are its new content. The
/// bundle is sealed again, so that the content reaches its reader, and judged against the stored
/// reference.
///
/// Errors   as compare_bundles; std::logic_error if the content is what was stored and the run does
///          not conform.
void judge_changed_bundle(std::string_view bytes);

}  // namespace isoshard
