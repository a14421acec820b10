# SPDX-License-Identifier: LGPL-3.0-or-later
# Target deepmd_prewarm::libtorch, without find_package(Torch): the config of a
# CUDA torch demands a CUDA toolkit, which a user's machine may not have, and
# this library needs no CUDA header. Used by this build and by the installed
# package.
#
# Looks in DEEPMD_PREWARM_TORCH_ROOT (a libtorch folder) if set, else next to the
# installed Python package, else asks the Python interpreter for its torch.
set(DEEPMD_PREWARM_TORCH_ROOT
    ""
    CACHE PATH "libtorch folder; empty: ask Python")
if(DEEPMD_PREWARM_TORCH_ROOT)
  set(_root "${DEEPMD_PREWARM_TORCH_ROOT}")
elseif(EXISTS "${DEEPMD_PREWARM_TORCH_HINT}/include/torch")
  set(_root "${DEEPMD_PREWARM_TORCH_HINT}")
else()
  find_package(Python REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import os, importlib.util as u; \
print(os.path.dirname(u.find_spec('torch').origin))"
    OUTPUT_VARIABLE _root
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET
    RESULT_VARIABLE _status)
  if(_status)
    message(
      FATAL_ERROR
        "deepmd-prewarm: ${Python_EXECUTABLE} cannot find torch. Install torch, "
        "or pass -DPython_EXECUTABLE=... or -DDEEPMD_PREWARM_TORCH_ROOT=...")
  endif()
endif()
set(_version_h "${_root}/include/torch/headeronly/version.h")
if(NOT EXISTS "${_version_h}")
  message(FATAL_ERROR "deepmd-prewarm: expected ${_version_h}, found none. "
                      "This needs torch >= 2.11 with its headers.")
endif()
file(READ "${_version_h}" _text)
foreach(part MAJOR MINOR PATCH)
  string(REGEX MATCH "define TORCH_VERSION_${part} ([0-9]+)" _ "${_text}")
  set(_${part} "${CMAKE_MATCH_1}")
endforeach()
set(DEEPMD_PREWARM_TORCH_VERSION "${_MAJOR}.${_MINOR}.${_PATCH}")
set(DEEPMD_PREWARM_TORCH_LIB "${_root}/lib")

# Imported, so that nothing of this host's paths is installed.
add_library(deepmd_prewarm::libtorch INTERFACE IMPORTED GLOBAL)
set_target_properties(
  deepmd_prewarm::libtorch
  PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES
    "${_root}/include;${_root}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO"
    INTERFACE_LINK_LIBRARIES
    "${_root}/lib/libtorch.so;${_root}/lib/libtorch_cpu.so;${_root}/lib/libc10.so"
)
message(
  STATUS "deepmd-prewarm: torch ${DEEPMD_PREWARM_TORCH_VERSION} in ${_root}")
