// Operations whose results have not been looked at yet, with all that they read and wrote.
//
// What is kept has no gradient of the program's: its graph would live longer, and a gradient that
// somebody else holds is copied.
#pragma once

#include "finite.h"
#include "seen.h"

#include <c10/util/flat_hash_map.h>

namespace hypo {

// What was in a tensor before an operation wrote it: a copy, or its bytes.
struct Before {
  at::Tensor written, copy;
  const char* bytes = nullptr;

  at::Tensor content() const {
    if (bytes == nullptr) return copy;
    at::Tensor made = at::empty_strided(written.sizes(), written.strides(), written.options());
    std::memcpy(made.mutable_data_ptr(), bytes, made.nbytes());
    return made;
  }
};

// Bytes that are kept one behind another, and forgotten together: much less work than tensors.
class KeptBytes {
 public:
  const char* add(const void* from, size_t num_bytes) {
    if (blocks_.empty() || used_ + num_bytes > BLOCK) {
      blocks_.emplace_back(new char[BLOCK]);
      used_ = 0;
    }
    char* into = blocks_.back().get() + used_;
    std::memcpy(into, from, num_bytes);
    used_ += num_bytes;
    return into;
  }

  void clear() {
    if (blocks_.size() > 1) blocks_.resize(1);
    used_ = 0;
  }

  static bool is_for(const at::Tensor& t) {
    return t.is_cpu() && t.nbytes() <= BLOCK / 16 && t.is_non_overlapping_and_dense();
  }

 private:
  static constexpr size_t BLOCK = 4 << 20;
  std::vector<std::unique_ptr<char[]>> blocks_;
  size_t used_ = 0;
};

// An operation that has run. A launch of Triton's has no facts and is known to Python by number.
struct Op {
  long number = 0;
  const Facts* facts = nullptr;
  c10::SmallVector<c10::IValue, 4> arguments;
  c10::SmallVector<at::Tensor, 1> results;
  c10::SmallVector<Before, 1> before;
  int site = 0, node = 0, forward_site = 0;
  bool is_test = false, is_written = false;
  // So many of the results, and what was before in them, are among the arguments.
  size_t num_given = 0;

  // Calls `take` once with each tensor that this keeps.
  template <typename Take>
  void each_kept(Take take) const {
    for (const auto& value : arguments) each_tensor(value, take);
    for (size_t i = num_given; i < results.size(); i++) take(results[i]);
    if (facts == nullptr)
      for (const Before& held : before) take(held.written);
  }
};

// What is the same of all nodes of a backward pass of one type.
struct NodeKind {
  int name = 0;
  bool is_gathering = false, is_programs = false;
};

// Whether it is a plain tensor of floats in memory of the CPU or of a GPU.
inline bool is_looked_at(const at::Tensor& t) {
  auto type = t.scalar_type();
  bool is_float = type == at::kFloat || type == at::kHalf || type == at::kBFloat16 ||
                  type == at::kDouble || c10::isFloat8Type(type);
  return is_float && t.layout() == at::kStrided && !t.is_nested() &&
         (t.is_cpu() || t.is_cuda()) && t.numel() > 0 && t.has_storage() &&
         type != at::kFloat8_e8m0fnu && !t._is_zerotensor();
}

// Whether it holds floats that nobody looks at: sparse or complex ones.
inline bool is_hidden(const at::Tensor& t) {
  return t.is_complex() || (t.is_floating_point() && (t.layout() != at::kStrided || t.is_nested()));
}

// The same elements, of which autograd knows nothing.
inline at::Tensor bare(const at::Tensor& t) {
  static auto& version = *new c10::VariableVersion(0);  // nobody asks for it: one is enough
  return at::Tensor(t.unsafeGetTensorImpl()->shallow_copy_and_detach(
      version, /*allow_tensor_metadata_change=*/false));
}

inline c10::IValue bare(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? bare(value.toTensor()) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> parts;
    for (const at::Tensor& part : value.toTensorVector()) parts.push_back(bare(part));
    return parts;
  }
  if (value.isList()) {
    c10::List<c10::IValue> parts(value.toList().elementType());
    for (const c10::IValue& part : value.toListRef()) parts.push_back(bare(part));
    return parts;
  }
  return value;
}

// A parameter is kept as it is, and told of where it is not finite any more.
inline bool is_parameter(const at::Tensor& t) { return t.is_leaf() && t.requires_grad(); }

// Whether its memory is there still: a program may give back that of a storage that it keeps.
inline bool is_there(const at::Tensor& t) {
  int64_t last = 0;
  for (int64_t axis = 0; axis < t.dim(); axis++) last += (t.size(axis) - 1) * t.stride(axis);
  size_t end = (size_t)(t.storage_offset() + last + 1) * t.element_size();
  return storage_of(t)->data() != nullptr && end <= storage_of(t)->nbytes();
}

inline bool is_same_place(const at::Tensor& one, const at::Tensor& other) {
  return one.data_ptr() == other.data_ptr() && one.sizes() == other.sizes() &&
         one.strides() == other.strides() && one.scalar_type() == other.scalar_type();
}

// The bytes between the first element and the end of the last one.
inline std::pair<const char*, const char*> ends_of(const at::Tensor& t) {
  auto start = (const char*)t.const_data_ptr();
  int64_t last = 0;
  for (int64_t axis = 0; axis < t.dim(); axis++) last += (t.size(axis) - 1) * t.stride(axis);
  return {start, start + (last + 1) * (int64_t)t.element_size()};
}

inline bool is_overlapping(const at::Tensor& one, const at::Tensor& other) {
  auto [start, end] = ends_of(one);
  auto [first, last] = ends_of(other);
  return start < last && first < end;
}

// Whether a tensor lies on a part of another one, which has no gaps.
inline bool is_within(const at::Tensor& part, const at::Tensor& whole) {
  auto [start, end] = ends_of(part);
  auto [first, last] = ends_of(whole);
  return first <= start && end <= last && part.scalar_type() == whole.scalar_type() &&
         whole.is_non_overlapping_and_dense();
}

// What was in a part of what was written.
inline std::optional<at::Tensor> part_of(const Before& before, const at::Tensor& part) {
  at::Tensor whole = before.content();
  if (whole.strides() != before.written.strides()) return std::nullopt;
  auto gap = (const char*)part.const_data_ptr() - (const char*)before.written.const_data_ptr();
  int64_t at = whole.storage_offset() + gap / (int64_t)part.element_size();
  return whole.as_strided(part.sizes(), part.strides(), at);
}

class Numbers {
 public:
  bool is_on = false, is_busy = false, is_paused = false, is_capturing = false;
  long number = 0, num_in_graphs = 0, num_hidden = 0;
  int backward_site = 0;
  size_t max_ops = 0, max_results = 0, max_bytes = 0, max_gpu_bytes = 0, max_filled = 0;
  int undefined_byte = 0, max_single = 0;
  py::function look, read;
  std::vector<Op> ops;
  size_t num_bytes = 0;

  bool is_watching() const { return is_on && !is_busy && !is_paused; }

  bool is_full(size_t more) const {
    // A CPU is not waited for, and memory that was freed a short while ago is still in its caches.
    size_t most = is_on_gpu_ ? max_ops : max_ops / 4;
    return num_results_ >= max_results || ops.size() >= most || num_bytes + more > most_bytes();
  }

  // Copies of what is about to be written, given bare; none where that is more than is kept of all
  // together.
  c10::SmallVector<Before, 1> copies(c10::ArrayRef<at::Tensor> written, bool is_launch = false) {
    size_t more = 0;
    for (const auto& tensor : written) more += tensor.nbytes();
    if (is_full(more)) flush();
    c10::SmallVector<Before, 1> made;
    if (written.empty() || is_full(more)) return made;
    num_bytes += more;
    Quiet quiet;
    made.reserve(written.size());
    std::vector<at::Tensor> plain;
    bool is_list = (int)written.size() > max_single;
    for (const auto& tensor : written) {
      made.push_back({tensor});
      if (!is_launch && KeptBytes::is_for(tensor))
        made.back().bytes = bytes_.add(tensor.const_data_ptr(), tensor.nbytes());
      else
        plain.push_back(tensor);
    }
    for (const auto& t : plain)
      is_list = is_list && t.device() == plain[0].device() &&
                t.scalar_type() == plain[0].scalar_type() && !c10::isFloat8Type(t.scalar_type());
    // Many at once, where they are many: a launch for each would cost more than the copy.
    std::vector<at::Tensor> copied;
    if (is_list && !plain.empty()) {
      copied = at::_foreach_mul(plain, 1.0);
    } else {
      for (const auto& tensor : plain) copied.push_back(tensor.clone());
    }
    auto copy = copied.begin();
    for (Before& before : made)
      if (before.bytes == nullptr) before.copy = *copy++;
    return made;
  }

  void add(Op&& op) {
    for (const auto& result : op.results) {
      num_bytes += result.nbytes();
      if (result.is_cuda()) note_stream(result.device());
    }
    num_results_ += op.results.size();
    ops.push_back(std::move(op));
    if (is_full(0)) flush();
  }

  // The line that an operation stands for, and of a backward pass the line forward.
  void place(Op& op) {
    auto node = torch::autograd::get_current_node();
    if (!node) {
      op.site = sites.now();
      if (at::GradMode::is_enabled() || !op.facts->is_new.empty()) {
        if (forward_.size() > MAX_SITES) forward_.clear();
        forward_.try_emplace((long)at::sequence_number::peek() - 1, op.site);
      }
      return;
    }
    const NodeKind& kind = kind_of(*node);
    if (kind.is_gathering || kind.is_programs) op.site = sites.now();
    if (!kind.is_gathering && op.site == 0) op.site = backward_site;
    op.node = kind.is_programs ? texts.of(node->name()) : kind.name;
    auto found = forward_.find((long)node->sequence_nr());
    op.forward_site = found != forward_.end() ? found->second : 0;
  }

  void fill(const at::Tensor& tensor) {
    Storage* storage = storage_of(tensor);
    if (storage->nbytes() > max_filled || storage->nbytes() == 0) return;
    Quiet quiet;
    auto options = at::TensorOptions().dtype(at::kByte).device(tensor.device());
    at::from_blob(storage->mutable_data(), {(int64_t)storage->nbytes()}, options)
        .fill_(undefined_byte);
    if (undefined_.size() > 2 * num_alive_ + 1024) forget_undefined();
    undefined_.insert_or_assign(
        storage, std::make_pair(WeakStorage(tensor.storage().getWeakStorageImpl()), sites.now()));
  }

  int undefined_site(Storage* storage) const {
    auto found = undefined_.find(storage);
    bool is_there = found != undefined_.end() && !found->second.first.expired();
    return is_there ? found->second.second : -1;
  }

  // Looks at what has come of the operations so far; at each of them where `is_whole`.
  void flush(bool is_whole = false) {
    if (is_busy || is_capturing || ops.empty()) return;
    is_busy = true;
    struct End {
      Numbers& own;
      ~End() {
        own.clear();
        own.is_busy = false;
      }
    } end{*this};
    c10::impl::ExcludeDispatchKeyGuard key(KEY);
    wait_for_streams();
    look(is_whole || has_left() ? flagged() : std::vector<int>());
  }

  void clear() {
    ops.clear();
    bytes_.clear();
    writers_.clear();
    streams_.clear();
    num_bytes = num_results_ = 0;
  }

  // What a tensor held after operation `number`; nothing where that is gone.
  std::optional<at::Tensor> content(const at::Tensor& tensor, long number) const {
    if (!is_there(tensor)) return std::nullopt;
    auto found = writers_.find(storage_of(tensor));
    if (found == writers_.end()) return bare(tensor);
    for (int at : found->second) {
      if (ops[at].number <= number) continue;
      bool is_touched = ops[at].before.empty();
      for (const Before& before : ops[at].before) {
        if (before.written.storage().unsafeGetStorageImpl() != storage_of(tensor)) continue;
        if (is_same_place(before.written, tensor)) return before.content();
        if (is_within(tensor, before.written)) return part_of(before, tensor);
        is_touched = is_touched || is_overlapping(tensor, before.written);
      }
      if (is_touched) return std::nullopt;
    }
    return bare(tensor);
  }

  // Those that write a whole one of these memories, or of those that the flagged touch.
  std::vector<int> overwriters(const std::vector<long>& memories, const std::vector<int>& flagged) {
    std::unordered_set<Storage*> known;
    for (long memory : memories) known.insert((Storage*)memory);
    auto note = [&](const at::Tensor& t) { if (t.has_storage()) known.insert(storage_of(t)); };
    for (int at : flagged) {
      for (const auto& result : ops[at].results) note(result);
      for (const auto& value : ops[at].arguments) each_tensor(value, note);
    }
    std::vector<int> found;
    for (int at = 0; at < (int)ops.size(); at++)
      for (const auto& result : ops[at].results)
        if (!ops[at].is_test && known.count(storage_of(result))) {
          found.push_back(at);
          break;
        }
    return found;
  }

 private:
  static constexpr size_t MAX_SITES = 1 << 20;
  bool is_on_gpu_ = false;
  size_t num_results_ = 0, num_alive_ = 0;
  // Of GPUs those that what is kept was made on.
  std::vector<c10::Stream> streams_;
  KeptBytes bytes_;
  std::unordered_map<Storage*, std::vector<int>> writers_;
  std::unordered_map<long, int> forward_;
  std::unordered_map<std::type_index, NodeKind> kinds_;
  std::unordered_map<Storage*, std::pair<WeakStorage, int>> undefined_;

  // By type: to spell a name takes longer than many an operation. Those of the program's own have
  // one type, and a name for each class.
  const NodeKind& kind_of(const torch::autograd::Node& node) {
    auto [at, is_new] = kinds_.try_emplace(std::type_index(typeid(node)));
    if (is_new) {
      std::string name = node.name();
      bool is_gathering = name.size() >= 14 && name.rfind("AccumulateGrad") == name.size() - 14;
      bool is_programs = std::string(typeid(node).name()).find("PyNode") != std::string::npos;
      at->second = {texts.of(name), is_gathering, is_programs};
    }
    return at->second;
  }

  void note_stream(c10::Device device) {
    is_on_gpu_ = true;
    c10::Stream stream = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(device);
    if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end())
      streams_.push_back(stream);
  }

  // Whoever looks at results does so on the stream of this thread: others have to be done.
  void wait_for_streams() const {
    if (streams_.empty()) return;
    c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    for (const c10::Stream& stream : streams_)
      if (stream != guard.getStream(stream.device())) guard.synchronizeStream(stream);
  }

  size_t most_bytes() const { return is_on_gpu_ ? max_gpu_bytes : max_bytes; }

  void index_writers() {
    for (int at = 0; at < (int)ops.size(); at++)
      if (ops[at].is_written)
        for (const auto& result : ops[at].results) {
          auto& found = writers_[storage_of(result)];
          if (found.empty() || found.back() != at) found.push_back(at);
        }
  }

  void forget_undefined() {
    for (auto it = undefined_.begin(); it != undefined_.end();)
      it = it->second.first.expired() ? undefined_.erase(it) : std::next(it);
    num_alive_ = undefined_.size();
  }

  // Whether something that is not finite is left of the operations, or was asked for: nothing can
  // come any more of memory that only this keeps alive.
  bool has_left() {
    Quiet quiet;
    ska::flat_hash_map<Storage*, size_t> own;
    auto count = [&](const at::Tensor& t) {
      if (t.has_storage() && !is_parameter(t)) own[storage_of(t)]++;
    };
    for (const Op& op : ops) op.each_kept(count);
    std::vector<at::Tensor> left;
    ska::flat_hash_map<Storage*, c10::SmallVector<const at::Tensor*, 1>> taken;
    for (const Op& op : ops) {
      if (op.is_test) {
        if (writers_.empty()) index_writers();
        if (auto held = content(op.results[0], op.number - 1)) left.push_back(*held);
        continue;
      }
      for (const auto& result : op.results) {
        Storage* storage = storage_of(result);
        if (!is_parameter(result) && result.storage().use_count() <= own[storage]) continue;
        if (!is_there(result)) continue;
        auto& places = taken[storage];
        bool is_taken = std::any_of(places.begin(), places.end(), [&](const at::Tensor* other) {
          return is_same_place(*other, result);
        });
        if (is_taken) continue;
        places.push_back(&result);
        left.push_back(bare(result));
      }
    }
    return has_bad(left);
  }

  // The places of operations of which a result is not finite; each device is waited for once. The
  // largest absolute number of a result is found there, many results to a launch.
  std::vector<int> flagged() {
    if (writers_.empty()) index_writers();
    Quiet quiet;
    std::unordered_map<int, std::pair<std::vector<int>, std::vector<at::Tensor>>> groups;
    for (int at = 0; at < (int)ops.size(); at++) {
      long of = ops[at].number - (ops[at].is_test ? 1 : 0);
      for (const auto& result : ops[at].results) {
        auto held = content(result, of);
        if (!held) continue;
        if (c10::isFloat8Type(held->scalar_type())) held = held->to(at::kFloat);
        int key = (int)held->scalar_type() * 256 + (held->is_cuda() ? held->get_device() + 1 : 0);
        groups[key].first.push_back(at);
        groups[key].second.push_back(*held);
      }
    }
    std::unordered_map<int, std::pair<std::vector<int>, std::vector<at::Tensor>>> by_device;
    for (auto& [key, group] : groups) {
      auto& [places, finite] = by_device[key % 256];
      places.insert(places.end(), group.first.begin(), group.first.end());
      finite.push_back(at::isfinite(largest_of(group.second)));
    }
    std::vector<int> found;
    for (auto& [device, group] : by_device) {
      at::Tensor finite = at::cat(group.second).cpu();
      const bool* is_finite = finite.const_data_ptr<bool>();
      for (size_t i = 0; i < group.first.size(); i++)
        if (!is_finite[i]) found.push_back(group.first[i]);
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
  }
};

inline Numbers& numbers = *new Numbers;

// One call of an operation, seen from before it runs to after it.
class NumbersCall {
 public:
  NumbersCall(const Facts& facts, const torch::jit::Stack& stack, size_t num_arguments)
      : facts_(facts) {
    if (facts.role == Role::PASS || !numbers.is_watching()) return;
    if (numbers.is_capturing) {
      numbers.num_in_graphs++;
      return;
    }
    is_seen_ = true;
    op_.number = ++numbers.number;
    op_.facts = &facts;
    auto arguments = torch::jit::last(stack, num_arguments);
    if (facts.role == Role::ITEM || facts.role == Role::TEST) {
      first_ = arguments[0].isTensor() ? arguments[0].toTensor() : at::Tensor();
      is_meant_ = facts.role == Role::ITEM || is_asked(arguments);
      return;
    }
    if (facts.role != Role::PLAIN) return;
    for (const auto& value : arguments) op_.arguments.push_back(bare(value));
    if (facts.written.empty()) return;
    c10::SmallVector<at::Tensor, 1> written;
    for (int place : facts.written) {
      each_tensor(op_.arguments[place], [&](const at::Tensor& t) {
        if (is_looked_at(t)) written.push_back(t);
      });
      each_tensor(arguments[place], [&](const at::Tensor& t) {
        if (!is_looked_at(t)) return;
        op_.results.push_back(is_parameter(t) ? t : written[op_.results.size()]);
      });
    }
    op_.num_given = written.size();
    op_.before = numbers.copies(written);
  }

  void end(const torch::jit::Stack& stack, size_t num_returns) {
    if (!is_seen_) return;
    auto returns = torch::jit::last(stack, num_returns);
    if (facts_.role == Role::EMPTY) {
      for (const auto& value : returns)
        each_tensor(value, [&](const at::Tensor& t) {
          if (is_looked_at(t)) numbers.fill(t);
        });
    } else if (facts_.role == Role::ITEM) {
      bool is_float = returns.size() == 1 && returns[0].isDouble();
      if (is_float && !std::isfinite(returns[0].toDouble()))
        numbers.read(wrapped(first_), returns[0].toDouble());
    } else if (facts_.role == Role::TEST) {
      if (!first_.defined() || !is_meant_ || !is_looked_at(first_)) return;
      op_.is_test = true;
      op_.results.push_back(bare(first_));
      op_.arguments.emplace_back(op_.results[0]);
      op_.num_given = 1;
      op_.site = sites.now();
      numbers.add(std::move(op_));
    } else {
      bool has_hidden = false;
      for (const auto& value : returns)
        each_tensor(value, [&](const at::Tensor& t) { has_hidden = has_hidden || is_hidden(t); });
      numbers.num_hidden += has_hidden;
      for (size_t i = 0; i < returns.size() && i < facts_.is_new.size(); i++)
        if (facts_.is_new[i] || facts_.is_lifted)
          each_tensor(returns[i], [&](const at::Tensor& t) {
            if (is_looked_at(t)) op_.results.push_back(bare(t));
          });
      if (op_.results.empty()) return;
      op_.is_written = !facts_.is_lifted;
      numbers.place(op_);
      numbers.add(std::move(op_));
    }
  }

 private:
  const Facts& facts_;
  Op op_;
  at::Tensor first_;
  bool is_seen_ = false, is_meant_ = true;

  // Of a comparison: whether it asks if elements are numbers.
  bool is_asked(c10::ArrayRef<c10::IValue> arguments) const {
    if (!facts_.is_compare || arguments.size() < 2) return true;
    const auto& other = arguments[1];
    if (other.isTensor()) return other.toTensor().is_same(first_);
    return other.isDouble() && !std::isfinite(other.toDouble());
  }
};

}  // namespace hypo
