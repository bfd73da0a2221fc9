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
  float scale;
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

  // Takes the block of places from `first`; the first token sees `least` places.
  template <typename Place>
  void take(const T* keys, const T* values, int64_t first, int64_t least, const Place& place) {
    Places<T, Heads, Tokens, Width, Place> block(keys, values, place, first, least);
    if (first == 0) {
      block.fetch(keys, 0, block_size);
      block.fetch(values, 0, block_size);
    }
    const float unit = score(block);
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

  // Returns what the scores have to be multiplied by.
  template <typename Block>
  float score(Block& block) {
#if defined(CPU_CAPABILITY_AVX512)
    if constexpr (has_panels && may_pair) {
      if (has_pairs) {
        block.template score_panels<Pairs, Width / 2>(reinterpret_cast<const float*>(q[0]));
        return scale;
      }
    }
#endif
    if constexpr (has_panels && std::is_same_v<T, float>)
      block.template score_panels<Floats, Width>(wanted[0]);
    else
      for (int t = 0; t < Tokens; ++t) block.score(wanted, t);
    return 1.0f;
  }

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

// Attention of the query heads `first_head` to `last_head` of `Tokens` tokens of a row that follow
// each other, `stride` apart in q and `out`; the first of them sees `least` places. Heads take
// turns block by block, since the keys of a page lie together. `page(i, k)` is where the i-th page
// begins of key/value head k, which `Group` query heads share; `Heads` of them are taken together.
template <int Heads, int Tokens, int Width, int Page, int Group, typename Q, typename T,
          typename PageOf>
inline void attend(const Q* q, const T* keys, const T* values, int first_head, int last_head,
                   int64_t stride, int64_t least, float scale, const PageOf& page, float* out) {
  std::vector<Attention<Q, T, Heads, Tokens, Width, Page>> heads;
  heads.reserve((last_head - first_head) / Heads);
  for (int h = first_head; h < last_head; h += Heads)
    heads.emplace_back(q + h * Width, stride, scale);
  for (int64_t first = 0; first < least + Tokens - 1; first += block_size)
    for (int i = 0; i < static_cast<int>(heads.size()); ++i) {
      const int shared = (first_head + i * Heads) / Group;
      heads[i].take(keys, values, first, least,
                    [&](int64_t j) { return page(j / Page, shared) + j % Page * Width; });
    }
  for (int i = 0; i < static_cast<int>(heads.size()); ++i)
    heads[i].finish(out + (first_head + i * Heads) * Width, stride);
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
