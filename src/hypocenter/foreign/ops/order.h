// The uses of memory that one stream alone has: in order by themselves, and nobody else's business.
//
// As soon as a second stream comes, or a graph is captured, a memory is handed over to Python's
// ledger with the uses that it has had, and is Python's from then on.
#pragma once

#include "seen.h"

namespace hypo {

constexpr int UNKNOWN = -1;

struct Region {
  int64_t address = 0, start = 0, end = 0;
  c10::SmallVector<int64_t, 5> shape, strides;
  int item_bytes = 1;
  bool is_dense = true;

  explicit Region(const at::Tensor& t)
      : address((int64_t)t.const_data_ptr()),
        shape(t.sizes().begin(), t.sizes().end()),
        strides(t.strides().begin(), t.strides().end()),
        item_bytes((int)t.element_size()) {
    int64_t last = 0;
    for (size_t i = 0; i < shape.size(); i++) last += (shape[i] - 1) * strides[i];
    start = address;
    end = t.numel() == 0 ? address : address + (last + 1) * item_bytes;
    is_dense = t.numel() * item_bytes == end - start;
  }

  bool covers(const Region& other) const {
    if (is_dense && start <= other.start && other.end <= end) return true;
    return address == other.address && item_bytes == other.item_bytes && shape == other.shape &&
           strides == other.strides;
  }
};

struct Use {
  long number, num_steps;
  Region region;
  bool is_write;
  int what, name, site;
  long launch;
};

// Storages that lie at one address share one.
struct Memory {
  int made_in = UNKNOWN, used_in = UNKNOWN, site = 0;
  bool is_pythons = false;
  std::vector<Use> uses;
};

struct Known {
  WeakStorage storage;
  const void* address;
  std::shared_ptr<Memory> memory;
};

struct Stream {
  py::str name;
  long count = 0;
  // Memory that was given back is still used by others: what is made next may be of it.
  bool has_freed = false;
};

class Order {
 public:
  bool is_on = false, is_pythons = false, has_gone = false;
  int num_quiet = 0;
  long num_steps = 0, num_operations = 0;
  std::unordered_set<Storage*> watched_of_host;
  // Where tensors lie on no GPU, but are said to: tests.
  bool is_pretended = false;
  long stream_of_pretended = 0;
  std::unordered_map<Storage*, WeakStorage> pretended;
  py::object python;
  size_t max_uses = 0;

  bool is_watching() const { return is_on && num_quiet == 0; }

  int place_of(const at::Tensor& t) const {
    if (!t.has_storage()) return UNKNOWN;
    if (is_pretended) {
      auto found = pretended.find(storage_of(t));
      return found != pretended.end() && !found->second.expired() ? 0 : UNKNOWN;
    }
    return t.is_cuda() ? t.get_device() : UNKNOWN;
  }

  void mark(const at::Tensor& t) {
    pretended.insert_or_assign(storage_of(t), WeakStorage(t.storage().getWeakStorageImpl()));
  }

  // The number of the stream that this thread's work goes to on a GPU.
  int stream_now(int device) {
    long id = stream_of_pretended;
    if (!is_pretended) {
      c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
      id = guard.getStream(c10::Device(c10::DeviceType::CUDA, (c10::DeviceIndex)device)).id();
    }
    auto found = by_id_.find({device, id});
    if (found != by_id_.end()) return found->second;
    int number = stream_of(python.attr("stream_now")(device));
    by_id_[{device, id}] = number;
    return number;
  }

  int stream_of(const py::str& name) {
    auto [at, is_new] = by_name_.try_emplace(name.cast<std::string>(), (int)streams.size());
    if (is_new) streams.push_back({name});
    return at->second;
  }

  std::vector<Stream> streams;

  long tick(int stream) { return ++streams[stream].count; }

  void drain() {
    if (has_gone) {
      has_gone = false;
      python.attr("drain")();
    }
  }

  // Memory of this storage; nothing is kept of one that was resized since.
  Known* find(const at::Tensor& t) {
    auto found = known_.find(storage_of(t));
    return found != known_.end() ? &found->second : nullptr;
  }

  // A new memory; nobody saw it made where `stream` is UNKNOWN.
  void make(const at::Tensor& t, int stream, int site) {
    if (stream != UNKNOWN && (is_pythons || streams[stream].has_freed)) {
      hand_over(t);
      python.attr("note_new")(wrapped(t), streams[stream].name, texts.at(site));
      return;
    }
    Memory& memory = *add(t).memory;
    if (memory.made_in == UNKNOWN && memory.used_in == UNKNOWN && !memory.is_pythons) {
      memory.made_in = stream;
      memory.site = site;
    }
  }

  // Notes a use; False where it is for Python to note.
  bool use(const at::Tensor& t, int stream, Use&& use) {
    Known* known = find(t);
    bool is_gone = known != nullptr && known->address != t.storage().data() &&
                   !known->memory->is_pythons;
    if (known == nullptr || is_gone) known = &add(t);
    Memory& memory = *known->memory;
    if (memory.is_pythons) return false;
    bool is_others = (memory.made_in != UNKNOWN && memory.made_in != stream) ||
                     (memory.used_in != UNKNOWN && memory.used_in != stream);
    if (is_others || is_pythons) {
      hand_over(t);
      return false;
    }
    memory.used_in = stream;
    auto& uses = memory.uses;
    // A later use stands for an earlier one: whatever is unordered with the one is with the other.
    uses.erase(std::remove_if(uses.begin(), uses.end(), [&](const Use& other) {
      return (use.is_write || !other.is_write) && use.region.covers(other.region);
    }), uses.end());
    if (uses.size() >= max_uses) uses.erase(uses.begin());
    uses.push_back(std::move(use));
    return true;
  }

  // From now on this memory is Python's, with the uses that it has had.
  void hand_over(const at::Tensor& t) {
    Known* known = find(t);
    bool is_unknown = known == nullptr;
    if (is_unknown) known = &add(t);
    Memory& memory = *known->memory;
    if (memory.is_pythons) return;
    memory.is_pythons = true;
    if (is_unknown || known->address != t.storage().data()) return;
    py::list uses;
    for (const Use& use : memory.uses) {
      py::tuple shape = py::cast(std::vector<int64_t>(use.region.shape.begin(), use.region.shape.end()));
      py::tuple strides = py::cast(std::vector<int64_t>(use.region.strides.begin(), use.region.strides.end()));
      uses.append(py::make_tuple(
          use.number, use.num_steps, use.region.address, shape, strides, use.region.item_bytes,
          use.is_write, texts.at(use.what), texts.at(use.site), use.launch, texts.at(use.name)));
    }
    py::object made_in = memory.made_in == UNKNOWN ? py::str("") : streams[memory.made_in].name;
    py::object used_in = memory.used_in == UNKNOWN ? py::str("") : streams[memory.used_in].name;
    memory.uses.clear();
    python.attr("adopt")(wrapped(t), made_in, used_in, texts.at(memory.site), uses);
  }

 private:
  struct Hash {
    size_t operator()(const std::pair<int, long>& key) const { return key.first * 31 + key.second; }
  };
  std::unordered_map<std::pair<int, long>, int, Hash> by_id_;
  std::unordered_map<std::string, int> by_name_;
  std::unordered_map<Storage*, Known> known_;
  std::unordered_map<const void*, Storage*> at_;
  size_t num_alive_ = 0;

  Known& add(const at::Tensor& t) {
    if (known_.size() > 2 * num_alive_ + 4096) forget();
    Storage* storage = storage_of(t);
    const void* address = t.storage().data();
    std::shared_ptr<Memory> memory;
    auto before = at_.find(address);
    if (address != nullptr && before != at_.end() && before->second != storage) {
      auto there = known_.find(before->second);
      if (there != known_.end() && !there->second.storage.expired()) memory = there->second.memory;
    }
    if (!memory) memory = std::make_shared<Memory>();
    at_[address] = storage;
    auto made = Known{WeakStorage(t.storage().getWeakStorageImpl()), address, memory};
    return known_.insert_or_assign(storage, std::move(made)).first->second;
  }

  void forget() {
    for (auto it = known_.begin(); it != known_.end();) {
      if (!it->second.storage.expired()) {
        ++it;
        continue;
      }
      auto found = at_.find(it->second.address);
      if (found != at_.end() && found->second == it->first) at_.erase(found);
      it = known_.erase(it);
    }
    num_alive_ = known_.size();
    for (auto* set : {&pretended})
      for (auto it = set->begin(); it != set->end();)
        it = it->second.expired() ? set->erase(it) : std::next(it);
  }
};

inline Order& order = *new Order;

// One call of an operation, seen from before it runs to after it.
class OrderCall {
 public:
  OrderCall(const Facts& facts, const torch::jit::Stack& stack, size_t num_arguments)
      : facts_(facts) {
    if (facts.sort == Sort::NOTHING || !order.is_watching()) return;
    is_seen_ = true;
    auto arguments = torch::jit::last(stack, num_arguments);
    for (const Parameter& parameter : facts.tensors)
      each_tensor(arguments[parameter.place], [&](const at::Tensor& t) {
        int place = order.place_of(t);
        // A copy between two GPUs is made by that of its source.
        if (place != UNKNOWN && (device_ == UNKNOWN || facts.sort == Sort::COPY)) device_ = place;
        given_.push_back({t, place, parameter});
      });
    if (facts.sort == Sort::RECORD_STREAM && arguments[1].isStream())
      kept_for_ = arguments[1].toStream();
    if (facts.place_non_blocking >= 0) {
      const auto& asked = arguments[facts.place_non_blocking];
      is_asked_ = asked.isBool() && asked.toBool();
    }
    if (device_ != UNKNOWN) stream_ = order.stream_now(device_);
    if (order.is_pretended)
      for (const auto& value : arguments)
        each_tensor(value, [&](const at::Tensor& t) {
          is_of_pretended_ = is_of_pretended_ || order.place_of(t) != UNKNOWN;
          if (t.has_storage()) read_.push_back(storage_of(t));
        });
  }

  void end(const torch::jit::Stack& stack, size_t num_returns) {
    if (!is_seen_) return;
    order.drain();
    if (facts_.sort == Sort::RECORD_STREAM) {
      if (kept_for_ && device_ != UNKNOWN) keep_for();
      return;
    }
    auto returns = torch::jit::last(stack, num_returns);
    if (is_of_pretended_) mark_results(returns);
    if (device_ == UNKNOWN) {
      for (const Given& given : given_) use_of_host(given);
      for (const auto& value : returns)
        each_tensor(value, [&](const at::Tensor& t) {
          if (device_ == UNKNOWN && (device_ = order.place_of(t)) != UNKNOWN)
            stream_ = order.stream_now(device_);
        });
      if (device_ == UNKNOWN) return;
    }
    order.num_operations++;
    number_ = order.tick(stream_);
    site_ = sites.now();
    if (facts_.sort == Sort::NUMBER) order.python.attr("host_waits")(order.streams[stream_].name);
    bool is_by_host = facts_.sort == Sort::COPY && copy(returns);
    for (const Given& given : given_) {
      if (given.place != UNKNOWN)
        use(given.tensor, given.parameter.is_write, given.parameter.name);
      else if (!is_by_host)
        use_of_host(given);
    }
    for (const auto& value : returns)
      each_tensor(value, [&](const at::Tensor& t) { result(t); });
  }

 private:
  struct Given {
    at::Tensor tensor;
    int place;
    Parameter parameter;
  };
  const Facts& facts_;
  c10::SmallVector<Given, 4> given_;
  int device_ = UNKNOWN, stream_ = UNKNOWN, site_ = 0;
  long number_ = 0;
  std::optional<c10::Stream> kept_for_;
  bool is_seen_ = false, is_asked_ = false, is_of_pretended_ = false;
  std::vector<Storage*> read_;

  // Of what is said to lie on a GPU: so does what comes of it.
  void mark_results(c10::ArrayRef<c10::IValue> returns) {
    for (const auto& value : returns)
      each_tensor(value, [&](const at::Tensor& t) {
        bool is_new = t.has_storage() &&
                      std::find(read_.begin(), read_.end(), storage_of(t)) == read_.end();
        if (is_new) order.mark(t);
      });
  }

  void use(const at::Tensor& t, bool is_write, int name) {
    Use made{number_, order.num_steps, Region(t), is_write, facts_.what, name, site_, 0};
    if (!order.use(t, stream_, std::move(made)))
      order.python.attr("use")(
          wrapped(t), order.streams[stream_].name, number_, is_write, texts.at(facts_.what),
          texts.at(name), texts.at(site_));
  }

  void use_of_host(const Given& given) {
    if (!order.watched_of_host.empty() && given.tensor.has_storage() &&
        order.watched_of_host.count(storage_of(given.tensor)))
      order.python.attr("use_of_host")(
          wrapped(given.tensor), given.parameter.is_write, texts.at(facts_.what));
  }

  void result(const at::Tensor& t) {
    if (order.place_of(t) == UNKNOWN) return;
    Known* known = order.find(t);
    if (known != nullptr && known->address == t.storage().data()) return;
    order.make(t, stream_, site_);
    if (facts_.makes) use(t, true, texts.of("result"));
  }

  // A copy between host and GPU; False for another one.
  bool copy(c10::ArrayRef<c10::IValue> returns) {
    if (given_.empty() || returns.empty() || !returns[0].isTensor()) return false;
    const Given& source = given_.back();
    at::Tensor into = given_.size() > 1 ? given_[0].tensor : returns[0].toTensor();
    bool is_out = order.place_of(into) == UNKNOWN;
    if (is_out == (source.place == UNKNOWN)) return false;
    order.python.attr("copy")(
        wrapped(source.tensor), wrapped(into),
        py::make_tuple(order.streams[stream_].name, number_), texts.at(facts_.what),
        texts.at(site_), is_out, is_asked_);
    return true;
  }

  void keep_for() {
    order.hand_over(given_[0].tensor);
    order.python.attr("keep_for")(
        wrapped(given_[0].tensor), (int64_t)kept_for_->id(), (int)kept_for_->device_index(),
        (int)kept_for_->device_type());
  }
};

}  // namespace hypo
