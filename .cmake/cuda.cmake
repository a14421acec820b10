# SPDX-License-Identifier: LGPL-3.0-or-later
# libdeepmd_prewarm_cuda.so: what needs CUDA's or NCCL's headers. The operator
# library needs neither and finds this one beside itself, or goes without.
include(cuda_found)

if(DEEPMD_PREWARM_HAS_CUDA)
  add_library(deepmd_prewarm_cuda SHARED plugin/cuda_extension.cpp)
  set_compile_options(deepmd_prewarm_cuda)
  target_include_directories(deepmd_prewarm_cuda
                             PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
  target_compile_definitions(
    deepmd_prewarm_cuda
    PRIVATE DEEPMD_PREWARM_VERSION="${PROJECT_VERSION}"
            DEEPMD_PREWARM_TORCH_VERSION="${DEEPMD_PREWARM_TORCH_VERSION}")
  foreach(header _cuda_h _cusparse_h)
    get_filename_component(_folder "${${header}}" DIRECTORY)
    target_include_directories(deepmd_prewarm_cuda SYSTEM PRIVATE "${_folder}")
  endforeach()
  target_link_libraries(
    deepmd_prewarm_cuda
    PRIVATE deepmd_prewarm "${DEEPMD_PREWARM_TORCH_LIB}/libtorch_cuda.so"
            "${DEEPMD_PREWARM_TORCH_LIB}/libc10_cuda.so" "${_cudart}")
  # libtorch_cuda.so finds its own libraries when it is loaded.
  target_link_options(deepmd_prewarm_cuda PRIVATE -Wl,-z,nodelete
                      -Wl,--unresolved-symbols=ignore-in-shared-libs)
  set_target_properties(
    deepmd_prewarm_cuda
    PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/lib"
               INSTALL_RPATH "$ORIGIN;$ORIGIN/../../torch/lib")
  if(DEEPMD_PREWARM_HAS_NCCL)
    get_filename_component(_folder "${_nccl_h}" DIRECTORY)
    target_sources(deepmd_prewarm_cuda PRIVATE plugin/cuda_communicators.cpp)
    target_include_directories(deepmd_prewarm_cuda SYSTEM PRIVATE "${_folder}")
    target_compile_definitions(deepmd_prewarm_cuda PRIVATE DEEPMD_PREWARM_NCCL
                                                           USE_C10D_NCCL)
    target_link_libraries(deepmd_prewarm_cuda PRIVATE "${_nccl}")
  endif()
  # The one kernel: host code of the rest needs no nvcc. Not by
  # enable_language(CUDA), which ends the build where nvcc doesn't fit the host
  # compiler; here that only leaves the kernel out.
  if(DEEPMD_PREWARM_NVCC)
    set(_nvcc "${DEEPMD_PREWARM_NVCC}" -std=c++17 -O2 -arch=sm_75 -c
              -Xcompiler=-fPIC,-fvisibility=hidden)
    set(_source "${CMAKE_CURRENT_SOURCE_DIR}/plugin/cuda_probe.cu")
    if(NOT DEFINED DEEPMD_PREWARM_NVCC_WORKS)
      execute_process(
        COMMAND ${_nvcc} "${_source}" -o "${CMAKE_BINARY_DIR}/probe_trial.o"
        RESULT_VARIABLE _status
        OUTPUT_VARIABLE _text
        ERROR_VARIABLE _text)
      execute_process(COMMAND "${DEEPMD_PREWARM_NVCC}" --version
                      OUTPUT_VARIABLE _release)
      string(REGEX MATCH "release ([0-9]+)" _ "${_release}")
      if(_status EQUAL 0 AND CMAKE_MATCH_1 STREQUAL _found_cuda)
        set(_works ON)
      else()
        set(_works OFF)
        message(
          STATUS "deepmd-prewarm: no probe kernel: "
                 "${DEEPMD_PREWARM_NVCC} (CUDA ${CMAKE_MATCH_1}) does not "
                 "fit CUDA ${_found_cuda} or the compiler. ${_text}")
      endif()
      set(DEEPMD_PREWARM_NVCC_WORKS
          ${_works}
          CACHE INTERNAL "nvcc compiles the probe kernel")
    endif()
  endif()
  if(DEEPMD_PREWARM_NVCC AND DEEPMD_PREWARM_NVCC_WORKS)
    set(_object "${CMAKE_BINARY_DIR}/cuda_probe.o")
    add_custom_command(
      OUTPUT "${_object}"
      COMMAND ${_nvcc} "${_source}" -o "${_object}"
      DEPENDS "${_source}"
      COMMENT "Building CUDA object plugin/cuda_probe.cu"
      VERBATIM)
    target_sources(deepmd_prewarm_cuda PRIVATE "${_object}")
    set_source_files_properties("${_object}" PROPERTIES EXTERNAL_OBJECT ON
                                                        GENERATED ON)
    target_compile_definitions(deepmd_prewarm_cuda PRIVATE DEEPMD_PREWARM_PROBE)
  endif()
endif()
# The operator library tells why, where the other one isn't there.
set_source_files_properties(
  plugin/device_extension.cpp
  PROPERTIES COMPILE_DEFINITIONS
             "DEEPMD_PREWARM_NO_CUDA=\"${DEEPMD_PREWARM_NO_CUDA}\"")
