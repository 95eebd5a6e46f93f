# LibTorch, without the package's own TorchConfig.cmake: that one wants a CUDA toolkit for a CUDA wheel, and weft needs
# nothing of it. Looked for in: Torch_DIR, CMAKE_PREFIX_PATH, then where a Python imports torch from (.venv first).
# Defines LibTorch::LibTorch, LibTorch_VERSION, LibTorch_ROOT_DIR, and LibTorch_PROBLEM (one sentence) where it is not found.

# What the Pythons say is asked once: importing torch takes a second.
function(_weft_ask_python result)
  if(DEFINED CACHE{WEFT_TORCH_OF_PYTHON} AND EXISTS "$CACHE{WEFT_TORCH_OF_PYTHON}/include/torch")
    set(${result} $CACHE{WEFT_TORCH_OF_PYTHON} PARENT_SCOPE)
    return()
  endif()
  foreach(python IN ITEMS ${PROJECT_SOURCE_DIR}/.venv/bin/python python3)
    execute_process(COMMAND ${python} -c "import os, torch; print(os.path.dirname(torch.__file__))"
      OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed)
      set(WEFT_TORCH_OF_PYTHON ${folder} CACHE INTERNAL "folder of the torch that Python imports")
      set(${result} ${folder} PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

set(_roots "")
if(Torch_DIR)
  list(APPEND _roots ${Torch_DIR}/../../..)
endif()
foreach(_prefix IN LISTS CMAKE_PREFIX_PATH)
  list(APPEND _roots ${_prefix} ${_prefix}/../..)  # of libtorch, and as torch.utils.cmake_prefix_path gives it
endforeach()
set(_root "")
foreach(_candidate IN LISTS _roots)
  if(EXISTS ${_candidate}/include/torch/csrc/api/include/torch/torch.h AND NOT _root)
    get_filename_component(_root ${_candidate} ABSOLUTE)
  endif()
endforeach()
if(NOT _root AND NOT Torch_DIR)
  _weft_ask_python(_root)
endif()

set(LibTorch_VERSION "")
foreach(_header IN ITEMS torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
  if(_root AND NOT LibTorch_VERSION AND EXISTS ${_root}/include/${_header})
    file(STRINGS ${_root}/include/${_header} _lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
    string(REGEX REPLACE "[^0-9;]" "" _numbers "${_lines}")
    string(REPLACE ";" "." LibTorch_VERSION "${_numbers}")
  endif()
endforeach()

set(LibTorch_FOUND FALSE)
if(NOT _root AND Torch_DIR)
  set(LibTorch_PROBLEM "Torch_DIR=${Torch_DIR} is in no torch (unset it to take Python's, or make setup)")
elseif(NOT _root)
  set(LibTorch_PROBLEM "no Python imports torch and no Torch_DIR is given (make setup installs it into .venv)")
elseif(NOT LibTorch_VERSION OR LibTorch_VERSION VERSION_LESS LibTorch_FIND_VERSION)
  set(LibTorch_PROBLEM "torch '${LibTorch_VERSION}' in ${_root} is older than ${LibTorch_FIND_VERSION}")
elseif(NOT EXISTS ${_root}/lib/libtorch_cpu.so OR NOT EXISTS ${_root}/lib/libc10.so)
  set(LibTorch_PROBLEM "${_root}/lib has no libtorch_cpu.so and libc10.so")
else()
  set(LibTorch_FOUND TRUE)
  set(LibTorch_ROOT_DIR ${_root})
endif()

if(LibTorch_FOUND AND NOT TARGET LibTorch::LibTorch)
  add_library(LibTorch::c10 SHARED IMPORTED)
  set_target_properties(LibTorch::c10 PROPERTIES IMPORTED_LOCATION ${_root}/lib/libc10.so)
  add_library(LibTorch::cpu SHARED IMPORTED)
  set_target_properties(LibTorch::cpu PROPERTIES IMPORTED_LOCATION ${_root}/lib/libtorch_cpu.so)
  add_library(LibTorch::LibTorch INTERFACE IMPORTED)
  target_include_directories(LibTorch::LibTorch SYSTEM INTERFACE
    ${_root}/include ${_root}/include/torch/csrc/api/include)
  # libtorch.so has no symbols of its own: it brings the devices that torch was built for.
  target_link_libraries(LibTorch::LibTorch INTERFACE LibTorch::cpu LibTorch::c10
    -Wl,--no-as-needed ${_root}/lib/libtorch.so -Wl,--as-needed)
endif()
