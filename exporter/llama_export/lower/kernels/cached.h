// Attention of one token over cached keys and values.
#ifndef LLAMA_EXPORT_ATTEND_CACHED
#define LLAMA_EXPORT_ATTEND_CACHED
namespace llama_export {

// How many of the query heads that share a key/value head are taken together: as many as divide
// them and whose sums the registers hold.
constexpr int heads_at_once(int group, int width) {
  int heads = 12 * lanes / width;
  while (heads > 1 && group % heads) --heads;
  return heads > 1 ? heads : 1;
}

// Scores of `Heads` query heads with the two times 16 keys that begin at `first` and `second`. Keys
// are laid out as a panel, since a sum over the lanes of a vector for each score costs more. Also
// of one head, so that a score does not depend on how many are taken together.
template <typename Tile, int Heads, int Words>
inline void score(const float* q, const float* first, const float* second, float* scores,
                  int64_t stride) {
  alignas(64) float panel[Words * columns];
  for (int k = 0; k < Words; k += 16) {
    at::vec::transpose_mxn<float, 16, 16>(first + k, Words, panel + k * columns, columns);
    at::vec::transpose_mxn<float, 16, 16>(second + k, Words, panel + k * columns + 16, columns);
  }
  Tile::template tile<Heads>(q, Words, panel, scores, stride);
}

// Attention of `Heads` query heads of one token that share a key/value head, over `count` places.
// `page(i)` is where the i-th page of this head begins.
template <typename Q, typename T, int Heads, int Width, int Page, typename PageOf>
inline void attend(const Q* q, const T* keys, const T* values, int64_t count, float scale,
                   const PageOf& page, float* out) {
  constexpr int parts = Width / lanes;
  constexpr int loads = at::vec::Vectorized<T>::size() / lanes;  // vectors of floats in one of T
  constexpr int block = 64;
  static_assert(Width % 16 == 0);
  const auto place = [&](int64_t i) { return page(i / Page) + i % Page * Width; };
  const auto load = [](const T* from, int part) {
    if constexpr (std::is_same_v<T, float>)
      return Float::loadu(from + part * lanes);
    else if constexpr (loads == 2 && parts % 2 == 0) {
      const at::vec::VectorizedN<float, 2> both = at::vec::convert<float, 2, T, 1>(
          at::vec::VectorizedN<T, 1>(at::vec::Vectorized<T>::loadu(from + part / 2 * 2 * lanes)));
      return both[part % 2];
    } else {
      const at::vec::VectorizedN<float, loads> some = at::vec::convert<float, loads, T, 1>(
          at::vec::VectorizedN<T, 1>(at::vec::Vectorized<T>::loadu(from + part * lanes, lanes)));
      return some[0];
    }
  };
  Float wanted[Heads][parts], sums[Heads][parts];
  float largest[Heads], total[Heads];
  alignas(64) float scaled[Heads][Width];
#pragma GCC unroll 16
  for (int h = 0; h < Heads; ++h) {
    for (int d = 0; d < Width; ++d) scaled[h][d] = static_cast<float>(q[h * Width + d]) * scale;
#pragma GCC unroll 16
    for (int p = 0; p < parts; ++p) {
      wanted[h][p] = Float::loadu(scaled[h] + p * lanes);
      sums[h][p] = Float(0.0f);
    }
    largest[h] = -std::numeric_limits<float>::infinity();
    total[h] = 0.0f;
  }
  alignas(64) float weights[Heads][block];
  for (int64_t first = 0; first < count; first += block) {
    const int num = static_cast<int>(std::min<int64_t>(block, count - first));
    int j = 0;
#if defined(CPU_CAPABILITY_AVX512)
    if constexpr (std::is_same_v<Q, at::BFloat16> && std::is_same_v<T, at::BFloat16> &&
                  Width % 32 == 0 && Page % 16 == 0) {
      const auto words = [&](int64_t i) { return reinterpret_cast<const float*>(keys + place(i)); };
      for (; Pairs::is_there() && j + columns <= num; j += columns) {
        score<Pairs, Heads, Width / 2>(reinterpret_cast<const float*>(q), words(first + j),
                                       words(first + j + 16), weights[0] + j, block);
        for (int h = 0; h < Heads; ++h)
          for (int i = j; i < j + columns; i += lanes)
            (Float::loadu(weights[h] + i) * Float(scale)).store(weights[h] + i);
      }
    }
#endif
    if constexpr (std::is_same_v<Q, float> && std::is_same_v<T, float> && Page % 16 == 0) {
      for (; j + columns <= num; j += columns)
        score<Floats, Heads, Width>(scaled[0], keys + place(first + j),
                                    keys + place(first + j + 16), weights[0] + j, block);
    }
    for (; j < num; ++j) {
      const T* key = keys + place(first + j);
      Float found[parts];
#pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) found[p] = load(key, p);
#pragma GCC unroll 16
      for (int h = 0; h < Heads; ++h) {
        Float dot = wanted[h][0] * found[0];
#pragma GCC unroll 16
        for (int p = 1; p < parts; ++p) dot = at::vec::fmadd(wanted[h][p], found[p], dot);
        weights[h][j] = sum_of(dot);
      }
    }
#pragma GCC unroll 16
    for (int h = 0; h < Heads; ++h) {
      float most = largest[h];
      for (int i = 0; i < num; ++i) most = std::max(most, weights[h][i]);
      for (int i = num; i % lanes; ++i) weights[h][i] = -std::numeric_limits<float>::infinity();
      Float added(0.0f);
      for (int i = 0; i < num; i += lanes) {
        const Float weight = (Float::loadu(weights[h] + i) - Float(most)).exp();
        weight.store(weights[h] + i);
        added = added + weight;
      }
      const float kept = std::exp(largest[h] - most);
      total[h] = total[h] * kept + sum_of(added);
      largest[h] = most;
#pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) sums[h][p] = sums[h][p] * Float(kept);
    }
    for (j = 0; j < num; ++j) {
      const T* value = values + place(first + j);
#pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) {
        const Float found = load(value, p);
#pragma GCC unroll 16
        for (int h = 0; h < Heads; ++h)
          sums[h][p] = at::vec::fmadd(Float(weights[h][j]), found, sums[h][p]);
      }
    }
  }
#pragma GCC unroll 16
  for (int h = 0; h < Heads; ++h)
#pragma GCC unroll 16
    for (int p = 0; p < parts; ++p)
      (sums[h][p] / Float(total[h])).store(out + h * Width + p * lanes);
}

}  // namespace llama_export
#endif
