// SPDX-License-Identifier: Apache-2.0
// A libFuzzer program of one reader.
//
//     fuzz_curve -max_total_time=60 CORPUS_FOLDER
#include <cstddef>
#include <cstdint>

#include "fuzz/readers.h"

// NOLINTNEXTLINE: libFuzzer's name
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const isoshard::Reader& reader = isoshard::find_reader(ISOSHARD_READER);
  reader.read({reinterpret_cast<const char*>(data), size});
  return 0;
}
