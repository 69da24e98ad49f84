// The Python module fastfact._cpu: what is asked before a layer, and the layer, in one call. Used by
// fastfact/ops/direct.py, which says what the functions are for; limited API of Python 3.10. Tensors on another device
// go to that one's library, once it was named (`take_library`).
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "bind_cpu_direct.h"

// PyTorch's, from 2.14 on.
extern "C" __attribute__((weak)) AOTITorchError torch_tensor_to_pyobject(AtenTensorHandle, void*, void**);
extern "C" AOTITorchError torch_get_num_threads(uint32_t*);

namespace {

using fastfact::direct::Layer;
using fastfact::direct::Library;
using fastfact::direct::Watched;

// A reference that is given back.
class Ref {
 public:
  Ref(PyObject* object = nullptr) : object_(object) {}
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }
  operator PyObject*() const { return object_; }
  PyObject* release() {
    PyObject* out = object_;
    object_ = nullptr;
    return out;
  }

 private:
  PyObject* object_;
};

constexpr int kQuestions = 4, kInBackward = 2, kAxes = 8;
constexpr int64_t kLong = 1 << 16;    // bytes that take longer to read than to let other threads of Python run
constexpr int64_t kLittle = 1 << 16;  // multiplications that do not

PyObject *cdata_, *requires_grad_, *version_, *is_neg_, *saved_tensors_, *needs_input_grad_, *plan_, *to_save_,
    *forward_, *backward_;
PyObject *tensor_type, *parameter_type, *questions[kQuestions], *take, *serving;
PyObject *casts_any, *casts, *cast_to, *is_batched;
PyObject *forward_ad, *level_;   // the variables of torch.autograd.forward_ad, and the name of one
const Library* other = nullptr;  // of another device
PyObject *other_name = nullptr, *cpu_name = nullptr;

PyObject* none() { return Py_INCREF(Py_None), Py_None; }

// Other threads of Python run meanwhile.
template <class F>
auto released(const F& body) {
  PyThreadState* state = PyEval_SaveThread();
  const auto out = body();
  PyEval_RestoreThread(state);
  return out;
}

// Of a tensor, or nullptr for None.
bool address_of(PyObject* tensor, void** out) {
  *out = nullptr;
  if (tensor == Py_None) return true;
  const Ref found(PyObject_GetAttr(tensor, cdata_));
  if (!found) return false;
  *out = PyLong_AsVoidPtr(found);
  return *out || !PyErr_Occurred();
}

template <int N>
bool addresses_of(PyObject* const* tensors, void** out) {
  for (int n = 0; n < N; ++n) {
    if (!address_of(tensors[n], out + n)) return false;
  }
  return true;
}

// Whether there is a library for a tensor: nullptr is the one for the CPU.
bool find_library(void* tensor, const Library** out) {
  int32_t type = 0;
  const auto handle = reinterpret_cast<AtenTensorHandle>(&tensor);
  if (!tensor || aoti_torch_get_device_type(handle, &type)) return false;
  *out = other && type == other->device_type ? other : nullptr;
  return *out || type == aoti_torch_device_type_cpu();
}

bool is_plain(PyObject* tensor) {
  const auto type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  return type == tensor_type || type == parameter_type;
}

// 1 or 0, −1 with an error set.
int is_true(PyObject* owned) {
  const Ref answer(owned);
  return answer ? PyObject_IsTrue(answer) : -1;
}

int is_negative(PyObject* tensor) { return is_true(PyObject_CallMethodObjArgs(tensor, is_neg_, nullptr)); }

// The tensors of these handles, which are taken over, None for a null one.
bool wrap(AtenTensorHandle* handles, int count, PyObject** out) {
  bool failed = false;
  std::fill_n(out, count, nullptr);
  if (torch_tensor_to_pyobject) {
    for (int n = 0; n < count; ++n) {
      if (!handles[n]) {
        out[n] = none();
        continue;
      }
      void* object = nullptr;
      failed |= torch_tensor_to_pyobject(handles[n], nullptr, &object) != 0;
      out[n] = static_cast<PyObject*>(object);
      aoti_torch_delete_tensor_object(handles[n]);
    }
  } else {
    const Ref list(PyList_New(0));
    for (int n = 0; n < count; ++n) {
      if (!handles[n]) continue;
      const Ref capsule(PyCapsule_New(handles[n], nullptr, nullptr));
      failed |= !capsule || PyList_Append(list, capsule);
    }
    // It deletes the handles.
    const Ref found(failed ? nullptr : PyObject_CallFunctionObjArgs(take, list.operator PyObject*(), nullptr));
    failed |= !found;
    for (int n = 0, k = 0; n < count && !failed; ++n) {
      out[n] = handles[n] ? PySequence_GetItem(found, k++) : none();
      failed |= !out[n];
    }
  }
  if (!failed) return true;
  for (int n = 0; n < count; ++n) Py_CLEAR(out[n]);
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "PyTorch made no tensor of a handle");
  return false;
}

PyObject* tuple_of(PyObject* const* objects, Py_ssize_t count) {
  PyObject* const out = PyTuple_New(count);
  for (Py_ssize_t n = 0; out && n < count; ++n) {
    Py_INCREF(objects[n]);
    PyTuple_SetItem(out, n, objects[n]);
  }
  return out;
}

// What a layer is asked for. sequences: x [n, c, l] of a convolution stands for images [n, c, 1, l], and so does y.
struct Asked {
  Layer layer;
  bool sequences;

  bool read(PyObject* bytes) {
    if (!PyBytes_Check(bytes) || PyBytes_Size(bytes) != sizeof(Layer)) {
      PyErr_SetString(PyExc_TypeError, "must be the settings of a layer");
      return false;
    }
    std::memcpy(&layer, PyBytes_AsString(bytes), sizeof(layer));
    constexpr int64_t kSequences = 8;  // beside the kind
    sequences = layer.kind & kSequences;
    layer.kind = decltype(layer.kind)(layer.kind & ~kSequences);
    return true;
  }
};

// A tensor as a layer computes with it.
class Seen {
 public:
  Seen(const Asked& of, void* tensor) : at_(tensor) {
    const auto handle = reinterpret_cast<AtenTensorHandle>(&tensor);
    int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
    if (!of.sequences || !tensor || aoti_torch_get_dim(handle, &dim) || dim != 3 ||
        aoti_torch_get_sizes(handle, &sizes) || aoti_torch_get_strides(handle, &strides)) {
      return;
    }
    const int64_t size[4] = {sizes[0], sizes[1], 1, sizes[2]};
    const int64_t step[4] = {strides[0], strides[1], sizes[2] * strides[2], strides[2]};
    if (!aoti_torch__reinterpret_tensor(handle, 4, size, step, 0, &image_)) at_ = *reinterpret_cast<void**>(image_);
  }
  Seen(const Seen&) = delete;
  Seen& operator=(const Seen&) = delete;
  ~Seen() {
    if (image_) aoti_torch_delete_tensor_object(image_);
  }
  void* at() const { return at_; }

  // A result that is an image as this tensor is one, as the sequences it stands for; whether it is that now.
  bool give(AtenTensorHandle* result) const {
    if (!image_ || !*result) return true;
    int64_t *sizes = nullptr, *strides = nullptr;
    AtenTensorHandle sequences;
    if (aoti_torch_get_sizes(*result, &sizes) || aoti_torch_get_strides(*result, &strides)) return false;
    const int64_t size[3] = {sizes[0], sizes[1], sizes[3]}, step[3] = {strides[0], strides[1], strides[3]};
    if (aoti_torch__reinterpret_tensor(*result, 3, size, step, 0, &sequences)) return false;
    aoti_torch_delete_tensor_object(*result);
    *result = sequences;
    return true;
  }

 private:
  void* at_;
  AtenTensorHandle image_ = nullptr;
};

// Whether body(x as it is computed with) made `out`, the first of which stands for what x stands for. Other threads of
// Python run meanwhile, unless it computes so little that to give way would take longer.
template <int N, class F>
bool computed(const Asked& of, void* x, AtenTensorHandle (&out)[N], const F& body) {
  const Seen seen(of, x);
  const auto run = [&] { return body(seen.at()); };
  const int64_t* const size = of.layer.size;
  int64_t numel = 0;
  const bool known = !aoti_torch_get_numel(reinterpret_cast<AtenTensorHandle>(&x), &numel);
  if (!(known && numel * size[0] * size[2] * size[3] <= kLittle ? run() : released(run))) return false;
  if (seen.give(out)) return true;
  for (AtenTensorHandle handle : out) {
    if (handle) aoti_torch_delete_tensor_object(handle);
  }
  return false;
}

bool expects(const char* name, Py_ssize_t given, Py_ssize_t wanted) {
  if (given == wanted) return true;
  PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, wanted, given);
  return false;
}

// Whether tangents may be there, which nothing here sees: −1 with an error set.
int has_tangents() {
  PyObject* const level = PyDict_GetItemWithError(forward_ad, level_);
  const int64_t open = level ? PyLong_AsLongLong(level) : -1;
  return PyErr_Occurred() ? -1 : open >= 0;
}

// Whether PyTorch computes as usual now: nothing transforms, dispatches elsewhere and, asked for all, traces.
int undisturbed(int asked = kQuestions) {
  if (const int tangents = has_tangents()) return tangents < 0 ? -1 : 0;
  for (int n = 0; n < asked; ++n) {
    const int answer = is_true(PyObject_CallNoArgs(questions[n]));
    if (answer) return answer < 0 ? -1 : 0;
  }
  return 1;
}

// All that a node depends on besides the tensors of the layer, as bytes. None where there can be no node.
PyObject* key_of(PyObject* x, PyObject* training) {
  if (!is_plain(x)) return none();
  if (const int usual = undisturbed(); usual <= 0) return usual ? nullptr : none();
  void* address;
  const void* data;
  if (!address_of(x, &address)) return nullptr;
  const auto handle = reinterpret_cast<AtenTensorHandle>(&address);
  int32_t type = 0, device = 0, number = 0;
  int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
  uint32_t threads = 0;
  if (torch_get_const_data_ptr(handle, &data) || aoti_torch_get_device_type(handle, &device) ||
      aoti_torch_get_device_index(handle, &number) || aoti_torch_get_dim(handle, &dim) ||
      aoti_torch_get_dtype(handle, &type) || aoti_torch_get_sizes(handle, &sizes) ||
      aoti_torch_get_strides(handle, &strides) || torch_get_num_threads(&threads) || dim > kAxes) {
    return none();
  }
  const Library* library;
  // What is recorded is run again when nobody asks.
  if (!find_library(address, &library) || (library && library->records(address))) return none();
  int64_t cast = 0;
  if (const int any = is_true(PyObject_CallNoArgs(casts_any))) {
    PyObject* const name = library ? other_name : cpu_name;
    const int there = any < 0 ? any : is_true(PyObject_CallFunctionObjArgs(casts, name, nullptr));
    const Ref to(there > 0 ? PyObject_CallFunctionObjArgs(cast_to, name, nullptr) : nullptr);
    if (there < 0 || (there && !to)) return nullptr;
    cast = there ? reinterpret_cast<int64_t>(to.operator PyObject*()) : 0;  // of each type there is one object
  }
  if (const int negative = is_negative(x)) return negative < 0 ? nullptr : none();
  const int trained = is_true(PyObject_GetAttr(x, requires_grad_));
  if (trained < 0) return nullptr;
  constexpr int kFacts = 7;
  int64_t facts[kFacts + 2 * kAxes] = {trained | aoti_torch_grad_mode_is_enabled() << 1 | (training == Py_True) << 2,
                                       type,
                                       threads,
                                       device,
                                       number,
                                       cast,
                                       dim};
  std::copy_n(sizes, dim, facts + kFacts);
  std::copy_n(strides, dim, facts + kFacts + dim);
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(facts), (kFacts + 2 * dim) * sizeof(int64_t));
}

PyObject* key(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return expects("key", count, 2) ? key_of(args[0], args[1]) : nullptr;
}

// Of (dict, name, object, whether it is trained or None): whether the object is in the dict; None means nothing is.
int holds(PyObject* fact) {
  PyObject* const object = PyTuple_GetItem(fact, 2);
  PyObject* const found = PyDict_GetItemWithError(PyTuple_GetItem(fact, 0), PyTuple_GetItem(fact, 1));
  if (!found && PyErr_Occurred()) return -1;
  if ((found ? found : Py_None) != object) return 0;
  PyObject* const trained = PyTuple_GetItem(fact, 3);
  if (trained == Py_None) return 1;
  const int is = is_true(PyObject_GetAttr(object, requires_grad_));
  return is < 0 ? -1 : is == (trained == Py_True);
}

// Of None or (tensor, its version, …).
int has_version(PyObject* noted) {
  if (noted == Py_None) return 1;
  const Ref version(PyObject_GetAttr(PyTuple_GetItem(noted, 0), version_));
  return version ? PyObject_RichCompareBool(version, PyTuple_GetItem(noted, 1), Py_EQ) : -1;
}

// Whether this is the version of a tensor, of those that count.
int has_number(PyObject* tensor, int64_t wanted) {
  const Ref version(PyObject_GetAttr(tensor, version_));
  return version ? PyLong_AsLongLong(version) == wanted : -1;
}

// Of None or (tensor, its shape as bytes).
int has_shape(PyObject* form) {
  if (form == Py_None) return 1;
  void* address;
  int64_t dim = 0, *sizes = nullptr;
  if (!address_of(PyTuple_GetItem(form, 0), &address)) return -1;
  const auto handle = reinterpret_cast<AtenTensorHandle>(&address);
  if (aoti_torch_get_dim(handle, &dim) || aoti_torch_get_sizes(handle, &sizes)) return 0;
  PyObject* const shape = PyTuple_GetItem(form, 1);
  return PyBytes_Size(shape) == static_cast<Py_ssize_t>(dim * sizeof(int64_t)) &&
         !std::memcmp(PyBytes_AsString(shape), sizes, dim * sizeof(int64_t));
}

// Of None or (Watched as bytes, its tensors, what holds their memory).
int is_as_watched(PyObject* watch) {
  if (watch == Py_None) return 1;
  PyObject *const bytes = PyTuple_GetItem(watch, 0), *const tensors = PyTuple_GetItem(watch, 1);
  const Watched& watched = *reinterpret_cast<const Watched*>(PyBytes_AsString(bytes));
  for (int64_t n = 0; n < watched.count; ++n) {
    // What PyTorch computes with may be taken out of a tensor and put into another (`torch.utils.swap_tensors`).
    void* address;
    if (!address_of(PyTuple_GetItem(tensors, n), &address)) return -1;
    if (address != watched.tensors[n]) return 0;
    if (watched.versions[n] >= 0) {
      const int same = has_number(PyTuple_GetItem(tensors, n), watched.versions[n]);
      if (!same && watched.reads) fastfact::direct::read_anew(address);
      if (same <= 0) return same;
    }
  }
  return watched.bytes < kLong ? still(watched) : released([&] { return still(watched); });
}

// The addresses of plain tensors in a list, and no more than `count`; false with no error set where some are others.
bool addresses_in(PyObject* list, Py_ssize_t count, std::vector<void*>& out) {
  if (!PyList_Check(list) || PyList_Size(list) != count) return false;
  out.resize(count);
  for (Py_ssize_t n = 0; n < count; ++n) {
    PyObject* const one = PyList_GetItem(list, n);
    if (!is_plain(one) || !address_of(one, &out[n])) return false;
  }
  return true;
}

// (params, grads, momenta, l1, lr, momentum, weight decay, proximal) → whether the step was made
PyObject* prox_sgd_step(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expects("prox_sgd_step", count, 8)) return nullptr;
  const Py_ssize_t params = PyList_Check(args[0]) ? PyList_Size(args[0]) : -1;
  const fastfact::direct::Group group = {PyFloat_AsDouble(args[4]), PyFloat_AsDouble(args[5]),
                                         PyFloat_AsDouble(args[6]), args[7] == Py_True};
  std::vector<void*> tensors[3];
  const bool moves = group.momentum != 0;
  bool fits = params >= 0 && !PyErr_Occurred() && holds(serving) == 1 && undisturbed(kInBackward) == 1;
  for (int n = 0; n < 2 + moves; ++n) fits = fits && addresses_in(args[n], params, tensors[n]);
  fits = fits && PyList_Check(args[3]) && PyList_Size(args[3]) == params;
  std::vector<double> l1(fits ? params : 0);
  for (Py_ssize_t n = 0; fits && n < params; ++n) l1[n] = PyFloat_AsDouble(PyList_GetItem(args[3], n));
  if (PyErr_Occurred()) {
    // Who asks says what is wrong.
    PyErr_Clear();
    fits = false;
  }
  const Library* library = nullptr;
  const bool done = fits && (!params || find_library(tensors[0][0], &library)) && released([&] {
                      const auto step = library ? library->prox_sgd_step : fastfact::direct::prox_sgd_step;
                      void* const* const momenta = moves ? tensors[2].data() : nullptr;
                      return step(group, params, tensors[0].data(), tensors[1].data(), momenta, l1.data());
                    });
  return PyBool_FromLong(done);
}

// (params, grads, first and second moments, counts of steps, [lr, β₁, β₂, eps, weight decay, l1, …]) → whether the step
// was made
PyObject* adamw_step(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expects("adamw_step", count, 6)) return nullptr;
  const Py_ssize_t params = PyList_Check(args[0]) ? PyList_Size(args[0]) : -1;
  std::vector<void*> tensors[5];
  bool fits = params >= 0 && holds(serving) == 1 && undisturbed(kInBackward) == 1 && PyList_Check(args[5]) &&
              PyList_Size(args[5]) == 6 * params;
  for (int n = 0; n < 5; ++n) fits = fits && addresses_in(args[n], params, tensors[n]);
  std::vector<double> how(fits ? 6 * params : 0);
  for (size_t n = 0; n < how.size(); ++n) how[n] = PyFloat_AsDouble(PyList_GetItem(args[5], n));
  if (PyErr_Occurred()) return nullptr;
  const bool done =
      fits && released([&] {
        return fastfact::direct::adamw_step(params, tensors[0].data(), tensors[1].data(), tensors[2].data(),
                                            tensors[3].data(), tensors[4].data(), how.data());
      });
  return PyBool_FromLong(done);
}

// (tensors, their versions, −1 for one that does not matter) → `Watched` as bytes, None where there can be none
PyObject* watch(PyObject*, PyObject* const* args, Py_ssize_t given) {
  if (!expects("watch", given, 2)) return nullptr;
  PyObject* const tensors = args[0];
  const Py_ssize_t count = PyTuple_Size(tensors);
  if (count < 0 || PyTuple_Size(args[1]) != count) return nullptr;
  if (count > Watched::kMost) return none();
  void* addresses[Watched::kMost];
  for (Py_ssize_t n = 0; n < count; ++n) {
    if (!address_of(PyTuple_GetItem(tensors, n), addresses + n)) return nullptr;
  }
  Watched found = {};
  if (!released([&] { return fastfact::direct::watch(found, addresses, count); })) return none();
  for (Py_ssize_t n = 0; n < count; ++n) found.versions[n] = PyLong_AsLongLong(PyTuple_GetItem(args[1], n));
  if (PyErr_Occurred()) return nullptr;
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(&found), sizeof found);
}

PyObject* still_watched(PyObject*, PyObject* watch) {
  const int is = is_as_watched(watch);
  return is < 0 ? nullptr : PyBool_FromLong(is);
}

struct Holding {
  PyObject* tensor;
  fastfact::direct::Memory memory;
};

void give_back(PyObject* capsule) {
  const auto* const holding = static_cast<Holding*>(PyCapsule_GetPointer(capsule, nullptr));
  fastfact::direct::give_back(holding->memory);
  Py_DECREF(holding->tensor);
  delete holding;
}

// tensor → what keeps its memory, which nothing may write to as long as that lives; None where it is not kept
PyObject* hold(PyObject*, PyObject* tensor) {
  void* address;
  if (!address_of(tensor, &address)) return nullptr;
  const auto memory = fastfact::direct::hold(address);
  if (!memory.data) return none();
  Py_INCREF(tensor);
  return PyCapsule_New(new Holding{tensor, memory}, nullptr, give_back);
}

PyObject* serve(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expects("serve", count, 4)) return nullptr;
  PyObject *const nodes = args[0], *const x = args[1];
  if (!PyDict_Size(nodes)) return none();
  const Ref asked(key_of(x, args[2]));
  if (!asked) return nullptr;
  if (asked == Py_None) return none();
  PyObject* const found = PyDict_GetItemWithError(nodes, asked);
  if (!found) return PyErr_Occurred() ? nullptr : none();
  Py_INCREF(found);
  const Ref node(found);
  PyObject* const facts = PyTuple_GetItem(node, 0);
  PyObject* const watch = PyTuple_GetItem(node, 2);
  // Whoever watches the positions of μ sees them change.
  int is = watch == Py_None ? has_version(args[3]) : 1;
  for (Py_ssize_t n = 0, all = PyTuple_Size(facts); is > 0 && n < all; ++n) is = holds(PyTuple_GetItem(facts, n));
  if (is > 0) is = has_shape(PyTuple_GetItem(node, 1));
  if (is > 0) is = is_as_watched(watch);
  if (is <= 0) return is ? nullptr : none();
  PyObject* const given = PyTuple_GetItem(node, 4);
  const Py_ssize_t at = PyLong_AsSsize_t(PyTuple_GetItem(node, 5)), size = PyTuple_Size(given);
  const Ref arguments(PyTuple_New(size));
  if (!arguments) return nullptr;
  for (Py_ssize_t n = 0; n < size; ++n) {
    PyObject* const one = n == at ? x : PyTuple_GetItem(given, n);
    Py_INCREF(one);
    PyTuple_SetItem(arguments, n, one);
  }
  return PyObject_CallObject(PyTuple_GetItem(node, 3), arguments);
}

// (out …) of a function of `direct`, None where it refuses.
template <int N, class F>
PyObject* given_out(const Asked& of, void* x, bool alone, const F& body) {
  AtenTensorHandle handles[N];
  if (!computed(of, x, handles, [&](void* x) { return body(handles, x); })) return none();
  PyObject* out[N];
  if (!wrap(handles, N, out)) return nullptr;
  if (alone) return out[0];
  PyObject* const tuple = PyTuple_New(N);
  for (int n = 0; n < N; ++n) PyTuple_SetItem(tuple, n, out[n]);
  return tuple;
}

// (W [o, i]) → W in panels, None where there is no such form
PyObject* panels(PyObject*, PyObject* weight) {
  void* w;
  AtenTensorHandle handle;
  if (!address_of(weight, &w)) return nullptr;
  if (!released([&] { return fastfact::direct::panels(&handle, w); })) return none();
  PyObject* out;
  return wrap(&handle, 1, &out) ? out : nullptr;
}

PyObject* layer(PyObject*, PyObject* const* args, Py_ssize_t count) {
  void* t[6];  // x, bias, μ, index, u, v
  Asked of;
  if (!expects("layer", count, 7) || !of.read(args[0]) || !addresses_of<6>(args + 1, t)) return nullptr;
  return given_out<2>(of, t[0], false, [&](AtenTensorHandle* out, void* x) {
    return fastfact::direct::layer(out, of.layer, x, t[1], t[2], t[3], t[4], t[5]);
  });
}

PyObject* factored(PyObject*, PyObject* const* args, Py_ssize_t count) {
  void* t[6];  // x, u, v, values, index, bias
  Asked of;
  if (!expects("factored", count, 8) || !of.read(args[0]) || !addresses_of<6>(args + 2, t)) return nullptr;
  const bool repeated = args[1] == Py_True;
  return given_out<1>(of, t[0], true, [&](AtenTensorHandle* out, void* x) {
    return fastfact::direct::factored(out, of.layer, repeated, x, t[1], t[2], t[3], t[4], t[5]);
  });
}

PyObject* dense(PyObject*, PyObject* const* args, Py_ssize_t count) {
  void* t[3];  // x, W, bias
  Asked of;
  if (!expects("dense", count, 4) || !of.read(args[0]) || !addresses_of<3>(args + 1, t)) return nullptr;
  const Library* library;
  return given_out<1>(of, t[0], true, [&](AtenTensorHandle* out, void* x) {
    if (!find_library(x, &library)) return false;
    return (library ? library->dense : fastfact::direct::dense)(out, of.layer, x, t[1], t[2]);
  });
}

// What a Function is asked for: `Plan` of fastfact/ops/direct.py.
struct Plan {
  Asked asked;
  bool makes;  // W is made, and saved
  PyObject* function;
  void* support;

  bool is_adapter() const { return asked.layer.low_rank == Layer::kAdapter; }

  bool read(PyObject* plan) {
    if (PyTuple_Size(plan) < 5 || !asked.read(PyTuple_GetItem(plan, 0))) return false;
    makes = PyTuple_GetItem(plan, 1) == Py_True, function = PyTuple_GetItem(plan, 2);
    return address_of(PyTuple_GetItem(plan, 4), &support);
  }
};

// What is saved, as `Plan` of fastfact/ops/direct.py says.
enum { kX, kU, kV, kMu, kIndex, kBias, kGiven, kKept = kGiven, kMost };

// forward(ctx, plan, x, u, v, μ, index, bias) → y
PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expects("forward", count, 2 + kGiven)) return nullptr;
  Plan plan;
  void* t[kGiven];
  if (!plan.read(args[1]) || !addresses_of<kGiven>(args + 2, t)) return nullptr;
  AtenTensorHandle handles[2] = {};
  const Library* library;
  const bool done =
      find_library(t[kX], &library) && computed(plan.asked, t[kX], handles, [&](void* x) {
        using namespace fastfact::direct;
        const Layer& of = plan.asked.layer;
        if (library) {
          return plan.makes && library->layer(handles, of, x, t[kBias], t[kMu], t[kIndex], plan.support, t[kU], t[kV]);
        }
        if (plan.makes) return layer(handles, of, x, t[kBias], t[kMu], t[kIndex], t[kU], t[kV]);
        return factored(handles, of, false, x, t[kU], t[kV], t[kMu], t[kIndex], t[kBias], handles + 1);
      });
  if (!done) {
    const Ref function(PyObject_GetAttr(plan.function, forward_)), given(tuple_of(args, count));
    return function && given ? PyObject_CallObject(function, given) : nullptr;
  }
  PyObject* out[2];
  if (!wrap(handles, 2, out)) return nullptr;
  Ref y(out[0]), kept(out[1]);
  const bool keeps = kept != Py_None;
  const Ref saved(PyTuple_New(kGiven + keeps));
  if (!saved) return nullptr;
  const bool sees_other = plan.is_adapter() && t[kIndex];
  for (int n = 0; n < kGiven; ++n) {
    PyObject* const one = args[2 + (n == kX && sees_other ? int{kIndex} : n)];
    Py_INCREF(one);
    PyTuple_SetItem(saved, n, one);
  }
  if (keeps) PyTuple_SetItem(saved, kKept, kept.release());
  if (PyObject_SetAttr(args[0], plan_, args[1]) || PyObject_SetAttr(args[0], to_save_, saved)) return nullptr;
  return y.release();
}

// Whether what `forward` saved may be computed with here.
int can_be_direct(PyObject* grad, PyObject* saved, bool makes) {
  const Py_ssize_t size = PyTuple_Size(saved);
  if (size < kGiven + makes || size > kMost) return 0;
  if (aoti_torch_grad_mode_is_enabled() || !is_plain(grad)) return 0;
  if (const int usual = undisturbed(kInBackward); usual <= 0) return usual;
  for (Py_ssize_t n = 0; n < size; ++n) {
    PyObject* const one = PyTuple_GetItem(saved, n);
    if (one != Py_None && !is_plain(one)) return 0;
  }
  PyObject* const read[3] = {grad, PyTuple_GetItem(saved, kX), makes ? PyTuple_GetItem(saved, kKept) : nullptr};
  for (int n = 0; n < 2 + makes; ++n) {
    if (const int negative = is_negative(read[n])) return negative < 0 ? -1 : 0;
  }
  // Of `is_grads_batched`.
  if (const int batched = is_true(PyObject_CallFunctionObjArgs(is_batched, grad, nullptr))) return batched < 0 ? -1 : 0;
  return holds(serving);
}

// apply(ctx, grad) → the gradients of what `forward` was given, as PyTorch calls the backward of a Function.
PyObject* backward(PyObject* ctx, PyObject* const* args, Py_ssize_t count) {
  if (!expects("apply", count, 1)) return nullptr;
  PyObject* const grad = args[0];
  // To be asked for once: hooks that recompute what was saved do so once. Nothing may be asked for after an error.
  const Ref how(PyObject_GetAttr(ctx, plan_));
  const Ref saved(how ? PyObject_GetAttr(ctx, saved_tensors_) : nullptr);
  const Ref needed(saved ? PyObject_GetAttr(ctx, needs_input_grad_) : nullptr);
  Plan plan;
  if (!needed || !plan.read(how)) return nullptr;
  const int direct = can_be_direct(grad, saved, plan.makes);
  if (direct < 0) return nullptr;
  if (direct) {
    void *t[kMost] = {}, *by;
    if (!address_of(grad, &by)) return nullptr;
    for (Py_ssize_t n = 0; n < PyTuple_Size(saved); ++n) {
      if (!address_of(PyTuple_GetItem(saved, n), t + n)) return nullptr;
    }
    if (!plan.makes && t[kKept]) t[kMu] = t[kKept];
    // The order of the gradients.
    static constexpr int made[5] = {kX, kBias, kMu, kU, kV}, apart[5] = {kX, kU, kV, kMu, kBias},
                         adapter[5] = {kX, kU, kV, kIndex, kBias};
    const int* const order = plan.makes ? made : plan.is_adapter() ? adapter : apart;
    int64_t needs = 0;
    for (int n = 0; n < 5; ++n) needs |= int64_t{PyTuple_GetItem(needed, 1 + order[n]) == Py_True} << n;
    AtenTensorHandle handles[5];
    const Library* library;
    const bool done = find_library(t[kX], &library) && computed(plan.asked, t[kX], handles, [&](void* x) {
                        using namespace fastfact::direct;
                        const Layer& of = plan.asked.layer;
                        const Seen dy(plan.asked, by);
                        if (library) {
                          return plan.makes && library->layer_backward(handles, of, needs, dy.at(), x, t[kKept],
                                                                       t[kIndex], plan.support, t[kU], t[kV]);
                        }
                        if (plan.makes)
                          return layer_backward(handles, of, needs, dy.at(), x, t[kKept], t[kIndex], t[kU], t[kV]);
                        return factored_backward(handles, of, needs, dy.at(), x, t[kU], t[kV], t[kMu], t[kIndex]);
                      });
    if (done) {
      PyObject* found[5];
      if (!wrap(handles, 5, found)) return nullptr;
      PyObject* const out = PyTuple_New(1 + kGiven);
      for (int n : {0, 1 + (plan.is_adapter() ? kMu : kIndex)}) PyTuple_SetItem(out, n, none());
      for (int n = 0; n < 5; ++n) PyTuple_SetItem(out, 1 + order[n], found[n]);
      return out;
    }
  }
  const Ref function(PyObject_GetAttr(plan.function, backward_));
  return function ? PyObject_CallFunctionObjArgs(function, ctx, grad, (PyObject*)saved, nullptr) : nullptr;
}

PyMethodDef of_context[] = {{"apply", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(backward)),
                             METH_FASTCALL, "The backward of a Function, from the gradient of its output."}};

// The class of a Function's context has its backward computed here.
PyObject* compute_backward(PyObject*, PyObject* context) {
  const Ref method(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(context), of_context));
  return method && !PyObject_SetAttrString(context, "apply", method) ? none() : nullptr;
}

// begin(what holds while the CPU library serves): see `holds`.
PyObject* begin(PyObject*, PyObject* fact) {
  Py_INCREF(fact);
  Py_XDECREF(serving);
  serving = fact;
  return none();
}

// take_library(address of a `Library`, what PyTorch calls its device)
PyObject* take_library(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expects("take_library", count, 2)) return nullptr;
  other = static_cast<const Library*>(PyLong_AsVoidPtr(args[0]));
  Py_INCREF(args[1]);
  Py_XDECREF(other_name);
  other_name = args[1];
  return PyErr_Occurred() ? nullptr : none();
}

#define FAST(name) {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(name)), METH_FASTCALL, nullptr}

PyMethodDef functions[] = {FAST(key),
                           FAST(serve),
                           FAST(layer),
                           FAST(factored),
                           FAST(dense),
                           FAST(forward),
                           FAST(prox_sgd_step),
                           FAST(adamw_step),
                           FAST(take_library),
                           FAST(watch),
                           {"panels", panels, METH_O, nullptr},
                           {"hold", hold, METH_O, nullptr},
                           {"still", still_watched, METH_O, nullptr},
                           {"compute_backward", compute_backward, METH_O, nullptr},
                           {"begin", begin, METH_O, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fastfact._cpu", nullptr, -1, functions};

bool find() {
  const struct {
    PyObject*& at;
    const char* name;
  } names[] = {{cdata_, "_cdata"},
               {requires_grad_, "requires_grad"},
               {version_, "_version"},
               {is_neg_, "is_neg"},
               {saved_tensors_, "saved_tensors"},
               {needs_input_grad_, "needs_input_grad"},
               {plan_, "plan"},
               {to_save_, "to_save"},
               {forward_, "forward"},
               {backward_, "backward"},
               {level_, "_current_level"},
               {cpu_name, "cpu"}};
  for (const auto& [at, name] : names) {
    if (!(at = PyUnicode_InternFromString(name))) return false;
  }
  const Ref torch(PyImport_ImportModule("torch")), inner(PyImport_ImportModule("torch._C")),
      parameters(PyImport_ImportModule("torch.nn.parameter"));
  if (!torch || !inner || !parameters) return false;
  tensor_type = PyObject_GetAttrString(torch, "Tensor");
  parameter_type = PyObject_GetAttrString(parameters, "Parameter");
  if (!tensor_type || !parameter_type) return false;
  casts_any = PyObject_GetAttrString(inner, "_is_any_autocast_enabled");
  casts = PyObject_GetAttrString(torch, "is_autocast_enabled");
  cast_to = PyObject_GetAttrString(torch, "get_autocast_dtype");
  if (!casts_any || !casts || !cast_to) return false;
  const Ref functorch(PyImport_ImportModule("torch._C._functorch")),
      ad(PyImport_ImportModule("torch.autograd.forward_ad"));
  if (!functorch || !ad || !(is_batched = PyObject_GetAttrString(functorch, "is_legacy_batchedtensor"))) return false;
  forward_ad = PyModule_GetDict(ad);
  Py_INCREF(forward_ad);
  const char* const asked[kQuestions] = {"_are_functorch_transforms_active", "_len_torch_dispatch_stack",
                                         "_len_torch_function_stack", "_is_tracing"};
  for (int n = 0; n < kQuestions; ++n) {
    if (!(questions[n] = PyObject_GetAttrString(inner, asked[n]))) return false;
  }
  if (torch_tensor_to_pyobject) return true;
  const Ref aoti(PyObject_GetAttrString(inner, "_aoti"));
  return aoti && (take = PyObject_GetAttrString(aoti, "alloc_tensors_by_stealing_from_void_ptrs"));
}

}  // namespace

PyMODINIT_FUNC PyInit__cpu() { return find() ? PyModule_Create(&definition) : nullptr; }
