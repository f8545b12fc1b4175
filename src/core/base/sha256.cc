// SPDX-License-Identifier: Apache-2.0
// SHA-256 through OpenSSL's EVP interface.
#include "core/base/sha256.h"

#include <fmt/format.h>
#include <openssl/evp.h>

#include <array>
#include <iterator>

#include "core/base/error.h"
#include "core/base/mapped_file.h"

namespace isoshard {

struct Sha256::State {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  ~State() { EVP_MD_CTX_free(context); }
  static void require(bool ok) {
    if (!ok)
      throw InfrastructureError(
          "SHA-256 failed inside OpenSSL; is libcrypto usable here (FIPS mode)?");
  }
};

Sha256::Sha256() : state_(std::make_unique<State>()) {
  State::require(state_->context != nullptr &&
                 EVP_DigestInit_ex(state_->context, EVP_sha256(), nullptr) == 1);
}

Sha256::~Sha256() = default;

void Sha256::update(std::span<const std::byte> bytes) {
  State::require(EVP_DigestUpdate(state_->context, bytes.data(), bytes.size()) == 1);
}

std::string Sha256::hex_digest() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int size = 0;
  State::require(EVP_DigestFinal_ex(state_->context, digest.data(), &size) == 1);
  std::string text;
  for (unsigned int i = 0; i < size; ++i)
    fmt::format_to(std::back_inserter(text), "{:02x}", digest[i]);
  return text;
}

std::string sha256_hex(std::span<const std::byte> bytes) {
  Sha256 hash;
  hash.update(bytes);
  return hash.hex_digest();
}

std::string sha256_hex_of_file(const std::filesystem::path& path) {
  const MappedFile file(path);
  return sha256_hex(file.bytes());
}

}  // namespace isoshard
