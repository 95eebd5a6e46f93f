# Compiler, warnings, sanitizers, launcher and linker.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)  # the static libraries end up in a Python module too

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Release or Debug" FORCE)
endif()

# -Wshadow finds the captured-by-accident names of nested coroutines. Omitted fields of designated
# initialisers are how options are written here (house style), so that warning of -Wextra is off.
option(WEFT_WERROR "Warnings are errors" OFF)
option(WEFT_PEDANTIC "Warn about what is not ISO C++" OFF)
add_compile_options(-Wall -Wextra -Wshadow -Wno-missing-field-initializers)
if(WEFT_PEDANTIC)
  add_compile_options(-Wpedantic)
endif()
if(WEFT_WERROR)
  add_compile_options(-Werror)
endif()
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  add_compile_options(-Wthread-safety -Werror=thread-safety)  # base/mutex.h
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # False alarms: on a promise's operator new that is a template (the arena's), which g++ does not pair with its
  # operator delete; and up to g++ 12 on std::string's operator+ (GCC bug 105651).
  add_compile_options(-Wno-mismatched-new-delete)
  if(CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    add_compile_options(-Wno-restrict)
  endif()
endif()

set(WEFT_SANITIZE "" CACHE STRING "Value of -fsanitize= for the whole tree, e.g. address,undefined")
if(WEFT_SANITIZE)
  add_compile_options(-fsanitize=${WEFT_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${WEFT_SANITIZE})
endif()

# Paths relative to the tree, so that a second clone or worktree finds what the first has compiled.
find_program(WEFT_CCACHE ccache)
if(WEFT_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${WEFT_CCACHE})
endif()

find_program(WEFT_MOLD mold)
if(WEFT_MOLD)
  include(CheckLinkerFlag)
  check_linker_flag(CXX -fuse-ld=mold WEFT_MOLD_WORKS)
  if(WEFT_MOLD_WORKS)
    add_link_options(-fuse-ld=mold)
  endif()
endif()
