#include "files.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <vector>

namespace llama_runtime {
namespace {

namespace fs = std::filesystem;

// Closes a descriptor at the end of its scope.
struct Descriptor {
  explicit Descriptor(const fs::path& path) : number(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (number >= 0) close(number);
  }
  int number;
};

class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new()) { EVP_DigestInit_ex(context_, EVP_sha256(), nullptr); }
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;
  ~Sha256() { EVP_MD_CTX_free(context_); }

  void update(const void* data, size_t num_bytes) { EVP_DigestUpdate(context_, data, num_bytes); }

  std::string hexadecimal() {
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned int len = 0;
    EVP_DigestFinal_ex(context_, digest, &len);
    std::string text;
    for (unsigned int i = 0; i < len; ++i) {
      text += "0123456789abcdef"[digest[i] >> 4];
      text += "0123456789abcdef"[digest[i] & 15];
    }
    return text;
  }

 private:
  EVP_MD_CTX* context_;
};

[[noreturn]] void refuse(const fs::path& path, ErrorCode code, int error) {
  throw Error(code, "cannot be read: " + os_text(error), path.string());
}

bool is_within(const fs::path& path, const fs::path& folder) {
  const auto [end, rest] = std::mismatch(folder.begin(), folder.end(), path.begin(), path.end());
  return end == folder.end();
}

}  // namespace

Status file_status(const fs::path& path) {
  struct stat found {};
  if (stat(path.c_str(), &found) != 0) return {errno, false, 0};
  return {0, S_ISREG(found.st_mode), found.st_size};
}

std::string os_text(int error) {
  return std::generic_category().message(error);
}

bool leads_out(const fs::path& path) {
  std::error_code error;
  if (!fs::is_symlink(path, error)) return false;
  const fs::path parent = path.has_parent_path() ? path.parent_path() : fs::path(".");
  const fs::path folder = fs::canonical(parent, error);
  if (error) return true;
  const fs::path target = fs::canonical(path, error);
  if (error) return true;
  if (is_within(target, folder)) return false;
  const bool is_snapshot = folder.parent_path().filename() == "snapshots";
  return !(is_snapshot && target.parent_path() == folder.parent_path().parent_path() / "blobs");
}

std::string read_bytes(const fs::path& path, ErrorCode code) {
  const Descriptor file(path);
  if (file.number < 0) refuse(path, code, errno);
  std::string data;
  std::vector<char> buffer(1 << 20);
  while (true) {
    const ssize_t count = read(file.number, buffer.data(), buffer.size());
    if (count < 0) refuse(path, code, errno);
    if (count == 0) return data;
    data.append(buffer.data(), static_cast<size_t>(count));
  }
}

std::string sha256_text(std::string_view data) {
  Sha256 digest;
  digest.update(data.data(), data.size());
  return digest.hexadecimal();
}

std::string sha256_file(const fs::path& path, int64_t start, std::optional<int64_t> end) {
  const Descriptor file(path);
  if (file.number < 0) refuse(path, ErrorCode::kIntegrity, errno);
  Sha256 digest;
  std::vector<char> buffer(1 << 20);
  while (true) {
    size_t room = buffer.size();
    if (end) room = static_cast<size_t>(std::min<int64_t>(*end - start, 1 << 20));
    const ssize_t count = pread(file.number, buffer.data(), room, start);
    if (count < 0) refuse(path, ErrorCode::kIntegrity, errno);
    if (count == 0) return digest.hexadecimal();
    digest.update(buffer.data(), static_cast<size_t>(count));
    start += count;
  }
}

Map map_file(const fs::path& path) {
  const Descriptor file(path);
  struct stat found {};
  if (file.number < 0 || fstat(file.number, &found) != 0) {
    refuse(path, ErrorCode::kIntegrity, errno);
  }
  Map map{nullptr, found.st_size};
  if (found.st_size == 0) return map;
  const auto num_bytes = static_cast<size_t>(found.st_size);
  void* memory = mmap(nullptr, num_bytes, PROT_READ, MAP_PRIVATE, file.number, 0);
  if (memory == MAP_FAILED) refuse(path, ErrorCode::kIntegrity, errno);
#ifdef MADV_HUGEPAGE
  madvise(memory, num_bytes, MADV_HUGEPAGE);  // what is not in memory yet comes in large pages
#endif
  const auto unmap = [memory, num_bytes](const uint8_t*) { munmap(memory, num_bytes); };
  map.data = std::shared_ptr<const uint8_t>(static_cast<const uint8_t*>(memory), unmap);
  return map;
}

}  // namespace llama_runtime
