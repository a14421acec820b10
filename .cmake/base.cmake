# SPDX-License-Identifier: LGPL-3.0-or-later
# One place for the compile options that every target of this project shares.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE
      Release
      CACHE STRING "" FORCE)
endif()
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

function(set_compile_options target)
  # Headers of torch >= 2.13 need C++20; 2.11 is content with 17.
  if(DEEPMD_PREWARM_TORCH_VERSION VERSION_GREATER_EQUAL 2.13)
    target_compile_features(${target} PUBLIC cxx_std_20)
  else()
    target_compile_features(${target} PUBLIC cxx_std_17)
  endif()
  set_target_properties(
    ${target}
    PROPERTIES CXX_EXTENSIONS OFF
               CXX_VISIBILITY_PRESET hidden
               VISIBILITY_INLINES_HIDDEN ON
               POSITION_INDEPENDENT_CODE ON)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic)
  if(DEEPMD_PREWARM_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(DEEPMD_PREWARM_SANITIZE)
    target_compile_options(
      ${target} PRIVATE -fsanitize=${DEEPMD_PREWARM_SANITIZE}
                        -fno-omit-frame-pointer -g)
    target_link_options(${target} PRIVATE -fsanitize=${DEEPMD_PREWARM_SANITIZE})
  endif()
endfunction()
