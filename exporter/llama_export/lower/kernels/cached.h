// Attention of one token over cached keys and values.
//
// A block of places at a time: scores, their weights after the largest score so far, and the
// weighted sums of values. Where q, keys and values are bf16 and the CPU multiplies pairs of bf16,
// it does so; weights are then rounded to bf16 before they meet values, as the reference
// implementation does.
#ifndef LLAMA_EXPORT_ATTEND_CACHED
#define LLAMA_EXPORT_ATTEND_CACHED
namespace llama_export {

constexpr int block_size = 64;

// How many of the query heads that share a key/value head are taken together: as many as divide
// them and whose sums the registers hold.
constexpr int heads_at_once(int group, int width) {
  int heads = 12 * lanes / width;
  while (heads > 1 && group % heads) --heads;
  return heads > 1 ? heads : 1;
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

// Heads of one token over a block of places. `Place` says where place i begins.
template <typename T, int Heads, int Width, typename Place>
struct Places {
  static constexpr int parts = Width / lanes;
  const T *keys, *values;
  const Place& place;
  int64_t first, count;
  int num;
  alignas(64) float weights[Heads][block_size];  // scores before

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

  // From place `begin` of the block.
  void score(const float (*wanted)[Width], int begin) {
    for (int j = begin; j < num; ++j) {
      fetch_next(keys, j, j + 1);
      const T* key = keys + place(first + j);
      Float found[parts];
#pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) found[p] = load(key, p);
#pragma GCC unroll 16
      for (int h = 0; h < Heads; ++h) {
        Float dot = Float::loadu(wanted[h]) * found[0];
#pragma GCC unroll 16
        for (int p = 1; p < parts; ++p)
          dot = at::vec::fmadd(Float::loadu(wanted[h] + p * lanes), found[p], dot);
        weights[h][j] = sum_of(dot);
      }
    }
  }

  // As many as there are of twice 16 places; returns where it ended. Keys are laid out as a panel,
  // since a sum over the lanes of a vector for each score costs more. Also of one head, so that a
  // score does not depend on how many are taken together.
  template <typename Tile, int Words>
  int score_panels(const float* q) {
    int j = 0;
    for (; j + columns <= num; j += columns) {
      alignas(64) float panel[Words * columns];
      for (int side = 0; side < columns; side += 16) {
        fetch_next(keys, j + side, j + side + 16);
        const T* from = keys + place(first + j + side);
        for (int k = 0; k < Words; k += 16)
          at::vec::transpose_mxn<float, 16, 16>(reinterpret_cast<const float*>(from) + k, Words,
                                                panel + k * columns + side, columns);
      }
      Tile::template tile<Heads>(q, Words, panel, weights[0] + j, block_size);
    }
    return j;
  }

  // Scores become weights; the sums so far shrink where a larger score came.
  void soften(float* largest, float* total, float (*sums)[Width]) {
#pragma GCC unroll 16
    for (int h = 0; h < Heads; ++h) {
      float most = largest[h];
      for (int j = 0; j < num; ++j) most = std::max(most, weights[h][j]);
      for (int j = num; j % lanes; ++j) weights[h][j] = -std::numeric_limits<float>::infinity();
      Float added(0.0f);
      for (int j = 0; j < num; j += lanes) {
        const Float less = Float::loadu(weights[h] + j) - Float(most);
        const Float weight = std::is_same_v<T, float> ? less.exp() : less.exp_u20();
        weight.store(weights[h] + j);
        added = added + weight;
      }
      const float kept = std::exp(largest[h] - most);
      total[h] = total[h] * kept + sum_of(added);
      largest[h] = most;
#pragma GCC unroll 16
      for (int p = 0; p < Width; p += lanes)
        (Float::loadu(sums[h] + p) * Float(kept)).store(sums[h] + p);
    }
  }

  void add(float (*sums)[Width]) const {
    Float kept[Heads][parts];
#pragma GCC unroll 16
    for (int h = 0; h < Heads; ++h)
#pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) kept[h][p] = Float::loadu(sums[h] + p * lanes);
    for (int j = 0; j < num; ++j) {
      fetch_next(values, j, j + 1);
      const T* value = values + place(first + j);
#pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) {
        const Float found = load(value, p);
#pragma GCC unroll 16
        for (int h = 0; h < Heads; ++h)
          kept[h][p] = at::vec::fmadd(Float(weights[h][j]), found, kept[h][p]);
      }
    }
#pragma GCC unroll 16
    for (int h = 0; h < Heads; ++h)
#pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) kept[h][p].store(sums[h] + p * lanes);
  }

#if defined(CPU_CAPABILITY_AVX512)
  // Two places at a time; the sums' order is that of `_mm512_unpacklo_epi16` and `unpackhi`.
  __attribute__((target("avx512bf16"))) void add_pairs(float (*sums)[Width]) const {
    alignas(64) at::BFloat16 rounded[Heads][block_size];
    __m512 kept[Heads][parts];
#pragma GCC unroll 16
    for (int h = 0; h < Heads; ++h) {
      for (int j = 0; j < num; j += 16)
        _mm256_store_si256(reinterpret_cast<__m256i*>(rounded[h] + j),
                           (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(weights[h] + j)));
#pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) kept[h][p] = _mm512_loadu_ps(sums[h] + p * 16);
    }
    for (int j = 0; j < num; j += 2) {
      fetch_next(values, j, j + 2);
      const T* one = values + place(first + j);
      const T* other = j + 1 < num ? values + place(first + j + 1) : nullptr;
#pragma GCC unroll 16
      for (int p = 0; p < parts; p += 2) {
        const __m512i a = _mm512_loadu_si512(one + p * 16);
        const __m512i b = other ? _mm512_loadu_si512(other + p * 16) : _mm512_setzero_si512();
        const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a, b);
        const __m512bh high = (__m512bh)_mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 16
        for (int h = 0; h < Heads; ++h) {
          int32_t both;
          std::memcpy(&both, rounded[h] + j, sizeof(both));
          const __m512bh weight = (__m512bh)_mm512_set1_epi32(both);
          kept[h][p] = _mm512_dpbf16_ps(kept[h][p], low, weight);
          kept[h][p + 1] = _mm512_dpbf16_ps(kept[h][p + 1], high, weight);
        }
      }
    }
#pragma GCC unroll 16
    for (int h = 0; h < Heads; ++h)
#pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) _mm512_storeu_ps(sums[h] + p * 16, kept[h][p]);
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

// Attention of `Heads` query heads of one token that share a key/value head, block by block.
// `place(i)` is where place i of this head begins.
template <typename Q, typename T, int Heads, int Width, int Page>
struct Attention {
  static_assert(Width % 16 == 0);
  static constexpr bool has_panels = Page % 16 == 0;
#if defined(CPU_CAPABILITY_AVX512)
  static constexpr bool may_pair =
      std::is_same_v<Q, at::BFloat16> && std::is_same_v<T, at::BFloat16> && Width % 32 == 0;
  const bool has_pairs = may_pair && Pairs::is_there();
#endif
  const Q* q;
  float scale;
  alignas(64) float wanted[Heads][Width], sums[Heads][Width] = {};
  float largest[Heads], total[Heads] = {};

  Attention(const Q* q, float scale) : q(q), scale(scale) {
    for (int h = 0; h < Heads; ++h) {
      for (int d = 0; d < Width; ++d) wanted[h][d] = static_cast<float>(q[h * Width + d]) * scale;
      largest[h] = -std::numeric_limits<float>::infinity();
    }
  }

  // Takes the places from `first`, one block of all `count`.
  template <typename Place>
  void take(const T* keys, const T* values, int64_t first, int64_t count, const Place& place) {
    const int num = static_cast<int>(std::min<int64_t>(block_size, count - first));
    Places<T, Heads, Width, Place> block{keys, values, place, first, count, num};
    if (first == 0) {
      block.fetch(keys, 0, block_size);
      block.fetch(values, 0, block_size);
    }
    int begin = 0;
    if constexpr (has_panels && std::is_same_v<T, float>)
      begin = block.template score_panels<Floats, Width>(wanted[0]);
#if defined(CPU_CAPABILITY_AVX512)
    if constexpr (has_panels && may_pair) {
      if (has_pairs) {
        begin = block.template score_panels<Pairs, Width / 2>(reinterpret_cast<const float*>(q));
        for (int h = 0; h < Heads; ++h)
          for (int j = 0; j < begin; j += lanes)
            (Float::loadu(block.weights[h] + j) * Float(scale)).store(block.weights[h] + j);
      }
    }
#endif
    block.score(wanted, begin);
    block.soften(largest, total, sums);
#if defined(CPU_CAPABILITY_AVX512)
    if constexpr (may_pair) {
      if (has_pairs) return block.add_pairs(sums);
    }
#endif
    block.add(sums);
  }

  void finish(float* out) {
    for (int h = 0; h < Heads; ++h) {
#if defined(CPU_CAPABILITY_AVX512)
      if constexpr (may_pair) {
        if (has_pairs) put_in_order<Width>(sums[h]);
      }
#endif
      for (int p = 0; p < Width; p += lanes)
        (Float::loadu(sums[h] + p) / Float(total[h])).store(out + h * Width + p);
    }
  }
};

// Attention of the query heads `first_head` to `last_head` of one token over `count` places. Heads
// take turns block by block, since the keys of a page lie together. `page(i, k)` is where the i-th
// page begins of key/value head k, which `Group` query heads share; `Heads` of them are taken
// together.
template <int Heads, int Width, int Page, int Group, typename Q, typename T, typename PageOf>
inline void attend(const Q* q, const T* keys, const T* values, int first_head, int last_head,
                   int64_t count, float scale, const PageOf& page, float* out) {
  std::vector<Attention<Q, T, Heads, Width, Page>> heads;
  heads.reserve((last_head - first_head) / Heads);
  for (int h = first_head; h < last_head; h += Heads) heads.emplace_back(q + h * Width, scale);
  for (int64_t first = 0; first < count; first += block_size)
    for (int i = 0; i < static_cast<int>(heads.size()); ++i) {
      const int shared = (first_head + i * Heads) / Group;
      heads[i].take(keys, values, first, count,
                    [&](int64_t j) { return page(j / Page, shared) + j % Page * Width; });
    }
  for (int i = 0; i < static_cast<int>(heads.size()); ++i)
    heads[i].finish(out + (first_head + i * Heads) * Width);
}

}  // namespace llama_export
#endif
