// Products of rows of x with stored weights, each row of a weight read once.
//
// Up to `few` rows of x are multiplied as dot products, a row of the weight after the other. More
// of them share the work of laying 32 rows of the weight out as a panel, in which the numbers that
// one vector instruction needs lie side by side.
#ifndef LLAMA_EXPORT_PRODUCTS
#define LLAMA_EXPORT_PRODUCTS
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

namespace llama_export {

constexpr int few = 3;
constexpr int columns = 32;  // rows of a weight in a panel
constexpr int parts = columns / lanes;

// A result Y is float32, or what a float32 is rounded to.

// y[m * total] = a row of a weight [width] times row m of x [Num, width]. Rows are read one after
// the other: two at a time are two streams, which the memory serves at half the speed.
template <typename W, int Num, typename Y>
inline void dot(const float* x, const W* w, int64_t width, Y* y, int64_t total) {
  constexpr int64_t step = at::vec::Vectorized<W>::size();
  constexpr int loads = step / lanes;
  constexpr int chains = Num == 1 ? 2 : 1;
  Float sums[Num][chains][loads];
// Unrolled, since sums that stay an array stay in memory.
#pragma GCC unroll 8
  for (int m = 0; m < Num; ++m)
#pragma GCC unroll 8
    for (int c = 0; c < chains; ++c)
#pragma GCC unroll 8
      for (int p = 0; p < loads; ++p) sums[m][c][p] = Float(0.0f);
  int64_t k = 0;
  for (; k + chains * step <= width; k += chains * step) {
#pragma GCC unroll 8
    for (int c = 0; c < chains; ++c) {
      const int64_t at = k + c * step;
      const at::vec::VectorizedN<float, loads> weights = at::vec::convert<float, loads, W, 1>(
          at::vec::VectorizedN<W, 1>(at::vec::Vectorized<W>::loadu(w + at)));
#pragma GCC unroll 8
      for (int m = 0; m < Num; ++m)
#pragma GCC unroll 8
        for (int p = 0; p < loads; ++p)
          sums[m][c][p] = at::vec::fmadd(weights[p], Float::loadu(x + m * width + at + p * lanes),
                                         sums[m][c][p]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < Num; ++m) {
    Float sum(0.0f);
#pragma GCC unroll 8
    for (int c = 0; c < chains; ++c)
#pragma GCC unroll 8
      for (int p = 0; p < loads; ++p) sum = sum + sums[m][c][p];
    float rest = 0.0f;
    for (int64_t i = k; i < width; ++i) rest += x[m * width + i] * static_cast<float>(w[i]);
    y[m * total] = static_cast<Y>(rest + sum_of(sum));
  }
}

// Lays `here` rows [words] of 32 bits out as a panel [words, columns]; what is missing is zero.
// `next` is read soon: fetched meanwhile, as the one stream that 16 rows at a time are not.
inline void lay_out(const float* rows, int64_t words, int64_t here, const char* next,
                    float* panel) {
  constexpr int side = 16, line = 64;
  const int64_t whole = here == columns ? words / side * side : 0;
  for (int first = 0; first < columns; first += side)
    for (int64_t k = 0; k < whole; k += side) {
      for (int i = 0; i < side; ++i) __builtin_prefetch(next + i * line, 0, 2);
      next += side * line;
      at::vec::transpose_mxn<float, side, side>(rows + first * words + k, words,
                                                panel + k * columns + first, columns);
    }
  for (int64_t k = whole; k < words; ++k)
    for (int64_t i = 0; i < columns; ++i)
      panel[k * columns + i] = i < here ? rows[i * words + k] : 0.0f;
}

// Tiles of some rows of x times a panel: y[m * stride + i].

// A word is a float.
struct Floats {
  static constexpr int max_rows = lanes == 16 ? 12 : 3;

  template <int Num>
  static void tile(const float* x, int64_t words, const float* panel, float* y, int64_t stride) {
    Float sums[Num][parts];
#pragma GCC unroll 16
    for (int m = 0; m < Num; ++m)
#pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) sums[m][p] = Float(0.0f);
    for (int64_t k = 0; k < words; ++k) {
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

  static bool is_there() {
    static const bool found = __builtin_cpu_supports("avx512bf16");
    return found;
  }

  template <int Num>
  __attribute__((target("avx512bf16"))) static void tile(const float* x, int64_t words,
                                                         const float* panel, float* y,
                                                         int64_t stride) {
    __m512 sums[Num][2];
#pragma GCC unroll 16
    for (int m = 0; m < Num; ++m) sums[m][0] = sums[m][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < words; ++k) {
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
      _mm512_storeu_ps(y + m * stride, sums[m][0]);
      _mm512_storeu_ps(y + m * stride + 16, sums[m][1]);
    }
  }
};
#endif

template <typename Tile, int Num>
inline void tile(int64_t num, const float* x, int64_t words, const float* panel, float* y,
                 int64_t stride) {
  if (num == Num) return Tile::template tile<Num>(x, words, panel, y, stride);
  if constexpr (Num > 1) tile<Tile, Num - 1>(num, x, words, panel, y, stride);
}

// All rows of x [num, words] times a panel, of which `here` columns are wanted.
template <typename Tile, typename Y>
inline void multiply(const float* x, int64_t num, int64_t words, const float* panel, int64_t here,
                     Y* y, int64_t total) {
  float edge[Tile::max_rows * columns];
  const int64_t tiles = (num + Tile::max_rows - 1) / Tile::max_rows;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t first = num * t / tiles, size = num * (t + 1) / tiles - first;
    if constexpr (std::is_same_v<Y, float>) {
      if (here == columns) {
        tile<Tile, Tile::max_rows>(size, x + first * words, words, panel, y + first * total, total);
        continue;
      }
    }
    tile<Tile, Tile::max_rows>(size, x + first * words, words, panel, edge, columns);
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

// The `block`-th `columns` rows of a weight [num_rows, width].
template <int Num, typename X, typename W, typename Y>
inline void rows_of(const Given<X>& x, const W* w, int64_t num_rows, int64_t block, Y* y,
                    int64_t total) {
  const int64_t first = block * columns, here = std::min<int64_t>(columns, num_rows - first);
  const int64_t num = Num ? Num : x.num, width = x.width;
  w += first * width;
  y += first;
  const auto each = [&](auto count) {
    for (int64_t i = 0; i < here; ++i)
      dot<W, count.value>(x.wide, w + i * width, width, y + i, total);
  };
  if constexpr (Num > 0) return each(std::integral_constant<int, Num>());
  if (num == 1) return each(std::integral_constant<int, 1>());
  if (num == 2) return each(std::integral_constant<int, 2>());
  if (num == 3) return each(std::integral_constant<int, 3>());
  float* panel = scratch<1, float>(columns * width);
  const char* next = reinterpret_cast<const char*>(w + here * width);
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<X, at::BFloat16> && std::is_same_v<W, at::BFloat16>) {
    if (x.has_pairs) {
      lay_out(reinterpret_cast<const float*>(w), width / 2, here, next, panel);
      return multiply<Pairs>(x.pairs(), num, width / 2, panel, here, y, total);
    }
  }
#endif
  if constexpr (std::is_same_v<W, float>) {
    lay_out(w, width, here, next, panel);
  } else {
    float* wide = scratch<0, float>(columns * width);
    at::vec::convert(w, wide, here * width);
    lay_out(wide, width, here, next, panel);
  }
  multiply<Floats>(x.wide, num, width, panel, here, y, total);
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

// So many blocks a thread takes at once that one which is late does not keep the others waiting.
inline int64_t chunk(int64_t blocks) {
  return std::clamp<int64_t>(blocks / (8 * omp_get_num_threads()), 1, 64);
}

}  // namespace llama_export
#endif
