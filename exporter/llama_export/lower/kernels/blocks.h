// How threads share work.
#ifndef LLAMA_EXPORT_BLOCKS
#define LLAMA_EXPORT_BLOCKS
#include <atomic>

namespace llama_export {

// Blocks of work, of which each thread has a share that lies together: memory is read in long
// streams, and results that lie together are of one thread. Whoever is done takes from the ends of
// the others' shares, so that a thread which is late does not keep them waiting.
class Blocks {
 public:
  explicit Blocks(int64_t num) : shares(omp_get_max_threads()) {
    const int64_t count = shares.size();
    for (int64_t i = 0; i < count; ++i)
      shares[i].rest = pack(num * i / count, num * (i + 1) / count);
  }

  // The next ones, from `begin` to `end`; whether there are any.
  bool take(int64_t* begin, int64_t* end) {
    const size_t own = omp_get_thread_num();
    for (size_t i = 0; i < shares.size(); ++i) {
      std::atomic<uint64_t>& rest = shares[(own + i) % shares.size()].rest;
      uint64_t found = rest.load(std::memory_order_relaxed);
      while (first(found) < last(found)) {
        const int64_t some = std::max<int64_t>(1, (last(found) - first(found)) / 4);
        *begin = i == 0 ? first(found) : last(found) - some;
        *end = *begin + some;
        const uint64_t left = i == 0 ? pack(*end, last(found)) : pack(first(found), *begin);
        if (rest.compare_exchange_weak(found, left, std::memory_order_relaxed)) return true;
      }
    }
    return false;
  }

 private:
  // Where what is left begins and ends.
  struct alignas(64) Share {
    std::atomic<uint64_t> rest;
  };

  static uint64_t pack(int64_t first, int64_t last) { return first << 32 | last; }
  static int64_t first(uint64_t rest) { return rest >> 32; }
  static int64_t last(uint64_t rest) { return rest & 0xffffffff; }

  std::vector<Share> shares;
};

}  // namespace llama_export
#endif
