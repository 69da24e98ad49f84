// The module of Python that asks what is to be asked before a layer, and computes it, in one call. Used by
// fastfact/ops/direct.py, which says what the functions are for. It is compiled twice: for any PyTorch and Python, by
// what both promise (bind_cpu_module.cpp), and for those that are here, whose own tensors and nodes take a fraction of
// the time (bind_torch.cpp). What differs stands before this file is included: see there. Tensors on another device
// than the CPU go to that one's library, once it was named (`take_library`).
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "bind_direct.h"

extern "C" AOTITorchError torch_get_num_threads(uint32_t*);

namespace {

using namespace fastfact::python;
using fastfact::direct::Layer;
using fastfact::direct::Library;
using fastfact::direct::Watched;

constexpr int kAxes = 8;
constexpr int64_t kLong = 1 << 16;    // bytes that take longer to read than to let other threads of Python run
constexpr int64_t kLittle = 1 << 16;  // multiplications that do not

PyObject *tensor_type, *parameter_type, *serving, *by_ops, *differentiate;
PyObject *forward_ad, *level_;                   // the variables of torch.autograd.forward_ad, and the name of one
const Library *cpu = nullptr, *other = nullptr;  // of another device

template <int N>
bool addresses_of(PyObject* const* tensors, void** out) {
  for (int n = 0; n < N; ++n) {
    if (!address_of(tensors[n], out + n)) return false;
  }
  return true;
}

// The library for a tensor; nullptr where there is none.
const Library* library_of(void* tensor) {
  int32_t type = 0;
  const auto handle = reinterpret_cast<AtenTensorHandle>(&tensor);
  if (!tensor || aoti_torch_get_device_type(handle, &type)) return nullptr;
  return other && type == other->device_type ? other : type == cpu->device_type ? cpu : nullptr;
}

bool is_plain(PyObject* tensor) {
  const auto type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  return type == tensor_type || type == parameter_type;
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

// Whether body(x as it is computed with) made `out`, the first of which stands for what x stands for.
template <int N, class F>
bool computed(const Asked& of, void* x, AtenTensorHandle (&out)[N], const F& body) {
  const Seen seen(of, x);
  if (!body(seen.at())) return false;
  if (seen.give(out)) return true;
  for (AtenTensorHandle handle : out) {
    if (handle) aoti_torch_delete_tensor_object(handle);
  }
  return false;
}

// run(), and other threads of Python run meanwhile, unless it computes so little that to give way would take longer.
template <class F>
bool giving_way(const Asked& of, void* x, const F& run) {
  const int64_t* const size = of.layer.size;
  int64_t numel = 0;
  const bool known = !aoti_torch_get_numel(reinterpret_cast<AtenTensorHandle>(&x), &numel);
  return known && numel * size[0] * size[2] * size[3] <= kLittle ? run() : released(run);
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

// Whether PyTorch computes as usual now: nothing transforms, dispatches elsewhere or traces.
int is_usual(bool in_backward = false) {
  if (const int tangents = has_tangents()) return tangents < 0 ? -1 : 0;
  const int disturbed = is_disturbed(in_backward);
  return disturbed < 0 ? -1 : !disturbed;
}

// All that a node depends on besides the tensors of the layer, as bytes. None where there can be no node.
PyObject* key_of(PyObject* x, PyObject* training) {
  if (!is_plain(x)) return none();
  if (const int usual = is_usual(); usual <= 0) return usual ? nullptr : none();
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
  const Library* const library = library_of(address);
  // What is recorded is run again when nobody asks.
  if (!library || (library->records && library->records(address))) return none();
  int64_t cast = 0;
  if (!autocast_of(library, &cast)) return nullptr;
  if (const int negative = is_negative(x)) return negative < 0 ? nullptr : none();
  const int trained = requires_grad(x);
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
  const int is = requires_grad(object);
  return is < 0 ? -1 : is == (trained == Py_True);
}

// Whether this is the version of a tensor, of those that count.
int has_number(PyObject* tensor, int64_t wanted) {
  int64_t version;
  return version_of(tensor, &version) ? version == wanted : -1;
}

// Of None or (tensor, its version, …).
int has_version(PyObject* noted) {
  if (noted == Py_None) return 1;
  const int64_t wanted = PyLong_AsLongLong(PyTuple_GetItem(noted, 1));
  return PyErr_Occurred() ? -1 : has_number(PyTuple_GetItem(noted, 0), wanted);
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
      if (!same && watched.reads) cpu->read_anew(address);
      if (same <= 0) return same;
    }
  }
  return watched.bytes < kLong ? cpu->still(watched) : released([&] { return cpu->still(watched); });
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
  bool fits = params >= 0 && !PyErr_Occurred() && holds(serving) == 1 && is_usual(true) == 1;
  for (int n = 0; n < 2 + moves; ++n) fits = fits && addresses_in(args[n], params, tensors[n]);
  fits = fits && PyList_Check(args[3]) && PyList_Size(args[3]) == params;
  std::vector<double> l1(fits ? params : 0);
  for (Py_ssize_t n = 0; fits && n < params; ++n) l1[n] = PyFloat_AsDouble(PyList_GetItem(args[3], n));
  if (PyErr_Occurred()) {
    // Who asks says what is wrong.
    PyErr_Clear();
    fits = false;
  }
  const Library* const library = fits && params ? library_of(tensors[0][0]) : cpu;
  const bool done =
      fits && library && released([&] {
        void* const* const momenta = moves ? tensors[2].data() : nullptr;
        return library->prox_sgd_step(group, params, tensors[0].data(), tensors[1].data(), momenta, l1.data());
      });
  return PyBool_FromLong(done);
}

// (params, grads, first and second moments, counts of steps, [lr, β₁, β₂, eps, weight decay, l1, …]) → whether the step
// was made
PyObject* adamw_step(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expects("adamw_step", count, 6)) return nullptr;
  const Py_ssize_t params = PyList_Check(args[0]) ? PyList_Size(args[0]) : -1;
  std::vector<void*> tensors[5];
  bool fits = params >= 0 && holds(serving) == 1 && is_usual(true) == 1 && PyList_Check(args[5]) &&
              PyList_Size(args[5]) == 6 * params;
  for (int n = 0; n < 5; ++n) fits = fits && addresses_in(args[n], params, tensors[n]);
  std::vector<double> how(fits ? 6 * params : 0);
  for (size_t n = 0; n < how.size(); ++n) how[n] = PyFloat_AsDouble(PyList_GetItem(args[5], n));
  if (PyErr_Occurred()) return nullptr;
  const bool done = fits && released([&] {
                      return cpu->adamw_step(params, tensors[0].data(), tensors[1].data(), tensors[2].data(),
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
  if (!released([&] { return cpu->watch(found, addresses, count); })) return none();
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
  cpu->give_back(holding->memory);
  Py_DECREF(holding->tensor);
  delete holding;
}

// tensor → what keeps its memory, which nothing may write to as long as that lives; None where it is not kept
PyObject* hold(PyObject*, PyObject* tensor) {
  void* address;
  if (!address_of(tensor, &address)) return nullptr;
  const auto memory = cpu->hold(address);
  if (!memory.data) return none();
  Py_INCREF(tensor);
  return PyCapsule_New(new Holding{tensor, memory}, nullptr, give_back);
}

// The layer with these nodes for x, as `serve` in fastfact/ops/direct.py says.
PyObject* served(PyObject* nodes, PyObject* x, PyObject* training, PyObject* noted) {
  if (!PyDict_Size(nodes)) return none();
  const Ref asked(key_of(x, training));
  if (!asked) return nullptr;
  if (asked == Py_None) return none();
  PyObject* const found = PyDict_GetItemWithError(nodes, asked);
  if (!found) return PyErr_Occurred() ? nullptr : none();
  Py_INCREF(found);
  const Ref node(found);
  PyObject* const facts = PyTuple_GetItem(node, 0);
  PyObject* const watch = PyTuple_GetItem(node, 2);
  // Whoever watches the positions of μ sees them change.
  int is = watch == Py_None ? has_version(noted) : 1;
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

PyObject* serve(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return expects("serve", count, 4) ? served(args[0], args[1], args[2], args[3]) : nullptr;
}

// (out …) of a function of `direct`, None where it refuses.
template <int N, class F>
PyObject* given_out(const Asked& of, void* x, bool alone, const F& body) {
  AtenTensorHandle handles[N];
  const auto run = [&] { return computed(of, x, handles, [&](void* x) { return body(handles, x); }); };
  if (!giving_way(of, x, run)) return none();
  PyObject* out[N];
  if (!wrap(handles, N, out)) return nullptr;
  if (alone) return out[0];
  PyObject* const tuple = PyTuple_New(N);
  for (int n = 0; n < N; ++n) PyTuple_SetItem(tuple, n, out[n]);
  return tuple;
}

// (W [o, i], or that of a convolution) → W in panels, None where there is no such form
PyObject* panels(PyObject*, PyObject* weight) {
  void* w;
  AtenTensorHandle handle;
  if (!address_of(weight, &w)) return nullptr;
  if (!released([&] { return cpu->panels(&handle, w); })) return none();
  PyObject* out;
  return wrap(&handle, 1, &out) ? out : nullptr;
}

// (settings, x) → whether the convolution of x can be computed with its weight in panels
PyObject* convolves(PyObject*, PyObject* const* args, Py_ssize_t count) {
  void* x;
  Asked of;
  if (!expects("convolves", count, 2) || !of.read(args[0]) || !address_of(args[1], &x)) return nullptr;
  return PyBool_FromLong(!of.sequences && cpu->convolves(of.layer, x));
}

PyObject* layer(PyObject*, PyObject* const* args, Py_ssize_t count) {
  void* t[6];  // x, bias, μ, index, u, v
  Asked of;
  if (!expects("layer", count, 7) || !of.read(args[0]) || !addresses_of<6>(args + 1, t)) return nullptr;
  return given_out<2>(of, t[0], false, [&](AtenTensorHandle* out, void* x) {
    return cpu->layer(out, of.layer, x, t[1], t[2], t[3], nullptr, t[4], t[5]);
  });
}

PyObject* factored(PyObject*, PyObject* const* args, Py_ssize_t count) {
  void* t[6];  // x, u, v, values, index, bias
  Asked of;
  if (!expects("factored", count, 8) || !of.read(args[0]) || !addresses_of<6>(args + 2, t)) return nullptr;
  const bool repeated = args[1] == Py_True;
  return given_out<1>(of, t[0], true, [&](AtenTensorHandle* out, void* x) {
    return cpu->factored(out, of.layer, repeated, x, t[1], t[2], t[3], t[4], t[5], nullptr);
  });
}

PyObject* dense(PyObject*, PyObject* const* args, Py_ssize_t count) {
  void* t[3];  // x, W, bias
  Asked of;
  if (!expects("dense", count, 4) || !of.read(args[0]) || !addresses_of<3>(args + 1, t)) return nullptr;
  return given_out<1>(of, t[0], true, [&](AtenTensorHandle* out, void* x) {
    const Library* const library = library_of(x);
    return library && library->dense(out, of.layer, x, t[1], t[2]);
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

// Whether the layer of a plan was computed from these tensors. out: y, and what is kept for the backward, if anything.
bool compute(const Plan& plan, void* const* t, AtenTensorHandle (&out)[2]) {
  const Library* const library = library_of(t[kX]);
  return library && computed(plan.asked, t[kX], out, [&](void* x) {
           const Layer& of = plan.asked.layer;
           if (plan.makes) {
             return library->layer(out, of, x, t[kBias], t[kMu], t[kIndex], plan.support, t[kU], t[kV]);
           }
           return library->factored &&
                  library->factored(out, of, false, x, t[kU], t[kV], t[kMu], t[kIndex], t[kBias], out + 1);
         });
}

// Which of the tensors the gradients that a library gives belong to.
const int* order_of(const Plan& plan) {
  static constexpr int made[5] = {kX, kBias, kMu, kU, kV}, apart[5] = {kX, kU, kV, kMu, kBias},
                       adapter[5] = {kX, kU, kV, kIndex, kBias};
  return plan.makes ? made : plan.is_adapter() ? adapter : apart;
}

// Whether the gradients that bits of `needs` ask for, in the order of `order_of`, were computed from what was saved.
bool compute_backward(const Plan& plan, int64_t needs, void* grad, void* const* t, AtenTensorHandle (&out)[5]) {
  const Library* const library = library_of(t[kX]);
  return library && computed(plan.asked, t[kX], out, [&](void* x) {
           const Layer& of = plan.asked.layer;
           const Seen dy(plan.asked, grad);
           if (plan.makes) {
             return library->layer_backward(out, of, needs, dy.at(), x, t[kKept], t[kIndex], plan.support, t[kU],
                                            t[kV]);
           }
           void* const values = t[kKept] ? t[kKept] : t[kMu];
           return library->factored_backward &&
                  library->factored_backward(out, of, needs, dy.at(), x, t[kU], t[kV], values, t[kIndex]);
         });
}

// Which of what `forward` is given, x first, stands in this place of what is saved.
int saved_in(const Plan& plan, void* const* t, int place) {
  return place == kX && plan.is_adapter() && t[kIndex] ? int{kIndex} : place;
}

// The `Library` at an address, null with an error set where it is another version's.
const Library* library_at(PyObject* address) {
  const auto* const library = static_cast<const Library*>(PyLong_AsVoidPtr(address));
  if (library && library->size == sizeof(Library)) return library;
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_ImportError, "the compiled libraries are of different versions");
  return nullptr;
}

// begin(what holds while the CPU library serves, see `holds`; the address of that library; a Function that computes a
// plan by ops; what computes the backward of one, from (plan, which gradients, that of y, what was saved))
PyObject* begin(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expects("begin", count, 4) || !(cpu = library_at(args[1]))) return nullptr;
  for (PyObject* one : {args[0], args[2], args[3]}) Py_INCREF(one);
  serving = args[0], by_ops = args[2], differentiate = args[3];
  return none();
}

// take_library(the address of that of another device, or 0)
PyObject* take_library(PyObject*, PyObject* address) {
  other = PyObject_IsTrue(address) ? library_at(address) : nullptr;
  return PyErr_Occurred() ? nullptr : none();
}

// Of the modules of PyTorch, what is used above. False with an error set.
bool find_shared() {
  static const Name names[] = {{level_, "_current_level"}};
  if (!intern(names)) return false;
  const Ref torch(PyImport_ImportModule("torch")), parameters(PyImport_ImportModule("torch.nn.parameter")),
      ad(PyImport_ImportModule("torch.autograd.forward_ad"));
  if (!torch || !parameters || !ad) return false;
  tensor_type = PyObject_GetAttrString(torch, "Tensor");
  parameter_type = PyObject_GetAttrString(parameters, "Parameter");
  forward_ad = PyModule_GetDict(ad);
  Py_INCREF(forward_ad);
  return tensor_type && parameter_type;
}

using Fast = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

PyMethodDef fast(const char* name, Fast function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}

PyMethodDef of_one(const char* name, PyCFunction function) { return {name, function, METH_O, nullptr}; }

// What both modules have, and what one of them has besides.
std::vector<PyMethodDef> functions_with(std::initializer_list<PyMethodDef> own) {
  std::vector<PyMethodDef> all = {fast("key", key),
                                  fast("serve", serve),
                                  fast("layer", layer),
                                  fast("factored", factored),
                                  fast("dense", dense),
                                  fast("prox_sgd_step", prox_sgd_step),
                                  fast("watch", watch),
                                  fast("begin", begin),
                                  fast("adamw_step", adamw_step),
                                  of_one("panels", panels),
                                  fast("convolves", convolves),
                                  of_one("hold", hold),
                                  of_one("still", still_watched),
                                  of_one("take_library", take_library)};
  all.insert(all.end(), own);
  all.push_back({});
  return all;
}

}  // namespace
