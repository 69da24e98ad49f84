// The Python module fastfact._cpu (see bind_module.h) for any PyTorch and Python, in the limited API of 3.10: what is
// asked of a tensor is asked as Python does, and a layer in training is a Function of Python.
#include <algorithm>

#include "bind_direct.h"
#include "bind_python.h"

// PyTorch's, from 2.14 on.
extern "C" __attribute__((weak)) AOTITorchError torch_tensor_to_pyobject(AtenTensorHandle, void*, void**);

namespace {

using namespace fastfact::python;
using fastfact::direct::Library;

constexpr int kQuestions = 4, kInBackward = 2;

PyObject *cdata_, *requires_grad_, *version_, *is_neg_, *saved_tensors_, *needs_input_grad_, *plan_, *to_save_,
    *forward_;
PyObject *questions[kQuestions], *take;
PyObject *casts_any, *casts, *cast_to, *cpu_name, *cuda_name, *is_batched;

// Of a tensor, or nullptr for None.
bool address_of(PyObject* tensor, void** out) {
  *out = nullptr;
  if (tensor == Py_None) return true;
  const Ref found(PyObject_GetAttr(tensor, cdata_));
  if (!found) return false;
  *out = PyLong_AsVoidPtr(found);
  return *out || !PyErr_Occurred();
}

int is_negative(PyObject* tensor) { return is_true(PyObject_CallMethodObjArgs(tensor, is_neg_, nullptr)); }

int requires_grad(PyObject* tensor) { return is_true(PyObject_GetAttr(tensor, requires_grad_)); }

bool version_of(PyObject* tensor, int64_t* out) {
  const Ref version(PyObject_GetAttr(tensor, version_));
  if (version) *out = PyLong_AsLongLong(version);
  return !PyErr_Occurred();
}

// Whether something transforms what PyTorch computes now, dispatches it elsewhere or, unless in a backward, traces it.
int is_disturbed(bool in_backward) {
  for (int n = 0; n < (in_backward ? kInBackward : kQuestions); ++n) {
    if (const int answer = is_true(PyObject_CallNoArgs(questions[n]))) return answer;
  }
  return 0;
}

// What autocast has computed on the device of a library, 0 for nothing. False with an error set.
bool autocast_of(const Library* library, int64_t* out) {
  *out = 0;
  const int any = is_true(PyObject_CallNoArgs(casts_any));
  if (any <= 0) return !any;
  PyObject* const name = library->device_type == aoti_torch_device_type_cpu() ? cpu_name : cuda_name;
  const int there = is_true(PyObject_CallFunctionObjArgs(casts, name, nullptr));
  if (there <= 0) return !there;
  const Ref to(PyObject_CallFunctionObjArgs(cast_to, name, nullptr));
  *out = reinterpret_cast<int64_t>(to.operator PyObject*());  // of each type there is one object
  return to;
}

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

}  // namespace

#include "bind_module.h"

namespace {

// forward(ctx, plan, x, u, v, μ, index, bias) → y
PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expects("forward", count, 2 + kGiven)) return nullptr;
  Plan plan;
  void* t[kGiven];
  if (!plan.read(args[1]) || !addresses_of<kGiven>(args + 2, t)) return nullptr;
  AtenTensorHandle handles[2] = {};
  const bool done = giving_way(plan.asked, t[kX], [&] { return compute(plan, t, handles); });
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
  for (int n = 0; n < kGiven; ++n) {
    PyObject* const one = args[2 + saved_in(plan, t, n)];
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
  if (const int usual = is_usual(true); usual <= 0) return usual;
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
    const int* const order = order_of(plan);
    int64_t needs = 0;
    for (int n = 0; n < 5; ++n) needs |= int64_t{PyTuple_GetItem(needed, 1 + order[n]) == Py_True} << n;
    AtenTensorHandle handles[5];
    const bool done = giving_way(plan.asked, t[kX], [&] { return compute_backward(plan, needs, by, t, handles); });
    if (done) {
      PyObject* found[5];
      if (!wrap(handles, 5, found)) return nullptr;
      PyObject* const out = PyTuple_New(1 + kGiven);
      for (int n : {0, 1 + (plan.is_adapter() ? kMu : kIndex)}) PyTuple_SetItem(out, n, none());
      for (int n = 0; n < 5; ++n) PyTuple_SetItem(out, 1 + order[n], found[n]);
      return out;
    }
  }
  PyObject* const asked[] = {how, needed, grad, saved};
  const Ref all(tuple_of(asked, 4));
  return all ? PyObject_CallObject(differentiate, all) : nullptr;
}

PyMethodDef of_context[] = {{"apply", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(backward)),
                             METH_FASTCALL, "The backward of a Function, from the gradient of its output."}};

// The class of a Function's context has its backward computed here.
PyObject* use_backward(PyObject*, PyObject* context) {
  const Ref method(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(context), of_context));
  return method && !PyObject_SetAttrString(context, "apply", method) ? none() : nullptr;
}

std::vector<PyMethodDef> functions =
    functions_with({fast("forward", forward), of_one("compute_backward", use_backward)});

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fastfact._cpu", nullptr, -1, functions.data()};

bool find() {
  static const Name names[] = {{cdata_, "_cdata"},
                               {requires_grad_, "requires_grad"},
                               {version_, "_version"},
                               {is_neg_, "is_neg"},
                               {saved_tensors_, "saved_tensors"},
                               {needs_input_grad_, "needs_input_grad"},
                               {plan_, "plan"},
                               {to_save_, "to_save"},
                               {forward_, "forward"},
                               {cpu_name, "cpu"},
                               {cuda_name, "cuda"}};
  if (!find_shared() || !intern(names)) return false;
  const Ref torch(PyImport_ImportModule("torch")), inner(PyImport_ImportModule("torch._C")),
      functorch(PyImport_ImportModule("torch._C._functorch"));
  if (!torch || !inner || !functorch) return false;
  casts_any = PyObject_GetAttrString(inner, "_is_any_autocast_enabled");
  casts = PyObject_GetAttrString(torch, "is_autocast_enabled");
  cast_to = PyObject_GetAttrString(torch, "get_autocast_dtype");
  is_batched = PyObject_GetAttrString(functorch, "is_legacy_batchedtensor");
  if (!casts_any || !casts || !cast_to || !is_batched) return false;
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
