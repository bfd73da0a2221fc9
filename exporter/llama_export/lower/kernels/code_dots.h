// Products of few rows of x with codes.
#ifndef LLAMA_EXPORT_CODE_DOTS
#define LLAMA_EXPORT_CODE_DOTS
namespace llama_export {

// Sums of rows of x [Num, Width] over each group, which its minimum multiplies.
template <int Num, int Width, int Group>
struct GroupSums {
  static constexpr int groups = Width / Group, padded = room_for(groups);
  alignas(64) float sums[Num * padded] = {};

  template <typename X>
  explicit GroupSums(const X* x) {
    constexpr int step = at::vec::Vectorized<X>::size(), loads = step / lanes;
    for (int m = 0; m < Num; ++m)
      for (int g = 0; g < groups; ++g) {
        Float sum(0.0f);
        for (int k = 0; k < Group; k += step) {
          const auto some = at::vec::Vectorized<X>::loadu(x + m * Width + g * Group + k,
                                                          std::min(step, Group - k));
          const at::vec::VectorizedN<float, loads> wide =
              at::vec::convert<float, loads, X, 1>(at::vec::VectorizedN<X, 1>(some));
          for (int p = 0; p < loads; ++p) sum = sum + wide[p];
        }
        sums[m * padded + g] = sum_of(sum);
      }
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

template <bool HasMin, int Num, int Width, int Group>
using SumsOf = std::conditional_t<HasMin, GroupSums<Num, Width, Group>, NoSums>;

// Dots of rows of x [Num, Width] with rows of codes, of which `Group` share factors:
// y[m * total + i * far] = row i * far of a weight times row m of x, for `Streams` of i.
template <typename X, typename W, int Num, int Width, int Group, bool HasMin>
struct CodedFloats {
  alignas(64) float x[Num * Width];
  SumsOf<HasMin, Num, Width, Group> x_sums;

  explicit CodedFloats(const X* from) : x_sums(from) {
    for (int i = 0; i < Num * Width; ++i) x[i] = static_cast<float>(from[i]);
  }

  template <int Streams, typename F, typename Y>
  void dots(const W* codes, const F& factors, int64_t far, Y* y, int64_t total) const {
    for (int i = 0; i < Streams; ++i)
      dot(codes + i * far * (Width / per_byte<W>), factors.from(i * far * (Width / Group)),
          y + i * far, total);
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
// Rows of x [Num, Width] in bf16 as whole numbers of `Bits` bits beside the sign, so that products
// with codes are whole, too. `Unit` columns share a power of two: its largest number keeps all its
// bits, and what is smaller is rounded at the place where that one ends.
template <int Num, int Width, int Unit, int Bits>
struct WholeRows {
  static constexpr int units = (Width + Unit - 1) / Unit, padded = units * Unit;
  static constexpr int room = (units + 15) / 16 * 16;
  alignas(64) float scales[Num * room] = {};

  // Calls `take(m, k, numbers)` for 16 columns from k at a time.
  template <typename Take>
  void split(const at::BFloat16* x, const Take& take) {
    for (int m = 0; m < Num; ++m)
      for (int u = 0; u < units; ++u) {
        __m512i largest = _mm512_setzero_si512();
        for (int k = u * Unit; k < (u + 1) * Unit; k += 16)
          largest = _mm512_max_epu32(
              largest, _mm512_and_si512(bits_at(x + m * Width, k), _mm512_set1_epi32(0x7fff)));
        const int exponent = _mm512_reduce_max_epu32(largest) >> 7;  // with 127 added
        const int one = std::max(exponent + 1 - Bits, 1);            // the exponent of a unit
        const Float into(power(254 - one));
        for (int k = u * Unit; k < (u + 1) * Unit; k += 16) {
          const __m512 some = (__m512)_mm512_slli_epi32(bits_at(x + m * Width, k), 16);
          take(m, k, _mm512_cvtps_epi32(_mm512_mul_ps(some, into)));
        }
        scales[m * room + u] =
            exponent < 255 ? power(one) : std::numeric_limits<float>::quiet_NaN();
      }
  }

  // What `Group` codes share times what a unit shares: to[m * room + unit].
  template <int Group, typename F>
  void scale(const F& factors, float* to) const {
    constexpr int groups = Width / Group;
    for (int m = 0; m < Num; ++m)
      if constexpr (Unit == Group) {
        for (int g = 0; g < groups; g += 16)
          (some_of(factors.scales + g, groups - g) * Float::loadu(scales + m * room + g))
              .store(to + m * room + g);
      } else {
        for (int u = 0; u < room; ++u)
          to[m * room + u] = u < units ? factors.scale(u * Unit / Group) * scales[m * room + u] : 0;
      }
  }

 private:
  static float power(int exponent) {
    const int32_t bits = exponent << 23;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }

  // Up to 16 factors.
  static Float some_of(const float* from, int num) { return Float::loadu(from, std::min(num, 16)); }
  static Float some_of(const at::Half* from, int num) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(num), from));
  }
  static Float some_of(const at::BFloat16* from, int num) {
    return (__m512)_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(num), from)), 16);
  }

  static __mmask16 first(int num) { return num < 16 ? (1u << std::max(num, 0)) - 1 : 0xffff; }

  static __m512i bits_at(const at::BFloat16* row, int k) {
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(Width - k), row + k));
  }
};

// Of `Streams` rows of codes with `Groups` factors each, and rows of x: the sums, with what minima
// add.
template <int Groups, int Streams, int Num, typename Sums, typename F, typename Y>
__attribute__((always_inline)) inline void put(const __m512 (&sums)[Streams][Num],
                                               const Sums& x_sums, const F& factors, int64_t far,
                                               Y* y, int64_t total) {
#pragma GCC unroll 8
  for (int m = 0; m < Num; ++m) {
    Float found[Streams];
#pragma GCC unroll 8
    for (int i = 0; i < Streams; ++i) {
      found[i] = sums[i][m];
      if constexpr (F::has_min)
        found[i] = found[i] + x_sums.times(factors.from(i * far * Groups).minima, m);
    }
    put_sums(found, y + m * total, far);
  }
}

// Dots with codes of eight bits: two products of 16 bits are added by an instruction.
template <int Num, int Width, int Group, bool HasMin>
struct CodedBytes {
  static constexpr int unit = Group < std::min(64, Width) ? Group : 64;
  using Rows = WholeRows<Num, Width, unit, 15>;
  Rows rows;
  alignas(64) int16_t x[Num * Rows::padded];
  SumsOf<HasMin, Num, Width, Group> x_sums;

  explicit CodedBytes(const at::BFloat16* from) : x_sums(from) {
    rows.split(from, [&](int m, int k, __m512i numbers) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(x + m * Rows::padded + k),
                         _mm512_cvtepi32_epi16(numbers));
    });
  }

  template <int Streams, typename F, typename Y>
  void dots(const int8_t* codes, const F& factors, int64_t far, Y* y, int64_t total) const {
    alignas(64) float scales[Streams][Num * Rows::room];
    __m512 sums[Streams][Num];
#pragma GCC unroll 8
    for (int i = 0; i < Streams; ++i) {
      rows.template scale<Group>(factors.from(i * far * (Width / Group)), scales[i]);
#pragma GCC unroll 8
      for (int m = 0; m < Num; ++m) sums[i][m] = _mm512_setzero_ps();
    }
    constexpr int whole = Width / unit;
    for (int u = 0; u < whole; ++u) add<Streams, unit>(codes, u, far, scales, sums);
    if constexpr (whole < Rows::units) add<Streams, Width % unit>(codes, whole, far, scales, sums);
    put<Width / Group>(sums, x_sums, factors, far, y, total);
  }

 private:
  // Adds what `Here` columns of a unit make.
  template <int Streams, int Here>
  __attribute__((always_inline)) void add(const int8_t* codes, int u, int64_t far,
                                          const float (&scales)[Streams][Num * Rows::room],
                                          __m512 (&sums)[Streams][Num]) const {
#pragma GCC unroll 8
    for (int i = 0; i < Streams; ++i) {
      __m512i found[Num];
#pragma GCC unroll 2
      for (int j = 0; j < (Here + 31) / 32; ++j) {
        const __m256i* from =
            reinterpret_cast<const __m256i*>(codes + i * far * Width + u * unit + 32 * j);
        fetch_once(from);
        const __m512i some = _mm512_cvtepi8_epi16(
            Here >= 32 * (j + 1) ? _mm256_loadu_si256(from)
                                 : _mm256_maskz_loadu_epi8((1u << Here % 32) - 1, from));
#pragma GCC unroll 8
        for (int m = 0; m < Num; ++m) {
          const __m512i added =
              _mm512_madd_epi16(some, _mm512_load_si512(x + m * Rows::padded + u * unit + 32 * j));
          found[m] = j == 0 ? added : _mm512_add_epi32(found[m], added);
        }
      }
#pragma GCC unroll 8
      for (int m = 0; m < Num; ++m)
        sums[i][m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(found[m]),
                                     _mm512_set1_ps(scales[i][m * Rows::room + u]), sums[i][m]);
    }
  }
};

// Dots with codes of four bits: four products of bytes are added by an instruction, first with the
// upper, then with the lower seven bits of x.
template <int Num, int Width, int Group, bool HasMin>
struct CodedNibbles {
  static constexpr int step = 128;  // codes in a vector
  static constexpr int steps = (Width + step - 1) / step;
  static constexpr int unit = Group < std::min(step, Width) ? Group : step;
  using Rows = WholeRows<Num, Width, unit, 14>;
  struct Step {
    __m512i upper[2], lower[2];  // of columns whose codes are low, or high, halves of bytes
    __m512i offset;              // of all codes, added up as the products are
  };
  Rows rows;
  Step x[Num][steps] = {};
  SumsOf<HasMin, Num, Width, Group> x_sums;

  __attribute__((target("avx512vnni"))) explicit CodedNibbles(const at::BFloat16* from)
      : x_sums(from) {
    rows.split(from, [&](int m, int k, __m512i numbers) {
      const __m512i rounded =
          _mm512_srai_epi32(_mm512_add_epi32(numbers, _mm512_set1_epi32(64)), 7);
      const __m512i upper = _mm512_min_epi32(rounded, _mm512_set1_epi32(127));
      const __m512i lower = _mm512_sub_epi32(numbers, _mm512_slli_epi32(upper, 7));
      Step& to = x[m][k / step];
      const int half = k / 16 % 2, at = k % step / 32;
      reinterpret_cast<__m128i*>(&to.upper[half])[at] = _mm512_cvtepi32_epi8(upper);
      reinterpret_cast<__m128i*>(&to.lower[half])[at] = _mm512_cvtepi32_epi8(lower);
    });
    if (HasMin) return;
    const __m512i offset = _mm512_set1_epi8(8);
    for (auto& row : x)
      for (Step& some : row)
        some.offset = _mm512_sub_epi32(_mm512_setzero_si512(), products(offset, offset, some));
  }

  template <int Streams, typename F, typename Y>
  __attribute__((target("avx512vnni"))) void dots(const uint8_t* codes, const F& factors,
                                                  int64_t far, Y* y, int64_t total) const {
    alignas(64) float scales[Streams][Num * Rows::room + 16];
    __m512 sums[Streams][Num];
#pragma GCC unroll 8
    for (int i = 0; i < Streams; ++i) {
      rows.template scale<Group>(factors.from(i * far * (Width / Group)), scales[i]);
#pragma GCC unroll 8
      for (int m = 0; m < Num; ++m) sums[i][m] = _mm512_setzero_ps();
    }
    const __m512i low_half = _mm512_set1_epi8(15);
    for (int s = 0; s < steps; ++s)
#pragma GCC unroll 8
      for (int i = 0; i < Streams; ++i) {
        fetch_once(codes + i * far * (Width / 2) + s * 64);
        const __m512i both = codes_at(codes + i * far * (Width / 2), s);
        const __m512i low = _mm512_and_si512(both, low_half);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half);
#pragma GCC unroll 8
        for (int m = 0; m < Num; ++m) {
          const __m512 found = _mm512_cvtepi32_ps(products(low, high, x[m][s]));
          sums[i][m] = _mm512_fmadd_ps(found, scales_at(scales[i] + m * Rows::room, s), sums[i][m]);
        }
      }
    put<Width / Group>(sums, x_sums, factors, far, y, total);
  }

 private:
  __attribute__((target("avx512vnni"), always_inline)) static inline __m512i products(
      __m512i low, __m512i high, const Step& x) {
    __m512i upper = _mm512_dpbusd_epi32(_mm512_setzero_si512(), low, x.upper[0]);
    __m512i lower = _mm512_dpbusd_epi32(x.offset, low, x.lower[0]);
    upper = _mm512_dpbusd_epi32(upper, high, x.upper[1]);
    lower = _mm512_dpbusd_epi32(lower, high, x.lower[1]);
    return _mm512_add_epi32(_mm512_slli_epi32(upper, 7), lower);
  }

  static __m512i codes_at(const uint8_t* row, int s) {
    if ((s + 1) * step <= Width) return _mm512_loadu_si512(row + s * 64);
    return _mm512_maskz_loadu_epi8((uint64_t{1} << (Width / 2 - s * 64)) - 1, row + s * 64);
  }

  // Four lanes are of one block of 32 codes.
  static __m512 scales_at(const float* scales, int s) {
    if constexpr (unit == step) {
      return _mm512_set1_ps(scales[s]);
    } else {
      const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      const __m512 some = _mm512_castps128_ps512(_mm_loadu_ps(scales + s * (step / unit)));
      return _mm512_permutexvar_ps(_mm512_srli_epi32(lane, unit == 32 ? 2 : 3), some);
    }
  }
};

inline bool has_byte_products() {
  static const bool found = __builtin_cpu_supports("avx512vnni");
  return found;
}
#endif

// The `block`-th share of one weight's rows, as `spread` cuts them.
template <int Width, int Group, typename Rows, typename W, typename F, typename Y>
inline void coded_rows_of(const Rows& rows, const W* codes, const F& factors, int64_t num_rows,
                          int64_t block, Y* y, int64_t total) {
  const auto dots = [&](int64_t row, int64_t far, auto count) {
    rows.template dots<count.value>(codes + row * (Width / per_byte<W>),
                                    factors.from(row * (Width / Group)), far, y + row, total);
  };
  spread(
      num_rows, block,
      [&](int64_t row, int64_t far) { dots(row, far, std::integral_constant<int, streams>()); },
      [&](int64_t row) { dots(row, 0, std::integral_constant<int, 1>()); });
}

// Calls `multiply` with x as it is needed.
template <typename X, typename W, int Num, int Width, int Group, bool HasMin, typename Multiply>
inline void with_rows(const X* x, const Multiply& multiply) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<X, at::BFloat16>) {
    if constexpr (std::is_same_v<W, int8_t>)
      return multiply(CodedBytes<Num, Width, Group, HasMin>(x));
    else if (has_byte_products())
      return multiply(CodedNibbles<Num, Width, Group, HasMin>(x));
  }
#endif
  multiply(CodedFloats<X, W, Num, Width, Group, HasMin>(x));
}

}  // namespace llama_export
#endif
