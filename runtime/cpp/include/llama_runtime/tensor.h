// Tensors in the memory of the host, without any framework.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace llama_runtime {

enum class DType { f64, f32, f16, bf16, f8e4m3, f8e5m2, i64, i32, i16, i8, u8, boolean };

// One element type and its spellings.
struct DTypeRow {
  DType dtype;
  std::string_view name;         // in a manifest, such as `bf16`
  int64_t num_bytes;             // of one element
  std::string_view safetensors;  // in a safetensors header
};

const DTypeRow& dtype_row(DType dtype);
// nullptr where no dtype has that spelling.
const DTypeRow* dtype_from_name(std::string_view name);
const DTypeRow* dtype_from_safetensors(std::string_view spelling);

// A contiguous tensor, row major. Copies share the memory, which lives as long as one of them.
// Not synchronised: nobody may write it while another thread uses it.
struct Tensor {
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  std::shared_ptr<void> data;
  bool is_on_device = false;  // of CUDA: only programs there read it

  int64_t numel() const;
  int64_t nbytes() const;

  // New memory of the host, all zero, which the kernel gives page by page when it is first used.
  static Tensor zeros(DType dtype, std::vector<int64_t> shape);
  // One dimension, or none (`scalar`), of int32.
  static Tensor from_ids(const std::vector<int32_t>& ids, std::vector<int64_t> shape);
  static Tensor scalar(int32_t value);
};

// The elements of any dtype, as float32 or int64.
std::vector<float> to_floats(const Tensor& tensor);
std::vector<int64_t> to_integers(const Tensor& tensor);
// Sets every element.
void fill(const Tensor& tensor, double value);

// A shape as `[2, 3]`.
std::string show(const std::vector<int64_t>& shape);

}  // namespace llama_runtime
