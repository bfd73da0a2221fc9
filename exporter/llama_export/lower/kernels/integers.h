#ifndef LLAMA_EXPORT_INTEGERS
#define LLAMA_EXPORT_INTEGERS
namespace llama_export {

// A block of 32 codes, in order.
struct Block {
  Float part[32 / lanes];
};

// The factors of a weight's groups, S: bf16, float16 or float32.
template <typename S, bool HasMin>
struct Factors {
  static constexpr bool has_min = HasMin;
  static constexpr int offset = HasMin ? 0 : 8;  // of codes of four bits
  const S* scales;
  const S* minima;

  Factors from(int64_t group) const { return {scales + group, HasMin ? minima + group : nullptr}; }
  float scale(int64_t group) const { return static_cast<float>(scales[group]); }
  float min(int64_t group) const { return HasMin ? static_cast<float>(minima[group]) : 0.0f; }
};

// Room for so many factors of a row as float32.
constexpr int room_for(int num) {
  return (num + 2 * lanes - 1) / (2 * lanes) * 2 * lanes;
}

// `Num` factors as float32: where they are, or in `room`.
template <int Num, typename S>
inline const float* widened(const S* factors, float* room) {
  if constexpr (std::is_same_v<S, float>) {
    return factors;
  } else {
    constexpr int step = at::vec::Vectorized<S>::size(), loads = step / lanes;
    for (int g = 0; g < Num; g += step) {
      const auto some = at::vec::Vectorized<S>::loadu(factors + g, std::min(step, Num - g));
      const auto wide = at::vec::convert<float, loads, S, 1>(at::vec::VectorizedN<S, 1>(some));
      for (int p = 0; p < loads; ++p) wide[p].store(room + g + p * lanes);
    }
    return room;
  }
}

template <int Offset>
inline Block block_of(const int8_t* codes) {
  Block block;
#pragma GCC unroll 8
  for (int p = 0; p < parts; ++p) {
#if defined(CPU_CAPABILITY_AVX512)
    block.part[p] = _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + p * lanes))));
#elif defined(CPU_CAPABILITY_AVX2)
    block.part[p] = _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + p * lanes))));
#else
    float values[lanes];
    for (int i = 0; i < lanes; ++i) values[i] = codes[p * lanes + i];
    block.part[p] = Float::loadu(values);
#endif
  }
  return block;
}

// Byte i of 16 holds codes i and i + 16, plus the offset.
template <int Offset>
inline Block block_of(const uint8_t* codes) {
  Block block;
#if defined(CPU_CAPABILITY_AVX512)
  const __m512 values = _mm512_sub_ps(
      _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_ps(Offset));
  const __m512i both =
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  block.part[0] = _mm512_permutexvar_ps(both, values);  // takes the low four bits of each index
  block.part[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), values);
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i offset = _mm256_set1_epi32(Offset), low = _mm256_set1_epi32(15);
#pragma GCC unroll 8
  for (int p = 0; p < 2; ++p) {
    const __m256i both =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + p * lanes)));
    block.part[p] = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_and_si256(both, low), offset));
    block.part[p + 2] = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(both, 4), offset));
  }
#else
  float values[32];
  for (int i = 0; i < 16; ++i) {
    values[i] = (codes[i] & 15) - Offset;
    values[i + 16] = (codes[i] >> 4) - Offset;
  }
  for (int p = 0; p < parts; ++p) block.part[p] = Float::loadu(values + p * lanes);
#endif
  return block;
}

template <typename W>
constexpr int per_byte = std::is_same_v<W, uint8_t> ? 2 : 1;

// The values of `here` rows, each rounded to T.
template <typename T, int Group, typename W, typename F>
inline const float* decoded(const W* codes, F factors, int64_t width, int64_t here) {
  T* values = scratch<0, T>(columns * width);
  const int64_t whole = width / 32 * 32;
  for (int64_t i = 0; i < here;
       ++i, codes += width / per_byte<W>, factors = factors.from(width / Group)) {
    T* row = values + i * width;
    for (int64_t k = 0; k < whole; k += 32) {
      Block block = block_of<F::offset>(codes + k / per_byte<W>);
      const Float scale(factors.scale(k / Group)), min(factors.min(k / Group));
#pragma GCC unroll 8
      for (int p = 0; p < parts; ++p)
        block.part[p] =
            F::has_min ? at::vec::fmadd(block.part[p], scale, min) : block.part[p] * scale;
      if constexpr (std::is_same_v<T, float>) {
        for (int p = 0; p < parts; ++p) block.part[p].store(row + k + p * lanes);
      } else {
        at::vec::convert_float_bfloat16(block.part[0], block.part[1]).store(row + k);
      }
    }
    for (int64_t k = whole; k < width; ++k)
      row[k] = static_cast<float>(codes[k]) * factors.scale(0) + factors.min(0);
  }
  return reinterpret_cast<const float*>(values);
}

// The `block`-th `columns` rows of one weight times any number of rows.
template <int Group, typename X, typename W, typename F, typename Y>
inline void decoded_rows_of(const Given<X>& x, const W* codes, F factors, int64_t num_rows,
                            int64_t block, Y* y, int64_t total) {
  const int64_t first = block * columns, here = std::min<int64_t>(columns, num_rows - first);
  const int64_t width = x.width;
  codes += first * (width / per_byte<W>);
  factors = factors.from(first * (width / Group));
  y += first;
  float* panel = scratch<1, float>(columns * width);
  const Ahead ahead{reinterpret_cast<const char*>(codes + here * (width / per_byte<W>)),
                    columns * (width / per_byte<W>)};
#if defined(CPU_CAPABILITY_AVX512)
  if (x.has_pairs) {
    const float* words = decoded<at::BFloat16, Group>(codes, factors, width, here);
    lay_out(words, width / 2, here, panel);
    return multiply<Pairs>(x.pairs(), x.num, width / 2, panel, here, y, total, ahead);
  }
#endif
  const float* words = decoded<float, Group>(codes, factors, width, here);
  lay_out(words, width, here, panel);
  multiply<Floats>(x.wide, x.num, width, panel, here, y, total, ahead);
}

}  // namespace llama_export
#endif
