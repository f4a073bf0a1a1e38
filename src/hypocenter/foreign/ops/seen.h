// What both watches know of an operation: its facts, its tensors, and the line that asked for it.
//
// All of it is guarded by Python's lock (GIL): whoever touches it holds that. Nothing is taken down
// at the end of the process: it holds objects of a Python that is no more by then.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include <ATen/ATen.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <typeindex>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace torch::jit {
py::object toPyObject(c10::IValue value);
}

namespace hypo {

using c10::DispatchKey;
using c10::DispatchKeySet;
using Storage = c10::StorageImpl;
using WeakStorage = c10::weak_intrusive_ptr<Storage>;

// Nobody else uses it: torch has it for tests of such modes as this one.
constexpr auto KEY = DispatchKey::TESTING_ONLY_GenericMode;

// What torch does within is this package's own, and needs no gradient.
struct Quiet {
  c10::impl::ExcludeDispatchKeyGuard key{KEY};
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
  // Nor does a mode of the program's see it.
  c10::impl::ExcludeDispatchKeyGuard modes{
      DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot})};
  at::AutoDispatchBelowADInplaceOrView below;
};

enum class Sort { PLAIN, NOTHING, COPY, NUMBER, RECORD_STREAM };
enum class Role { PASS, EMPTY, ITEM, TEST, PLAIN };

struct Parameter {
  int place;
  bool is_write;
  int name;
};

// Of one overload.
struct Facts {
  const c10::FunctionSchema* schema = nullptr;
  bool is_composite = false;
  py::object overload;
  Sort sort = Sort::PLAIN;
  bool makes = false;
  int what = 0;
  std::vector<Parameter> tensors;
  int place_non_blocking = -1;
  Role role = Role::PASS;
  std::vector<int> written;
  std::vector<bool> is_new;
  bool is_lifted = false, is_compare = false;
};

// Texts by number: lines, names of operations and of parameters.
class Texts {
 public:
  int of(const std::string& text) {
    auto [at, is_new] = known_.try_emplace(text, (int)all_.size());
    if (is_new) all_.push_back(text);
    return at->second;
  }
  const std::string& at(int number) const { return all_.at(number); }

 private:
  std::unordered_map<std::string, int> known_{{"", 0}};
  std::vector<std::string> all_{""};
};

inline Texts& texts = *new Texts;

// The nearest line of the program's own, as `caller.py` looks for it.
class Sites {
 public:
  // 0: nobody's, 1: installed, 2: the program's own.
  py::function whose;

  void forget() {
    sites_.clear();
    for (auto& [code, kind] : kinds_) Py_DECREF(code);
    kinds_.clear();
  }

  int now() {
    int nearest = 0;
    PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
    while (frame != nullptr) {
      PyCodeObject* code = PyFrame_GetCode(frame);
      int kind = kind_of(code);
      if (kind == 2 || (kind == 1 && nearest == 0)) {
        int site = site_of(code, frame);
        if (kind == 2) {
          Py_DECREF(code);
          Py_DECREF(frame);
          return site;
        }
        nearest = site;
      }
      Py_DECREF(code);
      PyFrameObject* outer = PyFrame_GetBack(frame);
      Py_DECREF(frame);
      frame = outer;
    }
    return nearest;
  }

 private:
  static constexpr size_t MOST = 1 << 16;
  struct Hash {
    size_t operator()(const std::pair<PyCodeObject*, int>& key) const {
      return std::hash<void*>()(key.first) * 31 + key.second;
    }
  };
  // The code is kept, so that no other one gets its address.
  std::unordered_map<PyCodeObject*, int> kinds_;
  std::unordered_map<std::pair<PyCodeObject*, int>, int, Hash> sites_;

  int kind_of(PyCodeObject* code) {
    auto found = kinds_.find(code);
    if (found != kinds_.end()) return found->second;
    if (kinds_.size() >= MOST) forget();
    py::object file = py::reinterpret_borrow<py::object>((PyObject*)code).attr("co_filename");
    int kind = whose(file).cast<int>();
    Py_INCREF(code);
    kinds_[code] = kind;
    return kind;
  }

  int site_of(PyCodeObject* code, PyFrameObject* frame) {
    std::pair<PyCodeObject*, int> key{code, PyFrame_GetLasti(frame)};
    auto found = sites_.find(key);
    if (found != sites_.end()) return found->second;
    py::object file = py::reinterpret_borrow<py::object>((PyObject*)code).attr("co_filename");
    std::string line = std::to_string(PyFrame_GetLineNumber(frame));
    return sites_[key] = texts.of(file.cast<std::string>() + ":" + line);
  }
};

inline Sites& sites = *new Sites;

// The facts of each overload, which Python reads from its schema once.
class Table {
 public:
  py::function describe;

  Facts& of(const c10::OperatorHandle& op) {
    const void* key = &op.schema();
    auto found = known_.find(key);
    if (found != known_.end()) return *found->second;
    auto made = std::make_unique<Facts>();
    made->schema = &op.schema();
    made->is_composite = op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
    if (!made->is_composite) read(op, *made);
    return *(known_[key] = std::move(made));
  }

 private:
  std::unordered_map<const void*, std::unique_ptr<Facts>> known_;

  void read(const c10::OperatorHandle& op, Facts& made) {
    py::dict told = describe(op.operator_name().name, op.operator_name().overload_name);
    made.overload = told["overload"];
    made.sort = (Sort)told["sort"].cast<int>();
    made.makes = told["makes"].cast<bool>();
    made.what = texts.of(told["what"].cast<std::string>());
    for (auto& [place, is_write, name] :
         told["tensors"].cast<std::vector<std::tuple<int, bool, std::string>>>())
      made.tensors.push_back({place, is_write, texts.of(name)});
    made.place_non_blocking = told["place_non_blocking"].cast<int>();
    made.role = (Role)told["role"].cast<int>();
    made.written = told["written"].cast<std::vector<int>>();
    made.is_new = told["is_new"].cast<std::vector<bool>>();
    made.is_lifted = told["is_lifted"].cast<bool>();
    made.is_compare = told["is_compare"].cast<bool>();
  }
};

inline Table& table = *new Table;

inline py::object wrapped(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

inline at::Tensor unwrapped(const py::handle& tensor) {
  return THPVariable_Unpack(tensor.ptr());
}

inline Storage* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// A value as Python has it: types, layouts and formats of memory are numbers here.
inline py::object as_python(const c10::Argument& argument, const c10::IValue& value) {
  if (value.isInt()) {
    c10::TypePtr type = argument.real_type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    int64_t number = value.toInt();
    PyObject* found = nullptr;
    if (type->kind() == c10::TypeKind::ScalarTypeType)
      found = (PyObject*)torch::getTHPDtype((c10::ScalarType)number);
    else if (type->kind() == c10::TypeKind::LayoutType)
      found = (PyObject*)torch::getTHPLayout((c10::Layout)number);
    else if (type->kind() == c10::TypeKind::MemoryFormatType)
      found = torch::utils::getTHPMemoryFormat((c10::MemoryFormat)number);
    if (found != nullptr) return py::reinterpret_borrow<py::object>(found);
  }
  return torch::jit::toPyObject(value);
}

// Arguments and keywords of a call, without those that are left out.
inline std::pair<py::tuple, py::dict> as_python(const c10::FunctionSchema& schema,
                                                c10::ArrayRef<c10::IValue> values) {
  std::vector<py::object> arguments;
  py::dict keywords;
  size_t num_given = 0;
  for (size_t at = 0; at < values.size(); at++) {
    const auto& argument = schema.arguments()[at];
    bool is_default = argument.default_value() && *argument.default_value() == values[at];
    if (argument.kwarg_only()) {
      if (!is_default) keywords[py::str(argument.name())] = as_python(argument, values[at]);
      continue;
    }
    arguments.push_back(as_python(argument, values[at]));
    if (!is_default) num_given = arguments.size();
  }
  arguments.resize(num_given);
  return {py::tuple(py::cast(arguments)), keywords};
}

// Calls `take` with each tensor that a value is, or lists.
template <typename Take>
void each_tensor(const c10::IValue& value, Take take) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) take(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& part : value.toTensorVector())
      if (part.defined()) take(part);
  } else if (value.isList()) {
    for (const c10::IValue& part : value.toListRef())
      if (part.isTensor() && part.toTensor().defined()) take(part.toTensor());
  }
}

}  // namespace hypo
