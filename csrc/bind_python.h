// What the modules of Python need of it, in the limited API of 3.10.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace fastfact::python {

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

inline PyObject* none() { return Py_INCREF(Py_None), Py_None; }

// 1 or 0, −1 with an error set.
inline int is_true(PyObject* owned) {
  const Ref answer(owned);
  return answer ? PyObject_IsTrue(answer) : -1;
}

// Other threads of Python run meanwhile.
template <class F>
auto released(const F& body) {
  PyThreadState* state = PyEval_SaveThread();
  const auto out = body();
  PyEval_RestoreThread(state);
  return out;
}

inline PyObject* tuple_of(PyObject* const* objects, Py_ssize_t count) {
  PyObject* const out = PyTuple_New(count);
  for (Py_ssize_t n = 0; out && n < count; ++n) {
    Py_INCREF(objects[n]);
    PyTuple_SetItem(out, n, objects[n]);
  }
  return out;
}

struct Name {
  PyObject*& at;
  const char* name;
};

template <int N>
bool intern(const Name (&names)[N]) {
  for (const auto& [at, name] : names) {
    if (!(at = PyUnicode_InternFromString(name))) return false;
  }
  return true;
}

}  // namespace fastfact::python
