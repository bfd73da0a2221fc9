#include "llama_runtime/tensor.h"

#include <sys/mman.h>

#include <cstring>
#include <functional>
#include <new>
#include <numeric>

#include "llama_runtime/error.h"

namespace llama_runtime {
namespace {

constexpr DTypeRow kRows[] = {
    {DType::f64, "f64", 8, "F64"},
    {DType::f32, "f32", 4, "F32"},
    {DType::f16, "f16", 2, "F16"},
    {DType::bf16, "bf16", 2, "BF16"},
    {DType::f8e4m3, "f8e4m3", 1, "F8_E4M3"},
    {DType::f8e5m2, "f8e5m2", 1, "F8_E5M2"},
    {DType::i64, "i64", 8, "I64"},
    {DType::i32, "i32", 4, "I32"},
    {DType::i16, "i16", 2, "I16"},
    {DType::i8, "i8", 1, "I8"},
    {DType::u8, "u8", 1, "U8"},
    {DType::boolean, "bool", 1, "BOOL"},
};

}  // namespace

const DTypeRow& dtype_row(DType dtype) {
  return kRows[static_cast<int>(dtype)];
}

const DTypeRow* dtype_from_name(std::string_view name) {
  for (const DTypeRow& row : kRows) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

const DTypeRow* dtype_from_safetensors(std::string_view spelling) {
  for (const DTypeRow& row : kRows) {
    if (row.safetensors == spelling) return &row;
  }
  return nullptr;
}

int64_t Tensor::numel() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

int64_t Tensor::nbytes() const {
  return numel() * dtype_row(dtype).num_bytes;
}

Tensor Tensor::zeros(DType dtype, std::vector<int64_t> shape) {
  Tensor tensor{dtype, std::move(shape), nullptr};
  const auto num_bytes = static_cast<size_t>(tensor.nbytes());
  if (num_bytes == 0) return tensor;
  void* memory =
      mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  tensor.data = std::shared_ptr<void>(memory, [num_bytes](void* p) { munmap(p, num_bytes); });
  return tensor;
}

Tensor Tensor::from_ids(const std::vector<int32_t>& ids, std::vector<int64_t> shape) {
  Tensor tensor{DType::i32, std::move(shape), nullptr};
  if (tensor.numel() != static_cast<int64_t>(ids.size())) {
    throw Error(ErrorCode::kInput, "expected as many ids as the shape " + show(tensor.shape) +
                                       " holds, got " + std::to_string(ids.size()));
  }
  auto own = std::make_shared<std::vector<int32_t>>(ids);
  tensor.data = std::shared_ptr<void>(own, own->data());
  return tensor;
}

Tensor Tensor::scalar(int32_t value) {
  return from_ids({value}, {});
}

std::string show(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i ? ", " : "") + std::to_string(shape[i]);
  }
  return text + "]";
}

}  // namespace llama_runtime
