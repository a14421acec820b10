# SPDX-License-Identifier: LGPL-3.0-or-later
# The same layout below a prefix and inside the Python package, so that
# CMAKE_PREFIX_PATH=<site-packages>/deepmd_prewarm works.
install(TARGETS deepmd_prewarm LIBRARY DESTINATION lib)
foreach(room ops plugin)
  install(
    DIRECTORY ${room}/
    DESTINATION include/deepmd_prewarm/${room}
    FILES_MATCHING
    PATTERN "*.h")
endforeach()
if(DEEPMD_PREWARM_BRIDGE)
  install(TARGETS deepmd_prewarm_bridge LIBRARY DESTINATION .)
endif()
