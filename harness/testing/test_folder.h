// SPDX-License-Identifier: Apache-2.0
/// A fresh folder for one test, removed with everything in it at the end.
#pragma once
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

namespace isoshard {

class TestFolder {
 public:
  TestFolder() : owner_(::getpid()) {
    std::string name = (std::filesystem::temp_directory_path() / "isoshard-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make " + name);
    path_ = name;
  }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;
  ~TestFolder() {
    std::error_code ignored;
    if (::getpid() != owner_) return;  // a copy in a child that called exit()
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  [[nodiscard]] std::filesystem::path operator/(const std::filesystem::path& name) const {
    return path_ / name;
  }
  [[nodiscard]] int num_entries() const {
    const std::filesystem::directory_iterator entries(path_);
    return static_cast<int>(std::distance(begin(entries), end(entries)));
  }
  [[nodiscard]] bool empty() const { return num_entries() == 0; }

 private:
  pid_t owner_;
  std::filesystem::path path_;
};

/// The bytes of a file; empty if it cannot be read.
[[nodiscard]] inline std::string content_of(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace isoshard
