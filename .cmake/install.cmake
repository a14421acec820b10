# SPDX-License-Identifier: LGPL-3.0-or-later
# The same layout below a prefix and inside the Python package, so that
# CMAKE_PREFIX_PATH=<site-packages>/deepmd_prewarm works.
include(CMakePackageConfigHelpers)
set(_package lib/cmake/deepmd_prewarm)
install(
  TARGETS deepmd_prewarm
  EXPORT targets
  LIBRARY DESTINATION lib)
install(
  EXPORT targets
  NAMESPACE deepmd_prewarm::
  FILE targets.cmake
  DESTINATION ${_package})
configure_package_config_file(
  "${CMAKE_CURRENT_LIST_DIR}/config.cmake.in"
  "${CMAKE_BINARY_DIR}/deepmd_prewarmConfig.cmake"
  INSTALL_DESTINATION ${_package})
write_basic_package_version_file(
  "${CMAKE_BINARY_DIR}/deepmd_prewarmConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(
  FILES "${CMAKE_BINARY_DIR}/deepmd_prewarmConfig.cmake"
        "${CMAKE_BINARY_DIR}/deepmd_prewarmConfigVersion.cmake"
        "${CMAKE_CURRENT_LIST_DIR}/libtorch.cmake" DESTINATION ${_package})
foreach(room ops plugin)
  install(
    DIRECTORY ${room}/
    DESTINATION include/deepmd_prewarm/${room}
    FILES_MATCHING
    PATTERN "*.h"
    PATTERN "cuda_parts.h" EXCLUDE)
endforeach()
if(DEEPMD_PREWARM_HAS_CUDA)
  install(TARGETS deepmd_prewarm_cuda LIBRARY DESTINATION lib)
endif()
if(DEEPMD_PREWARM_BRIDGE)
  install(TARGETS deepmd_prewarm_bridge LIBRARY DESTINATION .)
endif()
