// SPDX-License-Identifier: Apache-2.0
// Mapped files, atomic files and SHA-256, including everything that is not a regular file.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/base/mapped_file.h"
#include "core/base/sha256.h"
#include "core/system/folder.h"
#include "core/system/leftovers.h"
#include "core/system/standard_descriptors.h"
#include "harness/testing/test_child.h"
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

// Large enough to be mapped.
constexpr std::size_t kMapped = std::size_t{3} << 20;

std::string change_of_inputs() {
  try {
    require_unchanged_inputs();
  } catch (const FileError& error) {
    return error.what();
  }
  return "";
}

TEST(MappedFile, ThatShrinksIsReadAsZerosAndTold) {
  const TestFolder folder;
  write_file_atomically(folder / "a", std::string(kMapped, 'x'));
  const MappedFile mapped(folder / "a");
  ASSERT_EQ(change_of_inputs(), "");

  std::filesystem::resize_file(folder / "a", 5000);

  EXPECT_EQ(mapped.bytes().size(), kMapped);
  EXPECT_EQ(mapped.bytes()[0], std::byte{'x'});
  EXPECT_EQ(mapped.bytes()[kMapped - 1], std::byte{0}) << "without a signal";
  EXPECT_THAT(change_of_inputs(), StartsWith((folder / "a").string() + ": changed while reading"));
  EXPECT_THAT(change_of_inputs(), HasSubstr("it had 3145728 bytes, now it has 5000"));
}

TEST(MappedFile, ThatIsRewrittenInPlaceIsTold) {
  const TestFolder folder;
  write_file_atomically(folder / "a", std::string(kMapped, 'x'));
  const MappedFile mapped(folder / "a");

  std::fstream(folder / "a", std::ios::in | std::ios::out) << 'y';
  std::filesystem::last_write_time(
      folder / "a", std::filesystem::file_time_type::clock::now() + std::chrono::seconds(5));

  EXPECT_THAT(change_of_inputs(), HasSubstr("another program wrote to it"));
}

TEST(MappedFile, ThatIsReplacedUnderItsNameHasNotChanged) {
  const TestFolder folder;
  write_file_atomically(folder / "a", std::string(kMapped, 'x'));
  const MappedFile mapped(folder / "a");

  write_file_atomically(folder / "a", "another file");

  EXPECT_EQ(change_of_inputs(), "");
  EXPECT_EQ(mapped.bytes()[kMapped - 1], std::byte{'x'});
}

TEST(MappedFile, ThatShrankBeforeItWasClosedIsToldOnce) {
  const TestFolder folder;
  write_file_atomically(folder / "a", std::string(kMapped, 'x'));
  {
    const MappedFile mapped(folder / "a");
    std::filesystem::resize_file(folder / "a", 0);
  }

  EXPECT_THAT(change_of_inputs(), HasSubstr("changed while reading"));
  EXPECT_EQ(change_of_inputs(), "");
}

TEST(MappedFile, ThatIsSmallIsACopy) {
  const TestFolder folder;
  write_file_atomically(folder / "a", "hello");
  const MappedFile mapped(folder / "a");

  std::filesystem::resize_file(folder / "a", 0);

  EXPECT_EQ(text_of(mapped), "hello");
  EXPECT_EQ(change_of_inputs(), "");
}

TEST(AtomicFile, RefusesWhatIsNoRegularFileBeforeAnythingIsWritten) {
  const TestFolder folder;
  ASSERT_EQ(::mkfifo((folder / "fifo").c_str(), 0600), 0);
  for (const auto& [path, words] : {std::pair{folder / "fifo", "is a FIFO"},
                                    std::pair{std::filesystem::path("/dev/full"), "is a device"}}) {
    try {
      write_file_atomically(path, "text");
      ADD_FAILURE() << path << " was not refused";
    } catch (const InfrastructureError& error) {
      EXPECT_THAT(error.what(), HasSubstr(words));
    }
  }
  EXPECT_EQ(folder.num_entries(), 1);
}

TEST(AtomicFile, StaysInItsFolderWhenTheNameIsGivenToALink) {
  const TestFolder folder;
  std::filesystem::create_directory(folder / "out");
  std::filesystem::create_directory(folder / "victim");
  AtomicFile file(folder / "out" / "x");

  std::filesystem::rename(folder / "out", folder / "moved");
  std::filesystem::create_directory_symlink(folder / "victim", folder / "out");
  file.write("text");
  file.commit();

  EXPECT_TRUE(std::filesystem::is_empty(folder / "victim"));
  EXPECT_EQ(content_of(folder / "moved" / "x"), "text");
}

TEST(AtomicFile, RemovesWhatAKilledProcessLeftAndNothingOfALivingOne) {
  const TestFolder folder;
  AtomicFile of_the_living(folder / "x");
  of_the_living.write("mine");
  const ChildResult killed = run_in_child([&] {
    AtomicFile file(folder / "x");
    file.write("half");
    ::raise(SIGKILL);
    return 0;
  });
  ASSERT_EQ(killed.signal, SIGKILL);
  ASSERT_EQ(folder.num_entries(), 2);

  write_file_atomically(folder / "x", "whole");

  EXPECT_EQ(folder.num_entries(), 2) << "x and the temporary file of this process";
  of_the_living.commit();
  EXPECT_EQ(content_of(folder / "x"), "mine");
}

TEST(AnchoredFolder, IsUsedWhateverItsNameLeadsTo) {
  const TestFolder folder;
  std::filesystem::create_directories(folder / "above" / "out");
  std::filesystem::create_directory(folder / "victim");
  const Folder held = Folder::open(folder / "above" / "out");
  const AnchoredFolder anchor(folder / "above" / "out", held.fd());

  std::filesystem::rename(folder / "above", folder / "moved");
  std::filesystem::create_directory_symlink(folder / "victim", folder / "above");
  write_file_atomically(folder / "above" / "out" / "x", "text");
  write_file_atomically(folder / "above" / "out" / "." / "y", "text");
  (void)Folder::make(folder / "above" / "out" / "a" / "b");

  EXPECT_TRUE(std::filesystem::is_empty(folder / "victim"));
  EXPECT_EQ(content_of(folder / "moved" / "out" / "x"), "text");
  EXPECT_EQ(content_of(folder / "moved" / "out" / "y"), "text");
  EXPECT_TRUE(std::filesystem::is_directory(folder / "moved" / "out" / "a" / "b"));
}

TEST(AnchoredFolder, RefusesLinksBelowIt) {
  const TestFolder folder;
  std::filesystem::create_directory(folder / "out");
  std::filesystem::create_directory(folder / "victim");
  const Folder held = Folder::open(folder / "out");
  const AnchoredFolder anchor(folder / "out", held.fd());
  std::filesystem::create_directory_symlink(folder / "victim", folder / "out" / "step0000");

  EXPECT_THROW(write_file_atomically(folder / "out" / "step0000" / "x", "text"),
               InfrastructureError);
  EXPECT_THROW((void)Folder::make(folder / "out" / "step0000"), std::system_error);
  held.remove_tree("step0000");

  EXPECT_TRUE(std::filesystem::is_directory(folder / "victim"));
  EXPECT_TRUE(std::filesystem::is_empty(folder / "victim"));
}

TEST(Leftovers, FoldersOfKilledProcessesGoAndOthersStay) {
  const TestFolder folder;
  const auto named = [&](const std::string& mark) {
    return folder / ("isoshard-" + mark + "-abcdef");
  };
  const ChildResult killed = run_in_child([&] {
    std::filesystem::create_directories(named(maker_mark()) / "inner");
    std::fputs(maker_mark().c_str(), stdout);
    std::fflush(stdout);
    ::raise(SIGKILL);
    return 0;
  });
  std::filesystem::create_directory(named(maker_mark()));
  std::filesystem::create_directory(folder / "isoshard-test-123456");
  std::filesystem::create_directory(folder / ("other-" + killed.output + "-abcdef"));
  ASSERT_TRUE(std::filesystem::exists(named(killed.output)));

  sweep_folders(folder.path(), "isoshard");

  EXPECT_FALSE(std::filesystem::exists(named(killed.output)));
  EXPECT_EQ(folder.num_entries(), 3);
}

TEST(Leftovers, ANumberThatCameAgainIsAnotherProcess) {
  EXPECT_FALSE(is_maker_gone(maker_mark()));
  EXPECT_TRUE(is_maker_gone(std::to_string(::getpid()) + ".1")) << "started at another time";
  for (const char* text : {"", "1", "1.", ".1", "a.b", "1.2.3", "-1.2"})
    EXPECT_FALSE(is_maker_gone(text)) << text;
}

TEST(StandardDescriptors, ThatAreClosedAreTakenBeforeAFileGetsTheirNumber) {
  const TestFolder folder;
  const ChildResult result = run_in_child([&] {
    for (const int fd : {0, 1, 2}) ::close(fd);
    occupy_standard_descriptors();
    const int file = ::open((folder / "x").c_str(), O_WRONLY | O_CREAT, 0600);
    return file > 2 && ::write(1, "a", 1) == 1 && ::read(0, nullptr, 0) == 0 ? 0 : 1;
  });

  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(content_of(folder / "x"), "");
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
