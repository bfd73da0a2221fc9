// What the kernels share.
#ifndef LLAMA_EXPORT_VECTORS
#define LLAMA_EXPORT_VECTORS
namespace llama_export {

using Float = at::vec::Vectorized<float>;
constexpr int lanes = Float::size();

// Fetches a stored weight that comes up soon, as what is read once: it leaves the caches to what
// is read again, such as other code and the states.
__attribute__((always_inline)) inline void fetch_once(const void* weight) {
  __builtin_prefetch(static_cast<const char*>(weight) + 512, 0, 0);
}

inline float sum_of(const Float& values) {
  return at::vec::vec_reduce_all<float>([](Float& a, Float& b) { return a + b; }, values);
}

// The sums of four vectors.
inline void sums_of_four(const Float& a, const Float& b, const Float& c, const Float& d,
                         float* to) {
#if defined(CPU_CAPABILITY_AVX512)
  const auto pair = [](const __m512& one, const __m512& other) {
    return _mm512_add_ps(_mm512_unpacklo_ps(one, other), _mm512_unpackhi_ps(one, other));
  };
  const __m512 ab = pair(a, b), cd = pair(c, d);
  const __m512 all =
      _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
  to[0] = sum_of(a), to[1] = sum_of(b), to[2] = sum_of(c), to[3] = sum_of(d);
#endif
}

// y[i * far] = the sum of vector i, rounded.
template <int Num, typename Y>
__attribute__((always_inline)) inline void put_sums(const Float (&values)[Num], Y* y, int64_t far) {
  static_assert(Num == 1 || Num == 4);
  float sums[Num];
  if constexpr (Num == 4)
    sums_of_four(values[0], values[1], values[2], values[3], sums);
  else
    sums[0] = sum_of(values[0]);
#pragma GCC unroll 4
  for (int i = 0; i < Num; ++i) y[i * far] = static_cast<Y>(sums[i]);
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

constexpr int side = 16;  // of a square that is turned at once

// to[j * to_stride + i] = from[i * from_stride + j], of a square of 16.
__attribute__((always_inline)) inline void turn(const float* from, int64_t from_stride, float* to,
                                                int64_t to_stride) {
#if defined(CPU_CAPABILITY_AVX512)
  // In registers: the general one of `at::vec` goes by memory and takes three times as long.
  __m512 a[side], b[side];
#pragma GCC unroll 16
  for (int i = 0; i < side; ++i) a[i] = _mm512_loadu_ps(from + i * from_stride);
#pragma GCC unroll 16
  for (int i = 0; i < side; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < side; i += 4) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m512d low = _mm512_castps_pd(b[i + h]), high = _mm512_castps_pd(b[i + h + 2]);
      a[i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      a[i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
  // Of the four rows i, i + 4, i + 8, i + 12, the 128-bit parts 0 and 2, or 1 and 3.
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 even[2] = {_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88),
                            _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88)};
    const __m512 odd[2] = {_mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd),
                           _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xdd)};
    _mm512_storeu_ps(to + i * to_stride, _mm512_shuffle_f32x4(even[0], even[1], 0x88));
    _mm512_storeu_ps(to + (i + 4) * to_stride, _mm512_shuffle_f32x4(odd[0], odd[1], 0x88));
    _mm512_storeu_ps(to + (i + 8) * to_stride, _mm512_shuffle_f32x4(even[0], even[1], 0xdd));
    _mm512_storeu_ps(to + (i + 12) * to_stride, _mm512_shuffle_f32x4(odd[0], odd[1], 0xdd));
  }
#else
  at::vec::transpose_mxn<float, side, side>(from, from_stride, to, to_stride);
#endif
}

}  // namespace llama_export
#endif
