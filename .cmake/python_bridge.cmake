# SPDX-License-Identifier: LGPL-3.0-or-later
# The extension module deepmd_prewarm._bridge: the only object that knows Python.
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
python_add_library(
  deepmd_prewarm_bridge
  MODULE
  WITH_SOABI
  plugin/python_bridge.cpp
  plugin/python_bridge_agreement.cpp
  plugin/python_bridge_device.cpp
  plugin/python_bridge_losses.cpp)
set_compile_options(deepmd_prewarm_bridge)
set_target_properties(
  deepmd_prewarm_bridge
  PROPERTIES OUTPUT_NAME _bridge
             LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/lib"
             INSTALL_RPATH "$ORIGIN/lib;$ORIGIN/../torch/lib")
# torch ships the pybind11 that its own bindings were made with; a second one
# would have another idea of at::Tensor's caster.
target_compile_definitions(deepmd_prewarm_bridge
                           PRIVATE TORCH_EXTENSION_NAME=_bridge)
target_link_libraries(
  deepmd_prewarm_bridge
  PRIVATE deepmd_prewarm "${DEEPMD_PREWARM_TORCH_LIB}/libtorch_python.so")
