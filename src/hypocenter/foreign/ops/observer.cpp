// Sees each of torch's operations without Python's help, and tells the two watches of it.
//
// Stands above autograd, in the place of a key that torch has for tests of modes. An operation that
// is made of others is let through: those come here by themselves. What an operation's own kernel
// calls is its own business, and does not come here.

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <atomic>

#include "numbers.h"
#include "order.h"

namespace hypo {

// Others look at it first: functional transforms, modes and tensors of Python's, traces.
static const DispatchKeySet OTHERS({
    DispatchKey::Python, DispatchKey::Fake, DispatchKey::Functionalize,
    DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::FuncTorchDynamicLayerFrontMode,
    DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper,
    DispatchKey::FuncTorchVmapMode, DispatchKey::Batched, DispatchKey::VmapMode,
    DispatchKey::Tracer});

// Another watch's, in Python, of what nobody has written: it asks for operations now and then.
static py::object& reads = *new py::object;
static bool has_reads = false;
// Whether anything is to be seen: not before it begins, and not when Python ends.
static std::atomic<bool> is_begun{false};

// Autocast casts what an operation is given, and calls it once more.
static bool is_cast(const c10::OperatorHandle& op, DispatchKeySet keys) {
  for (DispatchKey key : keys & c10::autocast_dispatch_keyset)
    if (op.hasKernelForDispatchKey(key)) return true;
  return false;
}

// Whether it goes to a tensor's own class in Python, and to no mode, or is traced: it is not seen
// then.
static bool is_hidden_call(DispatchKeySet below) {
  if (below.has(DispatchKey::Tracer)) return true;
  return below.has(DispatchKey::Python) && !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

static void tell_failed(py::error_already_set& error) {
  reads.attr("report_failure")(error.value());
}

// Does it, and keeps what goes wrong from the program.
template <typename Do>
static void attempt(Do what) {
  py::gil_scoped_acquire lock;
  try {
    what();
  } catch (py::error_already_set& error) {
    try {
      tell_failed(error);
    } catch (py::error_already_set&) {
    }
  } catch (const std::exception& error) {
    try {
      reads.attr("report_failure")(py::reinterpret_borrow<py::object>(PyExc_RuntimeError)(error.what()));
    } catch (py::error_already_set&) {
    }
  }
}

static void observe(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  DispatchKeySet below = keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, KEY);
  if (!is_begun || below.has_any(OTHERS) || is_cast(op, below)) {
    if (is_begun && is_hidden_call(below))
      attempt([] { numbers.num_hidden += numbers.is_watching(); });
    op.redispatchBoxed(below, stack);
    return;
  }
  const auto& schema = op.schema();
  size_t num_arguments = schema.arguments().size(), num_returns = schema.returns().size();
  Facts* facts = nullptr;
  std::optional<NumbersCall> of_numbers;
  std::optional<OrderCall> of_order;
  py::object asked;
  bool is_read = false;
  attempt([&] {
    c10::impl::ExcludeDispatchKeyGuard key(KEY);
    facts = &table.of(op);
    if (facts->is_composite) return;
    if (numbers.is_on) of_numbers.emplace(*facts, *stack, num_arguments);
    if (order.is_on) of_order.emplace(*facts, *stack, num_arguments);
    is_read = has_reads && reads.attr("is_needed").cast<bool>();
    if (is_read) {
      auto [values, keywords] = as_python(schema, torch::jit::last(*stack, num_arguments));
      asked = py::make_tuple(facts->overload, values, keywords);
    }
  });
  if (facts == nullptr || facts->is_composite) {
    op.redispatchBoxed(below, stack);
    return;
  }
  c10::impl::ExcludeDispatchKeyGuard key(KEY);
  op.redispatchBoxed(below, stack);
  if (of_numbers || of_order || is_read) {
    attempt([&] {
      if (of_order) of_order->end(*stack, num_returns);
      if (of_numbers) of_numbers->end(*stack, num_returns);
      of_order.reset();
      of_numbers.reset();
      if (is_read) {
        py::object result = py::none();
        auto returns = torch::jit::last(*stack, num_returns);
        if (num_returns == 1) {
          result = torch::jit::toPyObject(returns[0]);
        } else {
          py::list parts;
          for (const auto& value : returns) parts.append(torch::jit::toPyObject(value));
          result = py::tuple(parts);
        }
        reads.attr("note")(asked, result);
        asked = py::object();
      }
    });
  }
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&observe>());
}

static py::object content_of(const at::Tensor& tensor, long number) {
  Quiet quiet;
  auto found = numbers.content(tensor, number);
  return found ? wrapped(*found) : py::none();
}

// An operation as `ops.py` has it, by its place among those that are looked at.
static py::tuple op_at(int at) {
  const Op& op = numbers.ops.at(at);
  py::list results;
  for (const auto& result : op.results) results.append(wrapped(result));
  py::object overload = py::none();
  py::tuple arguments;
  py::dict keywords;
  if (op.facts != nullptr) {
    overload = op.facts->overload;
    std::tie(arguments, keywords) = as_python(*op.facts->schema, op.arguments);
  }
  return py::make_tuple(op.number, overload, arguments, keywords, results, texts.at(op.site), texts.at(op.node),
                        texts.at(op.forward_site));
}

static std::vector<at::Tensor> unwrapped_all(const py::list& tensors) {
  std::vector<at::Tensor> found;
  for (const auto& tensor : tensors) found.push_back(unwrapped(tensor));
  return found;
}

PYBIND11_MODULE(HYPO_NAME, module) {
  module.def("begin", [](py::function describe, py::function whose, py::object asked) {
    table.describe = describe;
    sites.whose = whose;
    sites.forget();
    reads = asked;
    is_begun = true;
  });
  module.def("end", [] {
    is_begun = false;
    c10::impl::tls_set_dispatch_key_included(KEY, false);
  });
  // Whether this thread's operations are seen; a backward pass has it from who asked for it.
  module.def("see", [](bool is_seen) { c10::impl::tls_set_dispatch_key_included(KEY, is_seen); });
  module.def("leave_out", [](bool is_out) {
    bool was = c10::impl::tls_is_dispatch_key_excluded(KEY);
    c10::impl::tls_set_dispatch_key_excluded(KEY, is_out);
    return was;
  });
  module.def("need_reads", [](bool is_needed) { has_reads = is_needed; });
  module.def("site_now", [] { return texts.at(sites.now()); });

  auto n = module.def_submodule("numbers");
  n.def("start", [](py::function look, py::function read, const py::dict& limits) {
    numbers.look = look;
    numbers.read = read;
    numbers.max_ops = limits["ops"].cast<size_t>();
    numbers.max_results = limits["results"].cast<size_t>();
    numbers.max_bytes = limits["bytes"].cast<size_t>();
    numbers.max_gpu_bytes = limits["gpu_bytes"].cast<size_t>();
    numbers.max_filled = limits["filled_bytes"].cast<size_t>();
    numbers.max_single = limits["single"].cast<int>();
    numbers.undefined_byte = limits["undefined"].cast<int>();
    numbers.number = numbers.num_in_graphs = numbers.num_hidden = 0;
    numbers.is_on = true;
  });
  n.def("stop", [] {
    numbers.is_on = false;
    numbers.clear();
  });
  n.def("set_gpu_bytes", [](size_t num_bytes) { numbers.max_gpu_bytes = num_bytes; });
  n.def("flush", [](bool is_whole) { numbers.flush(is_whole); });
  n.def("set_busy", [](bool is_busy) { return std::exchange(numbers.is_busy, is_busy); });
  n.def("set_paused", [](bool is_paused) { numbers.is_paused = is_paused; });
  n.def("set_capturing", [](bool is_capturing) { numbers.is_capturing = is_capturing; });
  n.def("set_backward_site", [](const std::string& site) { numbers.backward_site = texts.of(site); });
  n.def("counts", [] { 
    return py::make_tuple(numbers.number, numbers.num_in_graphs, numbers.num_hidden);
  });
  n.def("next_number", [] { return ++numbers.number; });
  n.def("op", &op_at);
  n.def("num_ops", [] { return numbers.ops.size(); });
  n.def("content", [](py::handle tensor, long number) { return content_of(unwrapped(tensor), number); });
  n.def("overwriters", [](const std::vector<long>& memories, const std::vector<int>& flagged) {
    return numbers.overwriters(memories, flagged);
  });
  n.def("undefined_site", [](long storage) -> py::object {
    int site = numbers.undefined_site((Storage*)storage);
    return site < 0 ? py::object(py::none()) : py::object(py::str(texts.at(site)));
  });
  // Copies of what a launch is about to write, and the launch once it has been made.
  n.def("copies", [](const py::list& tensors) {
    std::vector<std::pair<py::object, py::object>> found;
    std::vector<at::Tensor> written;
    for (const at::Tensor& tensor : unwrapped_all(tensors)) written.push_back(bare(tensor));
    for (const Before& before : numbers.copies(written, true))
      found.emplace_back(wrapped(before.written), wrapped(before.copy));
    return found;
  });
  n.def("add_launch", [](long number, const py::list& results, const py::list& before,
                         const std::string& site) {
    Op op;
    op.number = number;
    for (const at::Tensor& result : unwrapped_all(results))
      op.results.push_back(is_parameter(result) ? result : bare(result));
    op.is_written = true;
    op.site = texts.of(site);
    for (const auto& pair : before)
      op.before.push_back({unwrapped(pair[py::int_(0)]), unwrapped(pair[py::int_(1)])});
    numbers.add(std::move(op));
  });

  auto o = module.def_submodule("order");
  o.def("start", [](py::object python, size_t max_uses, bool is_pretended) {
    order = Order();
    order.python = python;
    order.max_uses = max_uses;
    order.is_pretended = is_pretended;
    order.is_on = true;
  });
  o.def("stop", [] { order = Order(); });
  o.def("set_pretended_stream", [](long number) { order.stream_of_pretended = number; });
  o.def("place_of", [](py::handle tensor) { return order.place_of(unwrapped(tensor)); });
  o.def("mark", [](py::handle tensor) { order.mark(unwrapped(tensor)); });
  o.def("quiet", [](int more) { order.num_quiet += more; });
  o.def("note_gone", [] { order.has_gone = true; });
  o.def("set_pythons", [](bool is_pythons) { order.is_pythons = is_pythons; });
  o.def("set_num_steps", [](long num_steps) { order.num_steps = num_steps; });
  o.def("num_operations", [] { return order.num_operations; });
  o.def("set_has_freed", [](const py::str& stream, bool has_freed) {
    order.streams[order.stream_of(stream)].has_freed = has_freed;
  });
  o.def("set_count", [](const py::str& stream, long count) {
    order.streams[order.stream_of(stream)].count = count;
  });
  o.def("tick", [](const py::str& stream) { return order.tick(order.stream_of(stream)); });
  o.def("counts", [] {
    std::vector<std::pair<py::str, long>> found;
    for (const Stream& stream : order.streams) found.emplace_back(stream.name, stream.count);
    return found;
  });
  o.def("watch_of_host", [](py::handle tensor, bool is_watched) {
    Storage* storage = storage_of(unwrapped(tensor));
    if (is_watched)
      order.watched_of_host.insert(storage);
    else
      order.watched_of_host.erase(storage);
  });
  o.def("hand_over", [](py::handle tensor) { order.hand_over(unwrapped(tensor)); });
  o.def("use", [](py::handle tensor, const py::str& stream, long number, bool is_write,
                  const std::string& what, const std::string& name, const std::string& site,
                  long launch) {
    at::Tensor t = unwrapped(tensor);
    Use made{number, order.num_steps, Region(t), is_write, texts.of(what), texts.of(name),
             texts.of(site), launch};
    return order.use(t, order.stream_of(stream), std::move(made));
  });
  o.def("make", [](py::handle tensor, const py::str& stream, const std::string& site) {
    order.make(unwrapped(tensor), order.stream_of(stream), texts.of(site));
  });
}

}  // namespace hypo
