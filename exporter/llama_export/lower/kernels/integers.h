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

// Sums of rows of x [Num, Width] over each group, which its minimum multiplies.
template <int Num, int Width, int Group>
struct GroupSums {
  static constexpr int groups = Width / Group, padded = room_for(groups);
  alignas(64) float sums[Num * padded] = {};

  template <typename X>
  explicit GroupSums(const X* x) {
    for (int m = 0; m < Num; ++m)
      for (int k = 0; k < Width; ++k)
        sums[m * padded + k / Group] += static_cast<float>(x[m * Width + k]);
  }

  // Added up, what the minima of a row make of row m.
  template <typename S>
  Float times(const S* minima, int m) const {
    alignas(64) float room[padded];
    const float* wide = widened<groups>(minima, room);
    Float sum(0.0f);
    for (int g = 0; g < groups; g += lanes)
      sum = at::vec::fmadd(Float::loadu(wide + g, std::min(lanes, groups - g)),
                           Float::loadu(sums + m * padded + g), sum);
    return sum;
  }
};

struct NoSums {
  template <typename X>
  explicit NoSums(const X*) {}
};

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

template <bool HasMin, int Num, int Width, int Group>
using SumsOf = std::conditional_t<HasMin, GroupSums<Num, Width, Group>, NoSums>;

// y[m * total] = a row of codes times row m of x [Num, Width]. `Group` codes share factors.
template <typename X, typename W, int Num, int Width, int Group, bool HasMin>
struct CodedFloats {
  alignas(64) float x[Num * Width];
  SumsOf<HasMin, Num, Width, Group> x_sums;

  explicit CodedFloats(const X* from) : x_sums(from) {
    for (int i = 0; i < Num * Width; ++i) x[i] = static_cast<float>(from[i]);
  }

  template <typename F, typename Y>
  void dot(const W* codes, const F& factors, Y* y, int64_t total) const {
    constexpr int whole = Width / 32 * 32;
    constexpr int chains = Group > 128 ? parts : 1;  // a long sum in one register waits for itself
    Float sums[Num];
#pragma GCC unroll 8
    for (int m = 0; m < Num; ++m) sums[m] = Float(0.0f);
    for (int first = 0; first < whole; first += Group) {
      Float group[Num][chains];
#pragma GCC unroll 8
      for (int m = 0; m < Num; ++m)
#pragma GCC unroll 8
        for (int c = 0; c < chains; ++c) group[m][c] = Float(0.0f);
      constexpr int size = Group < whole ? Group : whole;
#pragma GCC unroll 4
      for (int k = first; k < first + size; k += 32) {
        const Block block = block_of<F::offset>(codes + k / per_byte<W>);
#pragma GCC unroll 8
        for (int m = 0; m < Num; ++m)
#pragma GCC unroll 8
          for (int p = 0; p < parts; ++p)
            group[m][p % chains] = at::vec::fmadd(
                block.part[p], Float::loadu(x + m * Width + k + p * lanes), group[m][p % chains]);
      }
      const Float scale(factors.scale(first / Group));
#pragma GCC unroll 8
      for (int m = 0; m < Num; ++m)
#pragma GCC unroll 8
        for (int c = 0; c < chains; ++c) sums[m] = at::vec::fmadd(scale, group[m][c], sums[m]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < Num; ++m) {
      if constexpr (HasMin) sums[m] = sums[m] + x_sums.times(factors.minima, m);
      float rest = 0.0f;  // only where a whole row is a group of eight-bit codes
      for (int k = whole; k < Width; ++k) rest += x[m * Width + k] * static_cast<float>(codes[k]);
      y[m * total] = static_cast<Y>(sum_of(sums[m]) + rest * factors.scale(0));
    }
  }
};

#if defined(CPU_CAPABILITY_AVX512)
// The same for x in bf16 and codes of four bits, in pairs, on CPUs that multiply pairs of bf16: 64
// at a time, the low halves of two blocks, then their high halves.
template <int Num, int Width, int Group, bool HasMin>
struct CodedPairs {
  static constexpr int padded = (Width + 63) / 64 * 64;
  alignas(64) at::BFloat16 x[Num * padded];
  SumsOf<HasMin, Num, Width, Group> x_sums;

  explicit CodedPairs(const at::BFloat16* from) : x_sums(from) {
    for (int m = 0; m < Num; ++m)
      for (int k = 0; k < padded; ++k) {
        const int to = k / 64 * 64 + k % 32 / 16 * 32 + k % 64 / 32 * 16 + k % 16;
        x[m * padded + to] = k < Width ? from[m * Width + k] : at::BFloat16(0.0f);
      }
  }

  template <typename F, typename Y>
  __attribute__((target("avx512bf16"))) void dot(const uint8_t* codes, const F& factors, Y* y,
                                                 int64_t total) const {
    alignas(32) static const uint16_t values[2][16] = {
        {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
         0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0},
        {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
         0x4130, 0x4140, 0x4150, 0x4160, 0x4170}};
    // Twice, since the low five bits of an index are taken, of which the fifth is the other code's.
    const __m512i table =
        _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(values[HasMin])));
    alignas(64) float room[room_for(Width / Group)];
    const auto* scales = wide_scales(factors.scales, room);
    __m512 sums[Num];
#pragma GCC unroll 8
    for (int m = 0; m < Num; ++m) sums[m] = _mm512_setzero_ps();
    constexpr int step = Group < 64 ? 64 : Group;
    for (int first = 0; first < Width; first += step) {
      __m512 low_sums[Num], high_sums[Num];
#pragma GCC unroll 8
      for (int m = 0; m < Num; ++m) low_sums[m] = high_sums[m] = _mm512_setzero_ps();
      constexpr int size = step < padded ? step : padded;
#pragma GCC unroll 2
      for (int k = first; k < first + size; k += 64) {
        const __m256i* from = reinterpret_cast<const __m256i*>(codes + k / 2);
        const __m512i both = _mm512_cvtepu8_epi16(
            k + 64 <= Width ? _mm256_loadu_si256(from) : _mm256_maskz_loadu_epi8(0xffff, from));
        const __m512bh low = (__m512bh)_mm512_permutexvar_epi16(both, table);
        const __m512bh high = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), table);
#pragma GCC unroll 8
        for (int m = 0; m < Num; ++m) {
          const at::BFloat16* row = x + m * padded + k;
          low_sums[m] = _mm512_dpbf16_ps(low_sums[m], low, (__m512bh)_mm512_load_si512(row));
          high_sums[m] =
              _mm512_dpbf16_ps(high_sums[m], high, (__m512bh)_mm512_load_si512(row + 32));
        }
      }
      const __m512 scale = scale_at(scales, first);
#pragma GCC unroll 8
      for (int m = 0; m < Num; ++m)
        sums[m] = _mm512_fmadd_ps(scale, _mm512_add_ps(low_sums[m], high_sums[m]), sums[m]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < Num; ++m) {
      if constexpr (HasMin) sums[m] = _mm512_add_ps(sums[m], x_sums.times(factors.minima, m));
      y[m * total] = static_cast<Y>(_mm512_reduce_add_ps(sums[m]));
    }
  }

  // A row's scales: as bf16, which are float32 without their low half, or widened.
  static const at::BFloat16* wide_scales(const at::BFloat16* scales, float*) { return scales; }
  template <typename S>
  static const float* wide_scales(const S* scales, float* room) {
    return widened<Width / Group>(scales, room);
  }

  // Eight lanes are one block, the other eight the next, which may be of another group.
  static __m512 scale_at(const float* scales, int first) {
    const __m512 one = _mm512_set1_ps(scales[first / Group]);
    if (Group >= 64 || first + 64 > Width) return one;
    return _mm512_mask_mov_ps(one, 0xff00, _mm512_set1_ps(scales[first / 32 + 1]));
  }

  static __m512 scale_at(const at::BFloat16* scales, int first) {
    if (Group >= 64 || first + 64 > Width)
      return _mm512_set1_ps(static_cast<float>(scales[first / Group]));
    int32_t both;
    std::memcpy(&both, scales + first / 32, sizeof(both));
    const __m512i spread = _mm512_set1_epi32(both);
    return _mm512_castsi512_ps(_mm512_mask_slli_epi32(
        _mm512_and_si512(spread, _mm512_set1_epi32(0xffff0000)), 0x00ff, spread, 16));
  }
};
#endif

// The `block`-th `columns` rows of one weight, which are dot products.
template <int Width, int Group, typename Rows, typename W, typename F, typename Y>
inline void coded_rows_of(const Rows& rows, const W* codes, const F& factors, int64_t num_rows,
                          int64_t block, Y* y, int64_t total) {
  const int64_t first = block * columns, end = std::min(first + columns, num_rows);
  for (int64_t v = first; v < end; ++v)
    rows.dot(codes + v * (Width / per_byte<W>), factors.from(v * (Width / Group)), y + v, total);
}

// Calls `multiply` with x as it is needed.
template <typename X, typename W, int Num, int Width, int Group, bool HasMin, typename Multiply>
inline void with_rows(const X* x, const Multiply& multiply) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<X, at::BFloat16> && std::is_same_v<W, uint8_t>) {
    if (Pairs::is_there()) return multiply(CodedPairs<Num, Width, Group, HasMin>(x));
  }
#endif
  multiply(CodedFloats<X, W, Num, Width, Group, HasMin>(x));
}

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
