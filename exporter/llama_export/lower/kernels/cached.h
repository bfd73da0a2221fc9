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

// Attention of `Heads` query heads of one token that share a key/value head, over `count` places.
// `page(i)` is where the i-th page of this head begins.
template <typename Q, typename T, int Heads, int Width, int Page, typename PageOf>
inline void attend(const Q* q, const T* keys, const T* values, int64_t count, float scale,
                   const PageOf& page, float* out) {
  constexpr int parts = Width / lanes;
  constexpr int loads = at::vec::Vectorized<T>::size() / lanes;  // vectors of floats in one of T
  constexpr int block = Page < 64 ? Page : 64;
  static_assert(Width % 16 == 0);
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
#pragma GCC unroll 16
  for (int h = 0; h < Heads; ++h) {
    alignas(64) float scaled[Width];
    for (int d = 0; d < Width; ++d) scaled[d] = static_cast<float>(q[h * Width + d]) * scale;
#pragma GCC unroll 16
    for (int p = 0; p < parts; ++p) {
      wanted[h][p] = Float::loadu(scaled + p * lanes);
      sums[h][p] = Float(0.0f);
    }
    largest[h] = -std::numeric_limits<float>::infinity();
    total[h] = 0.0f;
  }
  alignas(64) float weights[Heads][64];
  int num = 0;
  for (int64_t first = 0; first < count; first += num) {
    const int64_t offset = page(first / Page) + first % Page * Width;
    num = static_cast<int>(std::min<int64_t>({block, count - first, Page - first % Page}));
    for (int j = 0; j < num; ++j) {
      const T* key = keys + offset + j * Width;
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
      for (int j = 0; j < num; ++j) most = std::max(most, weights[h][j]);
      for (int j = num; j % lanes; ++j) weights[h][j] = -std::numeric_limits<float>::infinity();
      Float added(0.0f);
      for (int j = 0; j < num; j += lanes) {
        const Float weight = (Float::loadu(weights[h] + j) - Float(most)).exp();
        weight.store(weights[h] + j);
        added = added + weight;
      }
      const float kept = std::exp(largest[h] - most);
      total[h] = total[h] * kept + sum_of(added);
      largest[h] = most;
#pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) sums[h][p] = sums[h][p] * Float(kept);
    }
    for (int j = 0; j < num; ++j) {
      const T* value = values + offset + j * Width;
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
