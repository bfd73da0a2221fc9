// Products of rows of x with stored weights, each row of a weight read once.
//
// Up to `few` rows of x are multiplied as dot products, with some rows of the weight at a time that
// lie far from each other: the memory serves several streams faster than one. More of them share
// the work of laying 32 rows of the weight out as a panel, in which the numbers that one vector
// instruction needs lie side by side.
#ifndef LLAMA_EXPORT_PRODUCTS
#define LLAMA_EXPORT_PRODUCTS
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

namespace llama_export {

constexpr int few = 3;
constexpr int columns = 32;  // rows of a weight in a panel
constexpr int parts = columns / lanes;

// A result Y is float32, or what a float32 is rounded to.

// y[m * total + i * far] = row i * far of a weight [.., width] times row m of x [Num, width], for
// `Streams` of i.
template <typename W, int Num, int Streams, typename Y>
inline void dot(const float* x, const W* w, int64_t width, int64_t far, Y* y, int64_t total) {
  constexpr int64_t step = at::vec::Vectorized<W>::size();
  constexpr int loads = step / lanes;
  Float sums[Streams][Num][loads];
// Unrolled, since sums that stay an array stay in memory.
#pragma GCC unroll 8
  for (int i = 0; i < Streams; ++i)
#pragma GCC unroll 8
    for (int m = 0; m < Num; ++m)
#pragma GCC unroll 8
      for (int p = 0; p < loads; ++p) sums[i][m][p] = Float(0.0f);
  int64_t k = 0;
  for (; k + step <= width; k += step) {
#pragma GCC unroll 8
    for (int i = 0; i < Streams; ++i) {
      fetch_once(w + i * far * width + k);
      const at::vec::VectorizedN<float, loads> weights = at::vec::convert<float, loads, W, 1>(
          at::vec::VectorizedN<W, 1>(at::vec::Vectorized<W>::loadu(w + i * far * width + k)));
#pragma GCC unroll 8
      for (int m = 0; m < Num; ++m)
#pragma GCC unroll 8
        for (int p = 0; p < loads; ++p)
          sums[i][m][p] = at::vec::fmadd(weights[p], Float::loadu(x + m * width + k + p * lanes),
                                         sums[i][m][p]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < Num; ++m) {
    Float found[Streams];
#pragma GCC unroll 8
    for (int i = 0; i < Streams; ++i) {
      found[i] = sums[i][m][0];
#pragma GCC unroll 8
      for (int p = 1; p < loads; ++p) found[i] = found[i] + sums[i][m][p];
      for (int64_t j = k; j < width; ++j) {
        const float rest[lanes] = {x[m * width + j] * static_cast<float>(w[i * far * width + j])};
        found[i] = found[i] + Float::loadu(rest);
      }
    }
    put_sums(found, y + m * total, far);
  }
}

#if defined(CPU_CAPABILITY_AVX512)
// Adds `some` 32 products of each row to its sums.
template <int Num, int Streams>
__attribute__((target("avx512bf16"), always_inline)) inline void add_pairs(
    const at::BFloat16* x, const at::BFloat16* w, int64_t width, int64_t far, __mmask32 some,
    __m512 (&sums)[Streams][Num]) {
  __m512bh given[Num];
#pragma GCC unroll 8
  for (int m = 0; m < Num; ++m) given[m] = (__m512bh)_mm512_maskz_loadu_epi16(some, x + m * width);
#pragma GCC unroll 8
  for (int i = 0; i < Streams; ++i) {
    fetch_once(w + i * far * width);
    const auto weights = (__m512bh)_mm512_maskz_loadu_epi16(some, w + i * far * width);
#pragma GCC unroll 8
    for (int m = 0; m < Num; ++m) sums[i][m] = _mm512_dpbf16_ps(sums[i][m], given[m], weights);
  }
}

// `dot` of bf16, on CPUs that multiply it in pairs.
template <int Num, int Streams, typename Y>
__attribute__((target("avx512bf16"))) inline void dot_pairs(const at::BFloat16* x,
                                                            const at::BFloat16* w, int64_t width,
                                                            int64_t far, Y* y, int64_t total) {
  __m512 sums[Streams][Num];
#pragma GCC unroll 8
  for (int i = 0; i < Streams; ++i)
#pragma GCC unroll 8
    for (int m = 0; m < Num; ++m) sums[i][m] = _mm512_setzero_ps();
  int64_t k = 0;
  for (; k + 32 <= width; k += 32) add_pairs(x + k, w + k, width, far, ~__mmask32{0}, sums);
  if (k < width) add_pairs(x + k, w + k, width, far, (__mmask32{1} << (width - k)) - 1, sums);
#pragma GCC unroll 8
  for (int m = 0; m < Num; ++m) {
    Float found[Streams];
#pragma GCC unroll 8
    for (int i = 0; i < Streams; ++i) found[i] = sums[i][m];
    put_sums(found, y + m * total, far);
  }
}
#endif

// Lays `here` rows [words] of 32 bits out as a panel [words, columns]; what is missing is zero.
inline void lay_out(const float* rows, int64_t words, int64_t here, float* panel) {
  const int64_t whole = here == columns ? words / side * side : 0;
  for (int first = 0; first < columns; first += side)
    for (int64_t k = 0; k < whole; k += side)
      turn(rows + first * words + k, words, panel + k * columns + first, columns);
  for (int64_t k = whole; k < words; ++k)
    for (int64_t i = 0; i < columns; ++i)
      panel[k * columns + i] = i < here ? rows[i * words + k] : 0.0f;
}

// Memory that is read soon. Tiles fetch it while they are computed, some lines at a time, as the
// one stream that many rows are not.
struct Ahead {
  static constexpr int64_t line = 64;
  const char* next = nullptr;
  int64_t num_bytes = 0;

  // A share for one of so many tiles of so many words: `num_bytes` for each `side` of them.
  Ahead share(int64_t tile, int64_t tiles, int64_t words) const {
    const int64_t lines = (num_bytes / line + tiles - 1) / tiles;
    const int64_t pieces = (words + side - 1) / side;
    return {next + tile * lines * line, (lines + pieces - 1) / pieces * line};
  }

  // Inlined, since GCC takes out calls of a function that does nothing but this.
  __attribute__((always_inline)) void fetch() {
    for (int64_t i = 0; i < num_bytes; i += line) __builtin_prefetch(next + i, 0, 2);
    next += num_bytes;
  }
};

// Tiles of some rows of x times a panel: y[m * stride + i]. Each `side` words, some of `ahead` is
// fetched.

// A word is a float.
struct Floats {
  static constexpr int max_rows = lanes == 16 ? 12 : 3;
  template <typename Y>
  static constexpr bool has_result = std::is_same_v<Y, float>;

  template <int Num>
  static void tile(const float* x, int64_t words, const float* panel, float* y, int64_t stride,
                   Ahead ahead = {}) {
    Float sums[Num][parts];
#pragma GCC unroll 16
    for (int m = 0; m < Num; ++m)
#pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) sums[m][p] = Float(0.0f);
    for (int64_t k = 0; k < words; ++k) {
      if (k % side == 0) ahead.fetch();
      Float weights[parts];
#pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) weights[p] = Float::loadu(panel + k * columns + p * lanes);
#pragma GCC unroll 16
      for (int m = 0; m < Num; ++m)
#pragma GCC unroll 16
        for (int p = 0; p < parts; ++p)
          sums[m][p] = at::vec::fmadd(Float(x[m * words + k]), weights[p], sums[m][p]);
    }
#pragma GCC unroll 16
    for (int m = 0; m < Num; ++m)
#pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) sums[m][p].store(y + m * stride + p * lanes);
  }
};

#if defined(CPU_CAPABILITY_AVX512)
// A word is two bf16, which some CPUs multiply in pairs.
struct Pairs {
  static constexpr int max_rows = 12;
  template <typename Y>
  static constexpr bool has_result = std::is_same_v<Y, float> || std::is_same_v<Y, at::BFloat16>;

  static bool is_there() {
    static const bool found = __builtin_cpu_supports("avx512bf16");
    return found;
  }

  template <int Num, typename Y>
  __attribute__((target("avx512bf16"))) static void tile(const float* x, int64_t words,
                                                         const float* panel, Y* y, int64_t stride,
                                                         Ahead ahead = {}) {
    __m512 sums[Num][2];
#pragma GCC unroll 16
    for (int m = 0; m < Num; ++m) sums[m][0] = sums[m][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < words; ++k) {
      if (k % side == 0) ahead.fetch();
      const __m512bh low = (__m512bh)_mm512_load_ps(panel + k * columns);
      const __m512bh high = (__m512bh)_mm512_load_ps(panel + k * columns + 16);
#pragma GCC unroll 16
      for (int m = 0; m < Num; ++m) {
        const __m512bh both = (__m512bh)_mm512_set1_ps(x[m * words + k]);
        sums[m][0] = _mm512_dpbf16_ps(sums[m][0], low, both);
        sums[m][1] = _mm512_dpbf16_ps(sums[m][1], high, both);
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < Num; ++m) {
      if constexpr (std::is_same_v<Y, float>) {
        _mm512_storeu_ps(y + m * stride, sums[m][0]);
        _mm512_storeu_ps(y + m * stride + 16, sums[m][1]);
      } else {
        _mm512_storeu_si512(y + m * stride, (__m512i)_mm512_cvtne2ps_pbh(sums[m][1], sums[m][0]));
      }
    }
  }
};
#endif

template <typename Tile, int Num, typename Y>
inline void tile(int64_t num, const float* x, int64_t words, const float* panel, Y* y,
                 int64_t stride, Ahead ahead) {
  if (num == Num) return Tile::template tile<Num>(x, words, panel, y, stride, ahead);
  if constexpr (Num > 1) tile<Tile, Num - 1>(num, x, words, panel, y, stride, ahead);
}

// All rows of x [num, words] times a panel, of which `here` columns are wanted.
template <typename Tile, typename Y>
inline void multiply(const float* x, int64_t num, int64_t words, const float* panel, int64_t here,
                     Y* y, int64_t total, const Ahead& ahead) {
  float edge[Tile::max_rows * columns];
  const int64_t tiles = (num + Tile::max_rows - 1) / Tile::max_rows;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t first = num * t / tiles, size = num * (t + 1) / tiles - first;
    const Ahead share = ahead.share(t, tiles, words);
    if constexpr (Tile::template has_result<Y>) {
      if (here == columns) {
        tile<Tile, Tile::max_rows>(size, x + first * words, words, panel, y + first * total, total,
                                   share);
        continue;
      }
    }
    tile<Tile, Tile::max_rows>(size, x + first * words, words, panel, edge, columns, share);
    for (int64_t m = 0; m < size; ++m)
      at::vec::convert(edge + m * columns, y + (first + m) * total, here);
  }
}

// Rows of x [num, width], also as float32 where a product needs them so.
template <typename X>
struct Given {
  const X* x;
  int64_t num, width;
  bool has_pairs = false;
  std::vector<float> kept;
  const float* wide = nullptr;

  // `has_bf16`: weights of bf16, or decoded to it, which are multiplied in pairs where that is
  // there.
  Given(const X* x, int64_t num, int64_t width, bool has_bf16) : x(x), num(num), width(width) {
#if defined(CPU_CAPABILITY_AVX512)
    has_pairs = std::is_same_v<X, at::BFloat16> && has_bf16 && width % 2 == 0 && Pairs::is_there();
#endif
    if (has_pairs) return;
    if constexpr (std::is_same_v<X, float>) {
      wide = x;
    } else {
      kept.resize(num * width);
      at::vec::convert(x, kept.data(), num * width);
      wide = kept.data();
    }
  }

  const float* pairs() const { return reinterpret_cast<const float*>(x); }
};

// The `block`-th share of the rows of a weight: `columns` of them, in `streams` parts that lie as
// far from each other as they can; calls `dots(first, far)` for each of a part, or `rest(row)`.
constexpr int streams = 4;
template <typename Dots, typename Rest>
inline void spread(int64_t num_rows, int64_t block, const Dots& dots, const Rest& rest) {
  constexpr int64_t each = columns / streams;
  const int64_t far = num_rows / columns * each;
  if (block < num_rows / columns)
    for (int64_t i = block * each; i < (block + 1) * each; ++i) dots(i, far);
  else
    for (int64_t i = far * streams; i < num_rows; ++i) rest(i);
}

// `Num` rows of x, which are few.
template <int Num, typename X, typename W, typename Y>
inline void few_rows_of(const Given<X>& x, const W* w, int64_t num_rows, int64_t block, Y* y,
                        int64_t total) {
  const int64_t width = x.width;
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<X, at::BFloat16> && std::is_same_v<W, at::BFloat16>) {
    if (x.has_pairs)
      return spread(
          num_rows, block,
          [&](int64_t row, int64_t far) {
            dot_pairs<Num, streams>(x.x, w + row * width, width, far, y + row, total);
          },
          [&](int64_t row) { dot_pairs<Num, 1>(x.x, w + row * width, width, 0, y + row, total); });
  }
#endif
  constexpr int at_once = lanes == 16 || Num == 1 ? streams : 1;  // as many as registers hold
  spread(
      num_rows, block,
      [&](int64_t row, int64_t far) {
        for (int i = 0; i < streams; i += at_once, row += at_once * far)
          dot<W, Num, at_once>(x.wide, w + row * width, width, far, y + row, total);
      },
      [&](int64_t row) { dot<W, Num, 1>(x.wide, w + row * width, width, 0, y + row, total); });
}

// The `block`-th `columns` rows of a weight [num_rows, width], in whatever order.
template <int Num, typename X, typename W, typename Y>
inline void rows_of(const Given<X>& x, const W* w, int64_t num_rows, int64_t block, Y* y,
                    int64_t total) {
  if constexpr (Num > 0) return few_rows_of<Num>(x, w, num_rows, block, y, total);
  const int64_t num = x.num, width = x.width;
  if (num == 1) return few_rows_of<1>(x, w, num_rows, block, y, total);
  if (num == 2) return few_rows_of<2>(x, w, num_rows, block, y, total);
  if (num == 3) return few_rows_of<3>(x, w, num_rows, block, y, total);
  const int64_t first = block * columns, here = std::min<int64_t>(columns, num_rows - first);
  w += first * width;
  y += first;
  float* panel = scratch<1, float>(columns * width);
  const Ahead ahead{reinterpret_cast<const char*>(w + here * width),
                    columns * width * static_cast<int64_t>(sizeof(W))};
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<X, at::BFloat16> && std::is_same_v<W, at::BFloat16>) {
    if (x.has_pairs) {
      lay_out(reinterpret_cast<const float*>(w), width / 2, here, panel);
      return multiply<Pairs>(x.pairs(), num, width / 2, panel, here, y, total, ahead);
    }
  }
#endif
  if constexpr (std::is_same_v<W, float>) {
    lay_out(w, width, here, panel);
  } else {
    float* wide = scratch<0, float>(columns * width);
    at::vec::convert(w, wide, here * width);
    lay_out(wide, width, here, panel);
  }
  multiply<Floats>(x.wide, num, width, panel, here, y, total, ahead);
}

#if defined(CPU_CAPABILITY_AVX512)
// Whether the CPU multiplies tiles of bf16, for which the library has what is not here.
inline bool has_tiles() {
  static const bool found = __builtin_cpu_supports("amx-bf16");
  return found;
}

// All rows of x times one weight [num_rows, width], by the library.
template <typename Y>
inline void by_library(const at::BFloat16* x, int64_t num, int64_t width, const at::BFloat16* w,
                       int64_t num_rows, Y* y, int64_t total) {
  std::vector<at::BFloat16> result(num * num_rows);
  const int64_t sizes[3][2] = {{num, num_rows}, {num, width}, {width, num_rows}};
  const int64_t strides[3][2] = {{num_rows, 1}, {width, 1}, {1, width}};
  const at::BFloat16* data[3] = {result.data(), x, w};
  AtenTensorHandle handles[3] = {};
  AOTITorchError error = AOTI_TORCH_SUCCESS;
  for (int i = 0; i < 3 && error == AOTI_TORCH_SUCCESS; ++i)
    error = aoti_torch_create_tensor_from_blob(const_cast<at::BFloat16*>(data[i]), 2, sizes[i],
                                               strides[i], 0, aoti_torch_dtype_bfloat16(),
                                               aoti_torch_device_type_cpu(), 0, &handles[i]);
  if (error == AOTI_TORCH_SUCCESS)
    error = aoti_torch_cpu_mm_out(handles[0], handles[1], handles[2]);
  for (AtenTensorHandle handle : handles)
    if (handle) aoti_torch_delete_tensor_object(handle);
  AOTI_TORCH_CHECK(error == AOTI_TORCH_SUCCESS, "the library refuses a product");
#pragma omp parallel for
  for (int64_t m = 0; m < num; ++m)
    at::vec::convert(result.data() + m * num_rows, y + m * total, num_rows);
}
#endif

}  // namespace llama_export
#endif
