// Whether all elements of many tensors are finite, as one answer: where one is not, others look.
#pragma once

#include <ATen/ATen.h>

#include <cstring>
#include <limits>
#include <unordered_map>
#include <vector>

namespace hypo {

// Above this a CPU takes several threads, and a GPU no copy.
constexpr int64_t MANY_ELEMENTS = 1 << 18;
// Of small tensors on a GPU so many bytes are put together at most: memory is short there.
constexpr size_t MOST_TOGETHER_BYTES = 64 << 20;

// Bits of the exponent alone: those of NaN and infinity are all set. Compilers make vectors of it.
template <typename Word>
__attribute__((optimize("O3"))) bool has_bad_words(const void* data, int64_t num, Word exponent) {
  const Word* words = (const Word*)data;
  Word bad = 0;
  for (int64_t i = 0; i < num; i++) bad |= (Word)((words[i] & exponent) == exponent);
  return bad != 0;
}

inline bool has_bad_words(const at::Tensor& t) {
  const void* data = t.const_data_ptr();
  switch (t.scalar_type()) {
    case at::kFloat: return has_bad_words<uint32_t>(data, t.numel(), 0x7f800000u);
    case at::kHalf: return has_bad_words<uint16_t>(data, t.numel(), 0x7c00u);
    case at::kBFloat16: return has_bad_words<uint16_t>(data, t.numel(), 0x7f80u);
    default: return has_bad_words<uint64_t>(data, t.numel(), 0x7ff0000000000000ull);
  }
}

// The same elements in the order of memory, along one axis.
inline at::Tensor flat(const at::Tensor& t) {
  auto impl = t.unsafeGetTensorImpl()->shallow_copy_and_detach(
      c10::VariableVersion(0), /*allow_tensor_metadata_change=*/true);
  impl->set_sizes_contiguous({t.numel()});
  return at::Tensor(impl);
}

// Of each tensor a number that is finite only where all of its own are. On a CPU the norm of
// infinity takes ten times what the two ends take.
inline at::Tensor largest_of(std::vector<at::Tensor> tensors) {
  for (auto& tensor : tensors)
    if (!tensor.numel()) tensor = tensor.new_zeros({1});
  if (!tensors[0].is_cpu())
    return at::stack(at::_foreach_norm(tensors, std::numeric_limits<double>::infinity()));
  std::vector<at::Tensor> ends;
  for (const auto& tensor : tensors) {
    auto [least, most] = at::aminmax(tensor);
    ends.push_back(at::stack({least, most}));
  }
  return at::stack(ends).to(at::kDouble).abs().amax(1);
}

// Each device is waited for once. On a GPU small tensors are put together, and looked at in one
// launch: to make a number of each takes the host longer than all of them take the GPU.
inline bool has_bad(const std::vector<at::Tensor>& tensors) {
  std::unordered_map<int, std::vector<at::Tensor>> few, many, found;
  std::unordered_map<int, size_t> bytes_together;
  for (const at::Tensor& tensor : tensors) {
    bool is_dense = tensor.is_non_overlapping_and_dense();
    bool is_small = tensor.numel() < MANY_ELEMENTS && is_dense;
    bool is_byte = c10::isFloat8Type(tensor.scalar_type());
    if (tensor.is_cpu() && is_small && !is_byte) {
      if (has_bad_words(tensor)) return true;
      continue;
    }
    at::Tensor held = is_byte ? tensor.to(at::kFloat) : tensor;
    int key = (int)held.scalar_type() * 256 + (held.is_cuda() ? held.get_device() + 1 : 0);
    if (held.is_cuda() && is_small &&
        (bytes_together[key] += held.nbytes()) <= MOST_TOGETHER_BYTES)
      few[key].push_back(flat(held));
    else
      many[key].push_back(held);
  }
  for (auto& [key, group] : few) many[key].push_back(at::cat(group));
  for (auto& [key, group] : many)
    found[key % 256].push_back(at::isfinite(largest_of(group)).all());
  for (auto& [device, finite] : found)
    if (!at::stack(finite).all().item<bool>()) return true;
  return false;
}

}  // namespace hypo
