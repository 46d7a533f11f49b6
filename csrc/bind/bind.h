// What the files of the Python bindings share. Every kernel takes raw addresses, and the GIL is released
// around it.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "../runtime/linear.h"

namespace radix {

namespace nb = nanobind;
using nb::arg;
using Release = nb::call_guard<nb::gil_scoped_release>;

void bind_kernels(nb::module_& m);
void bind_program(nb::module_& m);
void bind_ranks(nb::module_& m);

}  // namespace radix
