// Attention of tokens over cached keys and values, block by block.
#ifndef LLAMA_EXPORT_ATTEND_CACHED
#define LLAMA_EXPORT_ATTEND_CACHED
namespace llama_export {

// Attention of `Heads` query heads that share a key/value head, of `Tokens` tokens of a row that
// follow each other, block by block. `place(i)` is where place i of this head begins.
template <typename Q, typename T, int Heads, int Tokens, int Width, int Page>
struct Attention {
  static_assert(Width % 16 == 0);
  static constexpr int rows = Heads * Tokens;
  static constexpr bool has_panels = Page % run_size == 0;
#if defined(CPU_CAPABILITY_AVX512)
  static constexpr bool may_pair =
      std::is_same_v<Q, at::BFloat16> && std::is_same_v<T, at::BFloat16> && Width % 32 == 0;
  const bool has_pairs = may_pair && Pairs::is_there();
#else
  static constexpr bool has_pairs = false;
#endif
  const float scale;
  const float unit = has_pairs && has_panels ? scale : 1.0f;  // of scores
  alignas(64) Q q[rows][Width];
  alignas(64) float wanted[rows][Width], sums[rows][Width] = {};
  float largest[rows];
  Float total[rows];

  // `stride` lies between two tokens of q.
  Attention(const Q* from, int64_t stride, float scale) : scale(scale) {
    for (int h = 0; h < rows; ++h) {
      std::copy_n(from + h / Heads * stride + h % Heads * Width, Width, q[h]);
      for (int d = 0; d < Width && !(has_pairs && has_panels); ++d)
        wanted[h][d] = static_cast<float>(q[h][d]) * scale;
      largest[h] = -std::numeric_limits<float>::infinity();
      total[h] = Float(0.0f);
    }
  }

  // Takes the block of places from `first`, fetched before if it is not the first one; the first
  // token sees `least` places.
  template <typename Place>
  void take(const T* keys, const T* values, int64_t first, int64_t least, const Place& place,
            bool is_first) {
    Places<T, Heads, Tokens, Width, Place> block(keys, values, place, first, least);
    if (is_first) {
      block.fetch(keys, first, first + block_size);
      block.fetch(values, first, first + block_size);
    }
    score(block);
#if defined(CPU_CAPABILITY_AVX512)
    if constexpr (may_pair) {
      if (has_pairs) {
        alignas(64) at::BFloat16 rounded[rows][block_size];
        for (int h = 0; h < rows; ++h)
          if (block.nums[h / Heads] > 0) block.soften_pairs(h, unit, largest, total, sums, rounded);
        return block.add_all_pairs(rounded, sums);
      }
    }
#endif
    for (int h = 0; h < rows; ++h)
      if (block.nums[h / Heads] > 0) block.soften(h, unit, largest, total, sums);
    for (int t = 0; t < Tokens; ++t) block.add(t, sums);
  }

  template <typename Block>
  void score(Block& block) {
#if defined(CPU_CAPABILITY_AVX512)
    if constexpr (has_panels && may_pair) {
      if (has_pairs) {
        return block.template score_panels<Pairs, Width / 2>(reinterpret_cast<const float*>(q[0]));
      }
    }
#endif
    if constexpr (has_panels && std::is_same_v<T, float>)
      block.template score_panels<Floats, Width>(wanted[0]);
    else
      for (int t = 0; t < Tokens; ++t) block.score(wanted, t);
  }

  // The logarithm of a row's sum of weights.
  float log_sum(int h) const { return largest[h] * unit + std::log(sum_of(total[h])); }

  // `stride` lies between two tokens of `out`.
  void finish(float* out, int64_t stride) {
    for (int h = 0; h < rows; ++h) {
#if defined(CPU_CAPABILITY_AVX512)
      if constexpr (may_pair) {
        if (has_pairs) put_in_order<Width>(sums[h]);
      }
#endif
      float* to = out + h / Heads * stride + h % Heads * Width;
      const Float sum(sum_of(total[h]));
      for (int p = 0; p < Width; p += lanes) (Float::loadu(sums[h] + p) / sum).store(to + p);
    }
  }
};

// Attention of `num_heads` query heads of `Tokens` tokens of a row that follow each other, `stride`
// apart in q and `out`; the first of them sees `least` places. Heads take turns block by block,
// since the keys of a page lie together. `page(i, k)` is where the i-th page begins of key/value
// head k, which `Group` query heads share; `Heads` of them are taken together.
template <int Heads, int Tokens, int Width, int Page, int Group, typename Q, typename T,
          typename PageOf>
inline void attend(const Q* q, const T* keys, const T* values, int num_heads, int64_t stride,
                   int64_t least, float scale, const PageOf& page, float* out) {
  std::vector<Attention<Q, T, Heads, Tokens, Width, Page>> heads;
  heads.reserve(num_heads / Heads);
  for (int h = 0; h < num_heads; h += Heads) heads.emplace_back(q + h * Width, stride, scale);
  for (int64_t first = 0; first < least + Tokens - 1; first += block_size)
    for (int i = 0; i < static_cast<int>(heads.size()); ++i) {
      const int shared = i * Heads / Group;
      const auto place = [&](int64_t j) { return page(j / Page, shared) + j % Page * Width; };
      heads[i].take(keys, values, first, least, place, first == 0);
    }
  for (int i = 0; i < static_cast<int>(heads.size()); ++i)
    heads[i].finish(out + i * Heads * Width, stride);
}

// The places that a token sees, in parts of whole blocks that threads take: up to 16 of them.
struct Parts {
  int64_t count, size;

  explicit Parts(int64_t count)
      : count(count),
        size(std::max<int64_t>(2, (count + 16 * block_size - 1) / (16 * block_size)) * block_size) {
  }

  int64_t num() const { return (count + size - 1) / size; }
};

// Attention of `Heads` query heads of one token over some part of the places that it sees:
// out [Heads, Width], and for each head the logarithm of its sum of weights.
template <int Heads, int Width, int Page, typename Q, typename T, typename Place>
inline void attend_part(const Q* q, const T* keys, const T* values, const Parts& parts,
                        int64_t part, float scale, const Place& place, float* out, float* logs) {
  Attention<Q, T, Heads, 1, Width, Page> some(q, 0, scale);
  const int64_t begin = part * parts.size, end = std::min(begin + parts.size, parts.count);
  for (int64_t first = begin; first < end; first += block_size)
    some.take(keys, values, first, parts.count, place, first == begin);
  some.finish(out, 0);
  for (int h = 0; h < Heads; ++h) logs[h] = some.log_sum(h);
}

// What some parts [num, Heads, Width] make together (as in flash-decoding, Dao et al. 2023).
template <int Heads, int Width>
inline void put_together(const float* parts, const float* logs, int64_t num, float* out) {
  for (int h = 0; h < Heads; ++h) {
    float most = logs[h], total = 0.0f;
    for (int64_t i = 1; i < num; ++i) most = std::max(most, logs[i * Heads + h]);
    Float sums[Width / lanes];
    for (Float& sum : sums) sum = Float(0.0f);
    for (int64_t i = 0; i < num; ++i) {
      const float weight = std::exp(logs[i * Heads + h] - most);
      total += weight;
      for (int p = 0; p < Width / lanes; ++p)
        sums[p] = at::vec::fmadd(
            Float(weight), Float::loadu(parts + (i * Heads + h) * Width + p * lanes), sums[p]);
    }
    for (int p = 0; p < Width / lanes; ++p)
      (sums[p] / Float(total)).store(out + h * Width + p * lanes);
  }
}

// Attention of tokens [num, num_heads, Width], each token, `Heads` of its heads and part of its
// places for itself. `page(p, i, k)` is where the i-th page of token p begins of key/value head k.
template <int Heads, int Width, int Page, int Group, typename Q, typename T, typename PageOf>
inline void attend_few(const Q* q, const T* keys, const T* values, const int32_t* positions,
                       int64_t num, int num_heads, float scale, const PageOf& page, float* out) {
  struct Piece {
    int64_t token, part;
    int head;
  };
  std::vector<Piece> work;
  for (int64_t p = 0; p < num; ++p)
    for (int h = 0; h < num_heads; h += Heads)
      for (int64_t i = 0; i < Parts(positions[p] + 1).num(); ++i) work.push_back({p, i, h});
  std::vector<float> parts(work.size() * Heads * Width), logs(work.size() * Heads);
#pragma omp parallel for schedule(dynamic, 1)
  for (size_t i = 0; i < work.size(); ++i) {
    const auto [p, part, h] = work[i];
    const int shared = h / Group;
    const auto place = [&](int64_t j) { return page(p, j / Page, shared) + j % Page * Width; };
    attend_part<Heads, Width, Page>(q + (p * num_heads + h) * Width, keys, values,
                                    Parts(positions[p] + 1), part, scale, place,
                                    parts.data() + i * Heads * Width, logs.data() + i * Heads);
  }
  for (size_t i = 0; i < work.size();) {
    const auto [p, part, h] = work[i];
    const int64_t num_parts = Parts(positions[p] + 1).num();
    put_together<Heads, Width>(parts.data() + i * Heads * Width, logs.data() + i * Heads, num_parts,
                               out + (p * num_heads + h) * Width);
    i += num_parts;
  }
}

// Where pieces of work begin among tokens: `Tokens` of a row that follow each other, or one.
template <int Tokens>
inline std::vector<int64_t> pieces(const int32_t* rows, const int32_t* positions, int64_t num) {
  std::vector<int64_t> starts;
  for (int64_t p = 0; p < num;) {
    starts.push_back(p);
    int64_t end = p + 1;
    while (end < std::min(p + Tokens, num) && rows[end] == rows[p] &&
           positions[end] == positions[p] + (end - p))
      ++end;
    p = end == p + Tokens ? end : p + 1;
  }
  starts.push_back(num);
  return starts;
}

}  // namespace llama_export
#endif
