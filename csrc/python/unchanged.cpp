// fastplm._unchanged: whether objects are still as they were. fastplm/models/_encoder_call.py asks this before each
// call, of every module of a model. After a call all of this is out of the caches, where the model's weights were. So
// dicts are walked in their order: to look up each key of one in the other, as Python does, reads twice as much.
//
// Nothing here runs Python code: values are compared by identity, so another object that is equal is a change.
#include <Python.h>

namespace {

PyObject* none_or(PyObject* value) { return value == nullptr ? Py_None : value; }

bool are_tuples(Py_ssize_t count, PyObject* const* arguments, Py_ssize_t expected) {
  bool right = count == expected;
  for (Py_ssize_t i = 0; right && i < count; ++i) {
    right = PyTuple_Check(arguments[i]) && PyTuple_Size(arguments[i]) == PyTuple_Size(arguments[0]);
  }
  if (!right) PyErr_Format(PyExc_TypeError, "expected %zd tuples of one length", expected);
  return right;
}

// Whether `dict` has just these names with these values, in this order; -1 with an error set.
int has_items(PyObject* dict, PyObject* names, PyObject* values) {
  if (!PyDict_Check(dict) || !PyTuple_Check(names) || !PyTuple_Check(values)) {
    PyErr_SetString(PyExc_TypeError, "expected the dict of an object, a tuple of names and one of values");
    return -1;
  }
  const Py_ssize_t count = PyTuple_Size(names);
  if (PyDict_Size(dict) != count || PyTuple_Size(values) != count) return 0;
  PyObject *name, *value;
  Py_ssize_t next = 0;
  for (Py_ssize_t i = 0; PyDict_Next(dict, &next, &name, &value); ++i) {
    if (PyTuple_GetItem(names, i) != name || PyTuple_GetItem(values, i) != value) return 0;
  }
  return 1;
}

// attributes(objects, names, values): whether the attributes of objects[i] are names[i] with values[i], for all i.
PyObject* attributes(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!are_tuples(count, arguments, 3)) return nullptr;
  int same = 1;
  for (Py_ssize_t i = 0; same == 1 && i < PyTuple_Size(arguments[0]); ++i) {
    PyObject* dict = PyObject_GenericGetDict(PyTuple_GetItem(arguments[0], i), nullptr);
    if (dict == nullptr) return nullptr;
    same = has_items(dict, PyTuple_GetItem(arguments[1], i), PyTuple_GetItem(arguments[2], i));
    Py_DECREF(dict);
  }
  return same < 0 ? nullptr : PyBool_FromLong(same);
}

// entries(dicts, keys, values): whether dicts[i].get(keys[i]) is values[i], for all i.
PyObject* entries(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!are_tuples(count, arguments, 3)) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_Size(arguments[0]); ++i) {
    PyObject* found = PyDict_GetItemWithError(PyTuple_GetItem(arguments[0], i), PyTuple_GetItem(arguments[1], i));
    if (found == nullptr && PyErr_Occurred()) return nullptr;
    if (none_or(found) != PyTuple_GetItem(arguments[2], i)) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

// types(objects, classes): whether type(objects[i]) is classes[i], for all i.
PyObject* types(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!are_tuples(count, arguments, 2)) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_Size(arguments[0]); ++i) {
    PyTypeObject* type = Py_TYPE(PyTuple_GetItem(arguments[0], i));
    if (reinterpret_cast<PyObject*>(type) != PyTuple_GetItem(arguments[1], i)) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

template <auto function>
PyMethodDef method(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}

PyMethodDef methods[] = {method<attributes>("attributes"), method<entries>("entries"), method<types>("types"), {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "fastplm._unchanged", nullptr, 0, methods, {}, {}, {}, {}};

}  // namespace

PyMODINIT_FUNC PyInit__unchanged() { return PyModuleDef_Init(&module); }
