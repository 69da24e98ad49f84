// The Python module fastfact._torch (see bind_module.h) for the PyTorch and Python that it was built with: tensors are
// asked as PyTorch's own code asks them, and a layer in training is a node of its graph in C++.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <Python.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <memory>

#include "bind_direct.h"
#include "bind_python.h"

namespace {

using namespace fastfact::python;
using fastfact::direct::Library;

// Of a tensor, or nullptr for None.
bool address_of(PyObject* tensor, void** out) {
  *out = nullptr;
  if (tensor == Py_None) return true;
  if (!THPVariable_Check(tensor)) {
    PyErr_SetString(PyExc_TypeError, "must be a tensor or None");
    return false;
  }
  *out = THPVariable_Unpack(tensor).unsafeGetTensorImpl();
  return true;
}

int is_negative(PyObject* tensor) { return THPVariable_Unpack(tensor).is_neg(); }

int requires_grad(PyObject* tensor) { return THPVariable_Unpack(tensor).requires_grad(); }

bool version_of(PyObject* tensor, int64_t* out) {
  const at::Tensor& t = THPVariable_Unpack(tensor);
  if (t.is_inference()) {
    PyErr_SetString(PyExc_RuntimeError, "Inference tensors do not track version counter.");
    return false;
  }
  *out = t._version();
  return true;
}

// Whether something transforms what PyTorch computes now, dispatches it elsewhere or, unless in a backward, traces it.
int is_disturbed(bool in_backward) {
  using c10::DispatchKey;
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  if (included.has(DispatchKey::FuncTorchDynamicLayerFrontMode) || c10::impl::TorchDispatchModeTLS::stack_len()) {
    return true;
  }
  return !in_backward && (at::impl::PythonTorchFunctionTLS::stack_len() || torch::jit::tracer::isTracing());
}

// What autocast has computed on the device of a library, 0 for nothing.
bool autocast_of(const Library* library, int64_t* out) {
  const auto device = library->device_type == aoti_torch_device_type_cpu() ? at::kCPU : at::kCUDA;
  *out = at::autocast::is_autocast_enabled(device) ? 1 + int64_t(at::autocast::get_autocast_dtype(device)) : 0;
  return true;
}

at::Tensor taken(AtenTensorHandle handle) {
  if (!handle) return {};
  const std::unique_ptr<at::Tensor> owned(reinterpret_cast<at::Tensor*>(handle));
  return std::move(*owned);
}

// The tensors of these handles, which are taken over, None for a null one.
bool wrap(AtenTensorHandle* handles, int count, PyObject** out) {
  bool failed = false;
  for (int n = 0; n < count; ++n) {
    out[n] = handles[n] ? THPVariable_Wrap(taken(handles[n])) : none();
    failed |= !out[n];
  }
  for (int n = 0; n < count && failed; ++n) Py_CLEAR(out[n]);
  return !failed;
}

}  // namespace

#include "bind_module.h"

namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

std::atomic<bool> dispatches{true};  // see `tell`

// A tensor of PyTorch's own, on which nothing is to be done first.
bool is_as_it_is(const at::Tensor& t) {
  using namespace c10;
  if (!t.defined()) return true;
  const auto rest =
      t.key_set() - autograd_dispatch_keyset - autocast_dispatch_keyset - DispatchKeySet(DispatchKey::ADInplaceOrView);
  return rest.highestFunctionalityKey() == DispatchKey::Dense;
}

[[noreturn]] void raise() {
  python_error error;
  error.persist();
  throw error;
}

// The backward of a layer: by the library or, where that does not serve it, by the function of the plan, in Python.
struct Backward {
  Plan plan;
  PyObject* of;  // the plan in Python
  int count;     // of what was saved

  using Saved = std::array<at::Tensor, kMost>;
  using Needs = std::vector<bool>;

  // The gradients of what `apply` was given, of those that it needs.
  variable_list operator()(const Needs& needs, const at::Tensor& grad, const Saved& saved) const {
    variable_list out(kGiven);
    if (!by_library(needs, grad, saved, out)) by_function(needs, grad, saved, out);
    return out;
  }

 private:
  bool by_library(const Needs& needs, const at::Tensor& grad, const Saved& saved, variable_list& out) const {
    if (at::GradMode::is_enabled() || !dispatches || torch::autograd::ForwardADLevel::try_get_by_idx(0)) return false;
    if (is_disturbed(true) || !is_as_it_is(grad) || (plan.makes && !saved[kKept].defined())) return false;
    void* t[kMost] = {};
    for (int n = 0; n < count; ++n) {
      if (!is_as_it_is(saved[n])) return false;
      if (saved[n].defined()) t[n] = saved[n].unsafeGetTensorImpl();
    }
    const int* const order = order_of(plan);
    int64_t asked = 0;
    for (int n = 0; n < 5; ++n) asked |= int64_t{needs[order[n]]} << n;
    const at::AutoDispatchBelowADInplaceOrView guard;
    AtenTensorHandle found[5];
    if (!compute_backward(plan, asked, grad.unsafeGetTensorImpl(), t, found)) return false;
    for (int n = 0; n < 5; ++n) out[order[n]] = taken(found[n]);
    return true;
  }

  void by_function(const Needs& needs, const at::Tensor& grad, const Saved& saved, variable_list& out) const {
    const pybind11::gil_scoped_acquire held;
    const Ref needed(PyTuple_New(1 + kGiven)), tensors(PyTuple_New(count));
    if (!needed || !tensors) raise();
    PyTuple_SetItem(needed, 0, PyBool_FromLong(false));
    for (int n = 0; n < kGiven; ++n) PyTuple_SetItem(needed, 1 + n, PyBool_FromLong(needs[n]));
    for (int n = 0; n < count; ++n) PyTuple_SetItem(tensors, n, THPVariable_Wrap(saved[n]));
    const Ref dy(THPVariable_Wrap(grad));
    PyObject* const args[] = {of, needed, dy, tensors};
    const Ref given(tuple_of(args, 4)), found(given ? PyObject_CallObject(differentiate, given) : nullptr);
    if (!found) raise();
    for (int n = 0; n < kGiven; ++n) {
      PyObject* const one = PyTuple_GetItem(found, 1 + n);
      if (one && one != Py_None) out[n] = THPVariable_Unpack(one);
    }
  }
};

// A layer in training, with an edge for each tensor that it was given.
struct LayerNode final : Node {
  LayerNode(const Plan& plan, PyObject* of, const Backward::Saved& saved)
      : backward_{plan, of, saved[kKept].defined() ? int{kMost} : int{kGiven}},
        of_((Py_INCREF(of), of), getPyInterpreter()) {
    for (int n = 0; n < backward_.count; ++n) saved_[n] = SavedVariable(saved[n], false);
  }

  std::string name() const override { return "DirectBackward"; }

  variable_list apply(variable_list&& grads) override {
    return grads[0].defined() ? backward_(needs(), grads[0], unpacked()) : variable_list(kGiven);
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& one : saved_) one.reset_data();
    released_ = true;
  }

  // For compiled autograd, which records a backward as one of PyTorch's graphs: the layer is a call in it.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(reinterpret_cast<uint64_t>(backward_.of));
    for (int n = 0; n < backward_.count; ++n) args.collect(saved_[n], false);
    for (const bool needed : needs()) args.collect(needed);
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swapped) override {
    using namespace torch::dynamo::autograd;
    for (int n = 0; n < backward_.count; ++n) swapped.before(saved_[n]);
    {
      const pybind11::gil_scoped_acquire held;
      Py_INCREF(backward_.of);  // for as long as the graph may be run
    }
    const auto needed = needs();
    const auto saved = unpacked();
    std::vector<at::IValue> args = {reinterpret_cast<int64_t>(backward_.of), int64_t{backward_.count}};
    for (int n = 0; n < kGiven; ++n) args.emplace_back(bool(needed[n]));
    for (int n = 0; n < backward_.count; ++n) args.emplace_back(saved[n].defined());
    for (const at::Tensor& one : saved) {
      if (one.defined()) args.emplace_back(one);
    }
    std::vector<at::TypePtr> schema;
    for (const auto& value : args) schema.push_back(value.isTensor() ? at::TensorType::get() : value.type());
    const auto& python = getPyCompilerInterface();
    const auto name = python->bind_function(swapped.get_py_compiler(), "DirectBackward", recorded, schema, true, false);
    const auto outputs = IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
        get_input_metadata(next_edges()));
    auto out = python->call_function(swapped.get_py_compiler(), "apply_functional", name, grads, args, outputs);
    for (int n = 0; n < backward_.count; ++n) swapped.after(saved_[n]);
    return out;
  }

 private:
  const Backward backward_;
  const c10::SafePyObject of_;
  std::array<SavedVariable, kMost> saved_;
  bool released_ = false;

  // What is called by a graph that `apply_with_saved` recorded.
  static variable_list recorded(const variable_list& grads, const std::vector<at::IValue>& args) {
    auto next = args.begin();
    Backward backward;
    backward.of = reinterpret_cast<PyObject*>((next++)->toInt());
    backward.count = (next++)->toInt();
    {
      const pybind11::gil_scoped_acquire held;
      if (!backward.plan.read(backward.of)) raise();
    }
    Backward::Needs needs(kGiven);
    for (int n = 0; n < kGiven; ++n) needs[n] = (next++)->toBool();
    auto tensor = next + backward.count;
    Backward::Saved saved;
    for (int n = 0; n < backward.count; ++n) {
      if ((next++)->toBool()) saved[n] = (tensor++)->toTensor();
    }
    if (grads[0].defined()) return backward(needs, grads[0], saved);
    variable_list nothing(kGiven);
    for (int n = 0; n < kGiven; ++n) {
      if (needs[n]) nothing[n] = at::zeros_like(saved[n]);
    }
    return nothing;
  }

  Backward::Needs needs() const {
    Backward::Needs out(kGiven);
    for (int n = 0; n < kGiven; ++n) out[n] = task_should_compute_output(n);
    return out;
  }

  // To be asked for once in a backward: hooks that recompute what was saved do so once.
  Backward::Saved unpacked() {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
    Backward::Saved out;
    for (int n = 0; n < backward_.count; ++n) out[n] = saved_[n].unpack();
    return out;
  }
};

// The class of the node in Python, where PyTorch's own are.
bool name_node() {
  using namespace torch::autograd;
  static PyGetSetDef properties[] = {{"next_functions", THPCppFunction_next_functions, nullptr, nullptr, nullptr},
                                     {"requires_grad", THPCppFunction_requires_grad, nullptr, nullptr, nullptr},
                                     {"metadata", THPCppFunction_metadata, nullptr, nullptr, nullptr},
                                     {"_input_metadata", THPCppFunction_input_metadata, nullptr, nullptr, nullptr},
                                     {}};
  static PyMethodDef methods[] = {of_one("_register_hook_dict", THPCppFunction_register_hook_dict),
                                  of_one("register_hook", THPCppFunction_register_hook),
                                  of_one("register_prehook", THPCppFunction_register_prehook),
                                  {"name", THPCppFunction_name, METH_NOARGS, nullptr},
                                  {"_sequence_nr", THPCppFunction_sequence_nr, METH_NOARGS, nullptr},
                                  {}};
  static PyTypeObject type = {};
  const Ref inner(PyImport_ImportModule("torch._C"));
  const Ref all(inner ? PyObject_GetAttrString(inner, "_functions") : nullptr);
  if (!all) return false;
  _initFunctionPyTypeObject(type, "DirectBackward", properties, methods);
  registerCppFunction(typeid(LayerNode), &type);
  return !PyObject_SetAttrString(all, "DirectBackward", reinterpret_cast<PyObject*>(&type));
}

// A node as PyTorch holds it, which has changed between versions.
template <class... Args>
auto made(Args&&... args) {
  using Owner = decltype(torch::autograd::Edge().function);
  if constexpr (std::is_same_v<Owner, std::shared_ptr<Node>>) {
    return Owner(new LayerNode(std::forward<Args>(args)...), [](auto* node) { deleteNode(node); });
  } else {
    return Owner(c10::make_intrusive<LayerNode>(std::forward<Args>(args)...));
  }
}

template <class Owner>
auto announce(const Owner& node, int) -> decltype(fire_node_creation_hooks(node)) {
  fire_node_creation_hooks(node);
}
template <class Owner>
void announce(const Owner&, long) {}  // of a PyTorch that has no such hooks

// apply(plan, x, u, v, μ, index, bias) → y, with its place in the graph
PyObject* apply(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (!expects("apply", count, 1 + kGiven)) return nullptr;
  Plan plan;
  void* t[kGiven];
  if (!plan.read(args[0]) || !addresses_of<kGiven>(args + 1, t)) return nullptr;
  std::array<at::Tensor, kMost> given;
  bool done = true;
  for (int n = 0; n < kGiven; ++n) {
    if (t[n]) given[n] = THPVariable_Unpack(args[1 + n]);
    done = done && is_as_it_is(given[n]);
  }
  AtenTensorHandle handles[2] = {};
  done = done && giving_way(plan.asked, t[kX], [&] {
           const at::NoGradGuard none;
           const at::AutoDispatchBelowADInplaceOrView guard;
           return compute(plan, t, handles);
         });
  if (!done) {
    const Ref all(tuple_of(args, count));
    return all ? PyObject_CallObject(by_ops, all) : nullptr;
  }
  at::Tensor y = taken(handles[0]);
  given[kKept] = taken(handles[1]);
  if (torch::autograd::compute_requires_grad(given[kX], given[kU], given[kV], given[kMu], given[kIndex],
                                             given[kBias])) {
    auto edges =
        torch::autograd::collect_next_edges(given[kX], given[kU], given[kV], given[kMu], given[kIndex], given[kBias]);
    given[kX] = given[saved_in(plan, t, kX)];
    const auto node = made(plan, args[0], given);
    node->set_next_edges(std::move(edges));
    torch::autograd::set_history(y, node);
    announce(node, 0);
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

// A call of a module without what Python does before and after its forward, where all that would do is to have a node
// serve: no hook is there, nothing stands in place of a method, nobody watches what Python runs. The slot of the type
// alone is set: `__call__` is that of nn.Module, and who replaces it there has the slot of Python back.
PyObject *module_type, *call_impl, *call_impl_, *forward_name, *nodes_, *training_, *noted_, *pads_, *channels_last_;
PyObject* hooks[4];         // of one module
PyObject* global_hooks[4];  // of all
PyObject* replaced[3];      // what stands in a module's dict in place of a method

struct Served {
  PyTypeObject* type;
  PyObject* forward;
  int64_t dim;  // of x, 0 for any
};
std::vector<Served> served_types;

bool is_empty(PyObject* dict) { return dict && PyDict_Check(dict) && !PyDict_GET_SIZE(dict); }

// Whether this is what a type, or a base of it, has under a name.
bool type_has(PyTypeObject* type, PyObject* name, PyObject* wanted) {
  const Ref found(PyObject_GetAttr(reinterpret_cast<PyObject*>(type), name));
  if (!found) PyErr_Clear();
  return found == wanted;
}

bool is_watched_by_python() {
  const PyThreadState* const state = PyThreadState_Get();
  return state->c_profilefunc || state->c_tracefunc;
}

// By a node of the layer whose attributes these are, where what it is given is not padded first.
PyObject* served_by(PyObject* attributes, PyObject* x) {
  PyObject* const pads = PyDict_GetItemWithError(attributes, pads_);
  PyObject* const nodes = PyDict_GetItemWithError(attributes, nodes_);
  PyObject* const training = PyDict_GetItemWithError(attributes, training_);
  PyObject* const noted = PyDict_GetItemWithError(attributes, noted_);
  if (PyErr_Occurred() || !nodes || !PyDict_Check(nodes) || !training || (pads && pads != Py_False)) {
    return PyErr_Clear(), none();
  }
  return served(nodes, x, training, noted ? noted : Py_None);
}

PyObject* attributes_of(PyObject* object) {
  PyObject* const dict = PyObject_GenericGetDict(object, nullptr);
  if (!dict) PyErr_Clear();
  return dict;
}

PyObject* served_at_once(const Served& of, PyObject* self, PyObject* x) {
  if (!is_plain(x) || (of.dim && THPVariable_Unpack(x).dim() != of.dim) || is_watched_by_python()) return none();
  const Ref attributes(attributes_of(self));
  if (!attributes) return none();
  for (PyObject* name : hooks) {
    if (!is_empty(PyDict_GetItemWithError(attributes, name))) return none();
  }
  for (PyObject* all : global_hooks) {
    if (!is_empty(all)) return none();
  }
  for (PyObject* name : replaced) {
    if (PyDict_GetItemWithError(attributes, name)) return none();
  }
  if (!type_has(of.type, forward_name, of.forward) || !type_has(of.type, call_impl_, call_impl)) return none();
  return served_by(attributes, x);
}

PyObject* call(PyObject* self, PyObject* args, PyObject* named) {
  if (PyTuple_GET_SIZE(args) == 1 && (!named || !PyDict_GET_SIZE(named))) {
    for (const Served& of : served_types) {
      if (of.type != Py_TYPE(self)) continue;
      PyObject* const y = served_at_once(of, self, PyTuple_GET_ITEM(args, 0));
      if (y != Py_None) return y;
      Py_DECREF(y);
      break;
    }
  }
  return reinterpret_cast<PyTypeObject*>(module_type)->tp_call(self, args, named);
}

// serve_calls(class, how many axes the x that a node serves has, 0 for any number): of a class of modules whose forward
// gives what `serve` gives.
PyObject* serve_calls(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expects("serve_calls", count, 2)) return nullptr;
  auto* const type = reinterpret_cast<PyTypeObject*>(args[0]);
  const auto* const module = reinterpret_cast<PyTypeObject*>(module_type);
  const int64_t dim = PyLong_AsLongLong(args[1]);
  const Ref usual(PyObject_GetAttrString(module_type, "_wrapped_call_impl"));
  const Ref called(PyObject_GetAttrString(args[0], "__call__")),
      of_all(PyObject_GetAttrString(module_type, "__call__"));
  const Ref forward(PyObject_GetAttr(args[0], forward_name));
  if (PyErr_Occurred() || !usual || !called || !of_all || !forward) return nullptr;
  if (type->tp_call == call || type->tp_call != module->tp_call || called != usual || of_all != usual) return none();
  const auto is_it = [type](const Served& one) { return one.type == type; };
  if (std::none_of(served_types.begin(), served_types.end(), is_it)) {
    Py_INCREF(args[0]);
    Py_INCREF(forward.operator PyObject*());
    served_types.push_back({type, forward, dim});
  }
  type->tp_call = call;
  PyType_Modified(type);
  return none();
}

bool find() {
  static const Name names[] = {{call_impl_, "_call_impl"},
                               {forward_name, "forward"},
                               {nodes_, "_nodes"},
                               {training_, "training"},
                               {noted_, "_noted"},
                               {pads_, "_pads"},
                               {channels_last_, "channels_last"},
                               {hooks[0], "_forward_hooks"},
                               {hooks[1], "_forward_pre_hooks"},
                               {hooks[2], "_backward_hooks"},
                               {hooks[3], "_backward_pre_hooks"},
                               {replaced[0], "forward"},
                               {replaced[1], "_call_impl"},
                               {replaced[2], "_compiled_call_impl"}};
  const Ref modules(find_shared() && intern(names) ? PyImport_ImportModule("torch.nn.modules.module") : nullptr);
  if (!modules || !(module_type = PyObject_GetAttrString(modules, "Module"))) return false;
  const char* const of_all[] = {"_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
                                "_global_backward_pre_hooks"};
  for (int n = 0; n < 4; ++n) {
    if (!(global_hooks[n] = PyObject_GetAttrString(modules, of_all[n]))) return false;
  }
  return (call_impl = PyObject_GetAttr(module_type, call_impl_)) && name_node();
}

// The op of a layer in a graph, as fastfact/nn/compiled.py has it: by a node of the layer that is kept for these
// factors, where there is one that serves.
PyObject *graph_layers, *graph_forward;  // (what it is, id of its first factor) → (…, what it was made of, the layer)

bool is_same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.unsafeGetTensorImpl() == b.unsafeGetTensorImpl() ||
         (a.storage().is_alias_of(b.storage()) && a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
          a.strides() == b.strides() && a.dtype() == b.dtype());
}

// The layer with these tensors, null where none is kept.
PyObject* layer_of(PyObject* how, at::TensorList factors, const std::optional<at::Tensor>& bias) {
  const Ref first(THPVariable_Wrap(factors[0]));
  const Ref id(PyLong_FromVoidPtr(first)), key(id ? PyTuple_Pack(2, how, id.operator PyObject*()) : nullptr);
  PyObject* const found = key ? PyDict_GetItemWithError(graph_layers, key) : nullptr;
  if (!found) return nullptr;
  PyObject* const held = PyTuple_GetItem(found, 1);
  const size_t count = factors.size() + bias.has_value();
  if (size_t(PyList_GET_SIZE(held)) != count) return nullptr;
  for (size_t n = 0; n < count; ++n) {
    const at::Tensor& now = n < factors.size() ? factors[n] : *bias;
    if (!is_same_memory(THPVariable_Unpack(PyList_GET_ITEM(held, n)), now)) return nullptr;
  }
  PyObject* const layer = PyTuple_GetItem(found, 2);
  Py_XINCREF(layer);  // which another thread may have forgotten meanwhile
  return layer;
}

// In which format the op gives its result; none where that is not told by strides alone.
std::optional<at::MemoryFormat> format_of(PyObject* layer, const at::Tensor& x) {
  if (x.dim() != 4) return at::MemoryFormat::Contiguous;
  const Ref last(PyObject_GetAttr(layer, channels_last_));
  if (!last) return PyErr_Clear(), std::nullopt;
  if (last == Py_True) return at::MemoryFormat::ChannelsLast;
  const bool as_rows = x.is_contiguous(at::MemoryFormat::ChannelsLast), as_planes = x.is_contiguous();
  if (as_rows && as_planes) return std::nullopt;
  return as_rows ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
}

at::Tensor in_graph(std::string_view how, const at::Tensor& x, at::TensorList factors,
                    const std::optional<at::Tensor>& bias) {
  const pybind11::gil_scoped_acquire held;
  const at::NoGradGuard guard;
  const Ref of(PyUnicode_FromStringAndSize(how.data(), how.size())), given(THPVariable_Wrap(x));
  if (!of || !given) raise();
  if (const Ref layer(layer_of(of, factors, bias)); layer) {
    const auto format = format_of(layer, x);
    const bool last = format == at::MemoryFormat::ChannelsLast;
    const Ref attributes(attributes_of(layer)), seen(THPVariable_Wrap(last ? x.contiguous(*format) : x));
    const Ref y(attributes && seen && format ? served_by(attributes, seen) : none());
    if (y && y != Py_None) return THPVariable_Unpack(y).contiguous(*format);
  }
  if (PyErr_Occurred()) raise();
  const Ref all(PyTuple_New(factors.size())), last(bias ? THPVariable_Wrap(*bias) : none());
  for (size_t n = 0; all && n < factors.size(); ++n) PyTuple_SetItem(all, n, THPVariable_Wrap(factors[n]));
  PyObject* const args[] = {of, given, all, last};
  const Ref given_all(all && last ? tuple_of(args, 4) : nullptr);
  const Ref y(given_all ? PyObject_CallObject(graph_forward, given_all) : nullptr);
  if (!y) raise();
  return THPVariable_Unpack(y);
}

// serve_graphs(the layers that are kept for graphs, what computes the op where none of them serves)
PyObject* serve_graphs(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (!expects("serve_graphs", count, 2)) return nullptr;
  Py_INCREF(args[0]);
  Py_INCREF(args[1]);
  graph_layers = args[0], graph_forward = args[1];
  static auto* const library =
      new torch::Library(torch::Library::IMPL, "fastfact_nn", c10::DispatchKey::CPU, __FILE__, __LINE__);
  library->impl("layer", TORCH_FN(in_graph));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// Whether the dispatcher chooses what serves.
PyObject* tell(PyObject*, PyObject* answer) {
  dispatches = answer == Py_True;
  return none();
}

std::vector<PyMethodDef> functions = functions_with(
    {fast("apply", apply), fast("serve_calls", serve_calls), of_one("tell", tell), fast("serve_graphs", serve_graphs)});

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fastfact._torch", nullptr, -1, functions.data()};

}  // namespace

PyMODINIT_FUNC PyInit__torch() { return find() ? PyModule_Create(&definition) : nullptr; }
