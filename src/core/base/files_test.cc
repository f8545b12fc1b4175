// SPDX-License-Identifier: Apache-2.0
// Mapped files, atomic files and SHA-256, including everything that is not a regular file.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/base/mapped_file.h"
#include "core/base/sha256.h"
#include "harness/testing/test_folder.h"

namespace isoshard {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

std::string refusal_of(const std::filesystem::path& path) {
  try {
    const MappedFile file(path);
  } catch (const FileError& error) {
    return error.what();
  }
  ADD_FAILURE() << path << " was not refused";
  return "";
}

TEST(MappedFile, HoldsTheBytesEvenAfterTheFileIsReplaced) {
  const TestFolder folder;
  write_file_atomically(folder / "a", "hello");
  const MappedFile mapped(folder / "a");

  write_file_atomically(folder / "a", "other content");

  EXPECT_EQ(text_of(mapped), "hello");
}

TEST(MappedFile, AnEmptyFileHasNoBytes) {
  const TestFolder folder;
  write_file_atomically(folder / "empty", "");

  EXPECT_EQ(MappedFile(folder / "empty").bytes().size(), 0U);
}

TEST(MappedFile, MovesWithoutUnmapping) {
  const TestFolder folder;
  write_file_atomically(folder / "a", "first");
  write_file_atomically(folder / "b", "second");
  MappedFile target(folder / "b");

  MappedFile source(folder / "a");
  target = std::move(source);

  EXPECT_EQ(text_of(target), "first");
}

TEST(MappedFile, RefusesWhatIsNoRegularFileAndSaysWhatItIs) {
  const TestFolder folder;
  ASSERT_EQ(::mkfifo((folder / "fifo").c_str(), 0600), 0);
  const int server = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string socket_path = (folder / "sock").string();
  ASSERT_LT(socket_path.size(), sizeof(address.sun_path));
  socket_path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  ASSERT_EQ(::bind(server, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);

  EXPECT_THAT(refusal_of(folder / "fifo"), HasSubstr("is a FIFO"));
  EXPECT_THAT(refusal_of(folder / "sock"), HasSubstr("is a socket"));
  EXPECT_THAT(refusal_of(folder.path()), HasSubstr("is a directory"));
  EXPECT_THAT(refusal_of("/dev/null"), HasSubstr("is a device"));
  EXPECT_THAT(refusal_of(folder / "missing"), HasSubstr("No such file"));
  EXPECT_THAT(refusal_of(folder / "missing"), StartsWith((folder / "missing").string()));
  ::close(server);
}

TEST(AtomicFile, AppearsOnlyWithCommit) {
  const TestFolder folder;
  {
    AtomicFile file(folder / "x");
    file.write("half");
    EXPECT_FALSE(std::filesystem::exists(folder / "x"));
  }
  EXPECT_TRUE(folder.empty());

  AtomicFile file(folder / "x");
  file.write("one ");
  file.write("two");
  file.commit();

  EXPECT_EQ(content_of(folder / "x"), "one two");
  EXPECT_EQ(file.bytes_written(), 7U);
  EXPECT_EQ(folder.num_entries(), 1);
}

TEST(AtomicFile, AMissingDirectoryIsAnErrorThatNamesTheFile) {
  const TestFolder folder;
  const std::filesystem::path path = folder / "no" / "x";
  try {
    AtomicFile file(path);
    FAIL() << "no error";
  } catch (const InfrastructureError& error) {
    EXPECT_THAT(error.what(), StartsWith(path.string()));
    EXPECT_THAT(error.what(), HasSubstr("No such file"));
  }
}

/// Stands for a full disk: the kernel refuses bytes beyond the limit with EFBIG.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    ::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &old_);
    const rlimit limit{bytes, old_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() { ::setrlimit(RLIMIT_FSIZE, &old_); }

 private:
  rlimit old_{};
};

TEST(AtomicFile, AFailedWriteLeavesTheOldFileAndNothingElse) {
  const TestFolder folder;
  write_file_atomically(folder / "x", "old");
  std::string message;
  {
    const FileSizeLimit limit(1000);
    try {
      write_file_atomically(folder / "x", std::string(5000, 'n'));
    } catch (const InfrastructureError& error) {
      message = error.what();
    }
  }

  EXPECT_THAT(message, StartsWith((folder / "x").string()));
  EXPECT_THAT(message, HasSubstr("after 1000 bytes"));
  EXPECT_EQ(content_of(folder / "x"), "old");
  EXPECT_EQ(folder.num_entries(), 1);
}

TEST(AtomicFile, ATargetThatIsADirectoryFailsAtCommit) {
  const TestFolder folder;
  std::filesystem::create_directories(folder / "d" / "inner");

  EXPECT_THROW(write_file_atomically(folder / "d", "text"), InfrastructureError);

  EXPECT_EQ(folder.num_entries(), 1);
}

TEST(Sha256, GivesThePublishedDigests) {
  const std::string text = "abc";
  EXPECT_EQ(sha256_hex(std::as_bytes(std::span(text))),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_hex({}), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

TEST(Sha256, AFileAndItsPiecesHashAlike) {
  const TestFolder folder;
  const std::string text(100000, 'z');
  write_file_atomically(folder / "z", text);
  Sha256 pieces;
  pieces.update(std::as_bytes(std::span(text).first(3)));
  pieces.update(std::as_bytes(std::span(text).subspan(3)));

  EXPECT_EQ(pieces.hex_digest(), sha256_hex_of_file(folder / "z"));
  EXPECT_THROW((void)sha256_hex_of_file(folder.path()), FileError);
}

}  // namespace
}  // namespace isoshard
