// A block of places of cached keys and values: scores, their weights after the largest score so
// far, and the weighted sums of values. Where q, keys and values are bf16 and the CPU multiplies
// pairs of bf16, it does so; weights are then rounded to bf16 before they meet values, as the
// reference implementation does.
#ifndef LLAMA_EXPORT_PLACES
#define LLAMA_EXPORT_PLACES
namespace llama_export {

constexpr int block_size = 64;
constexpr int run_size = 16;  // places that lie together, where pages hold a multiple of them

// How many of the query heads that share a key/value head are taken together: as many as divide
// them and whose sums the registers hold.
constexpr int heads_at_once(int group, int width) {
  int heads = 12 * lanes / width;
  while (heads > 1 && group % heads) --heads;
  return heads > 1 ? heads : 1;
}

// How many tokens of a row that follow each other are taken together: a panel of keys or values,
// once laid out, serves two tiles of them.
constexpr int tokens_at_once(int heads, int page) {
  return page % run_size == 0 && heads < Floats::max_rows ? 2 * (Floats::max_rows / heads) : 1;
}

// Vector `part` of a row, as floats.
template <typename T>
inline Float load(const T* from, int part) {
  constexpr int loads = at::vec::Vectorized<T>::size() / lanes;  // vectors of floats in one of T
  if constexpr (std::is_same_v<T, float>) {
    return Float::loadu(from + part * lanes);
  } else {
    const at::vec::VectorizedN<float, loads> some = at::vec::convert<float, loads, T, 1>(
        at::vec::VectorizedN<T, 1>(at::vec::Vectorized<T>::loadu(from + part * lanes, lanes)));
    return some[0];
  }
}

#if defined(CPU_CAPABILITY_AVX512)
constexpr float log2_of_e = 1.44269504f;

// 2^x for x <= 0, within 3e-7 of it; NaN stays. What is left of x beside a whole number goes into
// the polynomial of degree 5 with the least largest relative error between -1/2 and 1/2.
__attribute__((always_inline)) inline __m512 power_of_two(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-150.0f), x);  // zero below, also for minus infinity
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(x, whole);
  __m512 found = _mm512_set1_ps(0.001327647129f);
  for (float next : {0.009675541893f, 0.05550713092f, 0.2402212024f, 0.693146944f, 1.000000119f})
    found = _mm512_fmadd_ps(found, rest, _mm512_set1_ps(next));
  return _mm512_scalef_ps(found, whole);
}
#endif

// Some heads of some tokens, each a row, over a block of places. `Place` says where place i begins.
template <typename T, int Heads, int Tokens, int Width, typename Place>
struct Places {
  static constexpr int rows = Heads * Tokens, parts = Width / lanes;
  static constexpr int at_once = Tokens % 2 ? rows : rows / 2;  // rows in a tile
  const T *keys, *values;
  const Place& place;
  int64_t first, count;   // places before the block, and all that the last token sees
  int nums[Tokens] = {};  // places of the block that each token sees, in rising order
  alignas(64) float weights[rows][block_size];  // scores before

  // Token t sees t places more than the first, which sees `least`.
  Places(const T* keys, const T* values, const Place& place, int64_t first, int64_t least)
      : keys(keys), values(values), place(place), first(first), count(least + Tokens - 1) {
    for (int t = 0; t < Tokens; ++t)
      nums[t] = static_cast<int>(std::clamp<int64_t>(least + t - first, 0, block_size));
  }

  // Pages lie anywhere: what the next block needs of keys or values is fetched before it is due, a
  // few places at a time, so that the memory works while this block is computed. Inlined, since GCC
  // takes out calls of a function that does nothing but this.
  __attribute__((always_inline)) void fetch(const T* states, int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < std::min(end, count); ++i) {
      const T* from = states + place(i);
      for (int d = 0; d < Width; d += 64 / sizeof(T)) __builtin_prefetch(from + d, 0, 2);
    }
  }

  // What the places from `begin` to `end` of the next block need.
  __attribute__((always_inline)) void fetch_next(const T* states, int begin, int end) const {
    fetch(states, first + block_size + begin, first + block_size + end);
  }

  // Keys or values of 16 places from place i of the block, of which the row has a place at least:
  // they lie together where pages hold a multiple of 16.
  const T* run(const T* states, int i) const {
    static_assert(block_size % run_size == 0);
    return states + place(first + i);
  }

  // The run that is as far in the next block as place i is in this one.
  __attribute__((always_inline)) void fetch_run(const T* states, int i) const {
    if (first + block_size + i >= count) return;
    const T* from = run(states, block_size + i);
    for (int d = 0; d < run_size * Width; d += 64 / sizeof(T)) __builtin_prefetch(from + d, 0, 2);
  }

  // Scores of token t.
  void score(const float (*wanted)[Width], int t) {
    for (int j = 0; j < nums[t]; ++j) {
      fetch_next(keys, j, j + 1);
      const T* key = keys + place(first + j);
      Float found[parts];
#pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) found[p] = load(key, p);
#pragma GCC unroll 16
      for (int h = t * Heads; h < (t + 1) * Heads; ++h) {
        Float dot = Float::loadu(wanted[h]) * found[0];
#pragma GCC unroll 16
        for (int p = 1; p < parts; ++p)
          dot = at::vec::fmadd(Float::loadu(wanted[h] + p * lanes), found[p], dot);
        weights[h][j] = sum_of(dot);
      }
    }
  }

  // Scores of all tokens, also of some places that none of them sees. Keys are laid out as a panel,
  // since a sum over the lanes of a vector for each score costs more.
  template <typename Tile, int Words>
  void score_panels(const float* q) {
    const int most = nums[Tokens - 1];
    for (int j = 0; j < most; j += columns) {
      alignas(64) float panel[Words * columns];
      for (int i = j; i < j + columns; i += run_size) {
        if (i >= most) {
          for (int k = 0; k < Words; ++k) std::fill_n(panel + k * columns + i - j, run_size, 0.0f);
          continue;
        }
        fetch_run(keys, i);
        const float* from = reinterpret_cast<const float*>(run(keys, i));
        for (int k = 0; k < Words; k += side)
          turn(from + k, Words, panel + k * columns + i - j, columns);
      }
      for (int h = 0; h < rows; h += at_once)
        Tile::template tile<at_once>(q + h * Words, Words, panel, weights[h] + j, block_size);
    }
  }

  // Scores of a row, times `unit`, become weights; its sums so far shrink where a larger came.
  void soften(int h, float unit, float* largest, Float* total, float (*sums)[Width]) {
    const int num = nums[h / Heads];
    for (int j = num; j % lanes; ++j) weights[h][j] = -std::numeric_limits<float>::infinity();
    Float found(largest[h]), added(0.0f);
    for (int j = 0; j < num; j += lanes)
      found = at::vec::maximum(found, Float::loadu(weights[h] + j));
    const float most = at::vec::vec_reduce_all<float>(
        [](Float& a, Float& b) { return at::vec::maximum(a, b); }, found);
    for (int j = 0; j < num; j += lanes) {
      const Float less = (Float::loadu(weights[h] + j) - Float(most)) * Float(unit);
      const Float weight = std::is_same_v<T, float> ? less.exp() : less.exp_u20();
      weight.store(weights[h] + j);
      added = added + weight;
    }
    shrink(most, unit, largest + h, total + h, sums[h]);
    total[h] = total[h] + added;
  }

  // The sums of a row so far, where its largest score becomes `most`.
  static void shrink(float most, float unit, float* largest, Float* total, float* sums) {
    if (most == *largest) return;
    const Float kept(std::exp((*largest - most) * unit));
    *total = *total * kept;
#pragma GCC unroll 16
    for (int p = 0; p < Width; p += lanes) (Float::loadu(sums + p) * kept).store(sums + p);
    *largest = most;
  }

  // Adds the weighted values of token t.
  void add(int t, float (*all)[Width]) const {
    float(*sums)[Width] = all + t * Heads;
    Float kept[Heads][parts];
#pragma GCC unroll 16
    for (int h = 0; h < Heads; ++h)
#pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) kept[h][p] = Float::loadu(sums[h] + p * lanes);
    for (int j = 0; j < nums[t]; ++j) {
      fetch_next(values, j, j + 1);
      const T* value = values + place(first + j);
#pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) {
        const Float found = load(value, p);
#pragma GCC unroll 16
        for (int h = 0; h < Heads; ++h)
          kept[h][p] = at::vec::fmadd(Float(weights[t * Heads + h][j]), found, kept[h][p]);
      }
    }
#pragma GCC unroll 16
    for (int h = 0; h < Heads; ++h)
#pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) kept[h][p].store(sums[h] + p * lanes);
  }

#if defined(CPU_CAPABILITY_AVX512)
  // Columns from `at` of the values of two places, or of one, in pairs: in the order of
  // `_mm512_unpacklo_epi16` and `unpackhi`.
  __attribute__((always_inline)) static void pair_up(const T* one, const T* other, int at,
                                                     __m512i* low, __m512i* high) {
    const __m512i a = _mm512_loadu_si512(one + at);
    const __m512i b = other ? _mm512_loadu_si512(other + at) : _mm512_setzero_si512();
    *low = _mm512_unpacklo_epi16(a, b);
    *high = _mm512_unpackhi_epi16(a, b);
  }

  using Rounded = at::BFloat16[rows][block_size];

  // As `soften`, with weights as bf16, and zero for places that the row does not see.
  __attribute__((target("avx512bf16"))) void soften_pairs(int h, float unit, float* largest,
                                                          Float* total, float (*sums)[Width],
                                                          Rounded& rounded) const {
    constexpr int vectors = block_size / 16;
    const uint64_t seen = nums[h / Heads] < 64 ? (uint64_t{1} << nums[h / Heads]) - 1 : ~0ull;
    const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 scores[vectors], added = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int i = 0; i < vectors; ++i)
      scores[i] =
          _mm512_mask_load_ps(nothing, static_cast<__mmask16>(seen >> 16 * i), weights[h] + 16 * i);
    const Float found = at::vec::maximum(at::vec::maximum(Float(scores[0]), Float(scores[1])),
                                         at::vec::maximum(Float(scores[2]), Float(scores[3])));
    const float most = std::max(largest[h], _mm512_reduce_max_ps(found));
#pragma GCC unroll 4
    for (int i = 0; i < vectors; ++i) {
      scores[i] = power_of_two((scores[i] - most) * (unit * log2_of_e));
      added = _mm512_add_ps(added, scores[i]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < vectors; i += 2)
      _mm512_store_si512(rounded[h] + 16 * i,
                         (__m512i)_mm512_cvtne2ps_pbh(scores[i + 1], scores[i]));
    shrink(most, unit, largest + h, total + h, sums[h]);
    total[h] = total[h] + Float(added);
  }

  // Adds the weighted values of some rows from place `begin`, two places at a time.
  template <int Num>
  __attribute__((target("avx512bf16"))) void add_pairs(int num,
                                                       const at::BFloat16 (*rounded)[block_size],
                                                       int begin, float (*sums)[Width]) const {
    __m512 kept[Num][parts];
#pragma GCC unroll 16
    for (int h = 0; h < Num; ++h)
#pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) kept[h][p] = _mm512_loadu_ps(sums[h] + p * 16);
    for (int j = begin; j < num; j += 2) {
      if constexpr (Tokens == 1) fetch_next(values, j, j + 2);
      const T* one = values + place(first + j);
      const T* other = j + 1 < num ? values + place(first + j + 1) : nullptr;
#pragma GCC unroll 16
      for (int p = 0; p < parts; p += 2) {
        __m512i low, high;
        pair_up(one, other, p * 16, &low, &high);
#pragma GCC unroll 16
        for (int h = 0; h < Num; ++h) {
          int32_t both;
          std::memcpy(&both, rounded[h] + j, sizeof(both));
          const __m512bh weight = (__m512bh)_mm512_set1_epi32(both);
          kept[h][p] = _mm512_dpbf16_ps(kept[h][p], (__m512bh)low, weight);
          kept[h][p + 1] = _mm512_dpbf16_ps(kept[h][p + 1], (__m512bh)high, weight);
        }
      }
    }
#pragma GCC unroll 16
    for (int h = 0; h < Num; ++h)
#pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) _mm512_storeu_ps(sums[h] + p * 16, kept[h][p]);
  }

  // As `add_pairs` for every row, whose sums the registers hold for 32 columns at a time: the first
  // `num` places, an even number, laid out as a panel.
  __attribute__((target("avx512bf16"))) void add_panel(int num, const Rounded& rounded,
                                                       float (*sums)[Width]) const {
    alignas(64) __m512i panel[Width / 32][block_size / 2][2];
    for (int j = 0; j < num; j += run_size) {
      fetch_run(values, j);
      const T* from = run(values, j);
      for (int i = 0; i < std::min(run_size, num - j); i += 2, from += 2 * Width)
#pragma GCC unroll 16
        for (int p = 0; p < parts; p += 2) {
          __m512i* to = panel[p / 2][(j + i) / 2];
          pair_up(from, from + Width, p * 16, to, to + 1);
        }
    }
    for (int h = 0; h < rows; h += at_once)
      for (int p = 0; p < parts; p += 2) add_tile(num, panel[p / 2], rounded + h, sums + h, p * 16);
  }

  // Adds 32 columns of the weighted values of the rows of a tile.
  __attribute__((target("avx512bf16"))) static void add_tile(
      int num, const __m512i (*panel)[2], const at::BFloat16 (*rounded)[block_size],
      float (*sums)[Width], int column) {
    __m512 kept[at_once][2];
#pragma GCC unroll 16
    for (int h = 0; h < at_once; ++h)
#pragma GCC unroll 16
      for (int i = 0; i < 2; ++i) kept[h][i] = _mm512_loadu_ps(sums[h] + column + i * 16);
    for (int j = 0; j < num; j += 2) {
      const __m512bh low = (__m512bh)panel[j / 2][0];
      const __m512bh high = (__m512bh)panel[j / 2][1];
#pragma GCC unroll 16
      for (int h = 0; h < at_once; ++h) {
        int32_t both;
        std::memcpy(&both, rounded[h] + j, sizeof(both));
        const __m512bh weight = (__m512bh)_mm512_set1_epi32(both);
        kept[h][0] = _mm512_dpbf16_ps(kept[h][0], low, weight);
        kept[h][1] = _mm512_dpbf16_ps(kept[h][1], high, weight);
      }
    }
#pragma GCC unroll 16
    for (int h = 0; h < at_once; ++h)
#pragma GCC unroll 16
      for (int i = 0; i < 2; ++i) _mm512_storeu_ps(sums[h] + column + i * 16, kept[h][i]);
  }

  // Adds the weighted values of all tokens; what only some of them see, a token at a time, so that
  // nothing that a token does not see touches its sums.
  void add_all_pairs(const Rounded& rounded, float (*sums)[Width]) const {
    const int shared = Tokens > 1 ? nums[0] / 2 * 2 : 0;
    if constexpr (Tokens > 1) add_panel(shared, rounded, sums);
    for (int t = 0; t < Tokens; ++t)
      add_pairs<Heads>(nums[t], rounded + t * Heads, shared, sums + t * Heads);
  }
#endif
};

#if defined(CPU_CAPABILITY_AVX512)
// The sums of `Places::add_pairs`, in order.
template <int Width>
inline void put_in_order(float* sums) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int p = 0; p < Width; p += 32) {
    const __m512 a = _mm512_loadu_ps(sums + p), b = _mm512_loadu_ps(sums + p + 16);
    _mm512_storeu_ps(sums + p, _mm512_permutex2var_ps(a, low, b));
    _mm512_storeu_ps(sums + p + 16, _mm512_permutex2var_ps(a, high, b));
  }
}
#endif

}  // namespace llama_export
#endif
