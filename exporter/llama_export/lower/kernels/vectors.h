// What the kernels share.
#ifndef LLAMA_EXPORT_VECTORS
#define LLAMA_EXPORT_VECTORS
namespace llama_export {

using Float = at::vec::Vectorized<float>;
constexpr int lanes = Float::size();

inline float sum_of(const Float& values) {
  return at::vec::vec_reduce_all<float>([](Float& a, Float& b) { return a + b; }, values);
}

// Memory of this thread for `num` values, aligned for any vector; one for each `Use`.
template <int Use, typename T>
T* scratch(int64_t num) {
  constexpr size_t alignment = 64;
  static thread_local std::vector<T> kept;
  if (kept.size() * sizeof(T) < num * sizeof(T) + alignment)
    kept.resize(num + alignment / sizeof(T));
  const size_t excess = reinterpret_cast<uintptr_t>(kept.data()) % alignment;
  return kept.data() + (alignment - excess) / sizeof(T);
}

}  // namespace llama_export
#endif
