# SPDX-License-Identifier: LGPL-3.0-or-later
# What this machine has of CUDA and NCCL, and which parts are built therefore:
# DEEPMD_PREWARM_HAS_<part>, or DEEPMD_PREWARM_NO_<part> says why not.
#
# AUTO takes what torch and the machine have, ON insists, OFF leaves it out. The
# headers are those of the wheels that torch came with, else a toolkit's; a
# machine without nvcc builds all but the probe kernel.
foreach(part CUDA NCCL)
  set(DEEPMD_PREWARM_${part}
      AUTO
      CACHE STRING "${part} in libdeepmd_prewarm_cuda.so: AUTO, ON, OFF")
  set_property(CACHE DEEPMD_PREWARM_${part} PROPERTY STRINGS AUTO ON OFF)
  if(NOT DEEPMD_PREWARM_${part} MATCHES "^(AUTO|ON|OFF)$")
    message(
      FATAL_ERROR "deepmd-prewarm: expected DEEPMD_PREWARM_${part} to be AUTO, "
                  "ON or OFF, got '${DEEPMD_PREWARM_${part}}'.")
  endif()
endforeach()
if(DEEPMD_PREWARM_CUDA STREQUAL "OFF" AND DEEPMD_PREWARM_NCCL STREQUAL "ON")
  message(FATAL_ERROR "deepmd-prewarm: DEEPMD_PREWARM_NCCL=ON needs "
                      "DEEPMD_PREWARM_CUDA=ON or AUTO, got OFF.")
endif()

# Where a header or library may be: with torch, then in a toolkit.
get_filename_component(_site "${DEEPMD_PREWARM_TORCH_LIB}/../.." ABSOLUTE)
file(GLOB _wheels "${_site}/nvidia/cu[0-9]*" "${_site}/nvidia/cuda_runtime"
     "${_site}/nvidia/nccl")
find_program(
  DEEPMD_PREWARM_NVCC nvcc
  PATHS ENV CUDA_HOME /usr/local/cuda
  PATH_SUFFIXES bin)
mark_as_advanced(DEEPMD_PREWARM_NVCC)
set(_toolkit "$ENV{CUDA_HOME}")
if(DEEPMD_PREWARM_NVCC)
  get_filename_component(_toolkit "${DEEPMD_PREWARM_NVCC}" REALPATH)
  get_filename_component(_toolkit "${_toolkit}/../.." ABSOLUTE)
endif()

# find_part(variable file kind): kind is include or lib.
function(find_part variable file kind)
  foreach(folder ${_wheels} "${_toolkit}" "${_toolkit}/targets/x86_64-linux"
                 /usr /usr/local)
    file(GLOB found "${folder}/${kind}/${file}" "${folder}/${kind}64/${file}"
         "${folder}/${kind}/${CMAKE_LIBRARY_ARCHITECTURE}/${file}")
    if(found)
      list(GET found 0 found)
      set(${variable}
          "${found}"
          PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(${variable}
      ""
      PARENT_SCOPE)
endfunction()

find_part(_cuda_h cuda_runtime_api.h include)
find_part(_cusparse_h cusparse.h include)
find_part(_cudart "libcudart.so*" lib)
find_part(_nccl_h nccl.h include)
find_part(_nccl "libnccl.so*" lib)

# Major versions must fit: the runtime is the one that torch has loaded.
set(_torch_cuda "")
if(EXISTS "${DEEPMD_PREWARM_TORCH_LIB}/../version.py")
  file(STRINGS "${DEEPMD_PREWARM_TORCH_LIB}/../version.py" _line REGEX "^cuda")
  string(REGEX MATCH "'([0-9]+)\\.[0-9]+'" _ "${_line}")
  set(_torch_cuda "${CMAKE_MATCH_1}")
endif()
set(_found_cuda "")
if(_cuda_h)
  file(STRINGS "${_cuda_h}" _line REGEX "define CUDART_VERSION ")
  string(REGEX MATCH "([0-9]+)[0-9][0-9][0-9]$" _ "${_line}")
  set(_found_cuda "${CMAKE_MATCH_1}")
endif()

set(_missing_CUDA "")
if(NOT EXISTS "${DEEPMD_PREWARM_TORCH_LIB}/libtorch_cuda.so")
  list(APPEND _missing_CUDA "a torch with CUDA (libtorch_cuda.so)")
endif()
if(NOT _cuda_h)
  list(APPEND _missing_CUDA "cuda_runtime_api.h (a CUDA toolkit)")
elseif(_torch_cuda AND NOT _torch_cuda STREQUAL _found_cuda)
  list(APPEND _missing_CUDA
       "CUDA ${_torch_cuda}, which torch has (found ${_found_cuda})")
endif()
if(NOT _cusparse_h)
  list(APPEND _missing_CUDA "cusparse.h, which torch's headers include")
endif()
if(NOT _cudart)
  list(APPEND _missing_CUDA "libcudart.so")
endif()
set(_missing_NCCL "${_missing_CUDA}")
if(NOT _nccl_h)
  list(APPEND _missing_NCCL "nccl.h")
endif()
if(NOT _nccl)
  list(APPEND _missing_NCCL "libnccl.so")
endif()

foreach(part CUDA NCCL)
  list(JOIN _missing_${part} ", " _text)
  if(DEEPMD_PREWARM_${part} STREQUAL "OFF")
    set(DEEPMD_PREWARM_HAS_${part} OFF)
    set(DEEPMD_PREWARM_NO_${part} "switched off by DEEPMD_PREWARM_${part}=OFF")
  elseif(_missing_${part})
    if(DEEPMD_PREWARM_${part} STREQUAL "ON")
      message(
        FATAL_ERROR
          "deepmd-prewarm: DEEPMD_PREWARM_${part}=ON, but this is missing: ${_text}. "
          "Install it, set CUDA_HOME, or use DEEPMD_PREWARM_${part}=AUTO.")
    endif()
    set(DEEPMD_PREWARM_HAS_${part} OFF)
    set(DEEPMD_PREWARM_NO_${part} "missing: ${_text}")
  else()
    set(DEEPMD_PREWARM_HAS_${part} ON)
    set(DEEPMD_PREWARM_NO_${part} "")
  endif()
endforeach()
if(NOT DEEPMD_PREWARM_HAS_CUDA AND DEEPMD_PREWARM_HAS_NCCL)
  set(DEEPMD_PREWARM_HAS_NCCL OFF)
  set(DEEPMD_PREWARM_NO_NCCL "it is a part of the CUDA part")
endif()
foreach(part CUDA NCCL)
  if(DEEPMD_PREWARM_HAS_${part})
    message(STATUS "deepmd-prewarm: ${part} part is built")
  else()
    message(
      STATUS
        "deepmd-prewarm: ${part} part isn't built: ${DEEPMD_PREWARM_NO_${part}}"
    )
  endif()
endforeach()
