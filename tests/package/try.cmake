# Installs a built weft to a temporary prefix, builds the programs beside this file against it with
# find_package(weft) in a folder outside the tree, and runs them. `torch`: the LibTorch that weft was built with, empty
# where it was built without.
cmake_minimum_required(VERSION 3.25)

function(run what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    file(REMOVE_RECURSE ${work})
    message(FATAL_ERROR "package: ${what} failed (${status})\n${output}")
  endif()
endfunction()

execute_process(COMMAND mktemp -d OUTPUT_VARIABLE work OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
file(GLOB sources ${CMAKE_CURRENT_LIST_DIR}/*.cc)
file(COPY ${CMAKE_CURRENT_LIST_DIR}/CMakeLists.txt ${sources} DESTINATION ${work}/source)

run("installing" ${CMAKE_COMMAND} --install ${weft_build} --prefix ${work}/prefix)

# What is installed is what a user may read: include/weft of the tree and, with torch, three headers more. `out`: the
# difference, in both directions.
file(REAL_PATH ${CMAKE_CURRENT_LIST_DIR}/../.. tree)
file(GLOB_RECURSE wanted RELATIVE ${tree}/include ${tree}/include/*.h)
set(torch_headers)
if(torch)
  set(torch_headers weft_torch/models/model.h weft_torch/train/replica.h weft_torch/train/trainer.h)
  list(APPEND wanted ${torch_headers})
endif()
function(compare_headers out)
  file(GLOB_RECURSE found LIST_DIRECTORIES false RELATIVE ${work}/prefix/include ${work}/prefix/include/*)
  set(missing ${wanted})
  set(stray ${found})
  list(REMOVE_ITEM missing ${found})
  list(REMOVE_ITEM stray ${wanted})
  set(${out} ${missing} ${stray} PARENT_SCOPE)
endfunction()
compare_headers(difference)
if(difference)
  file(REMOVE_RECURSE ${work})
  message(FATAL_ERROR "package: installed and should not be, or not and should be: ${difference}")
endif()
file(WRITE ${work}/prefix/include/weft/inner/planted.h "")
file(RENAME ${work}/prefix/include/weft/comm.h ${work}/comm.h)
compare_headers(difference)
if(NOT difference STREQUAL "weft/comm.h;weft/inner/planted.h")
  file(REMOVE_RECURSE ${work})
  message(FATAL_ERROR "package: a planted header and one that was taken away were not found: '${difference}'")
endif()
file(RENAME ${work}/comm.h ${work}/prefix/include/weft/comm.h)
file(REMOVE_RECURSE ${work}/prefix/include/weft/inner)

list(JOIN torch_headers "," headers)
set(configure ${CMAKE_COMMAND} -S ${work}/source -G ${generator} -D CMAKE_CXX_COMPILER=${compiler}
  -D weft_version=${version} -D weft_ROOT=${work}/prefix -D headers=${headers})
run("configuring the programs" ${configure} -B ${work}/build -D torch=${torch} -D CMAKE_PREFIX_PATH=${torch})
run("building the programs" ${CMAKE_COMMAND} --build ${work}/build)
set(programs program sparse)
if(torch)
  list(APPEND programs train)
endif()
foreach(program IN LISTS programs)
  run("running ${program}" ${work}/build/${program})
endforeach()

# Where there is no LibTorch, asking for weft::torch is refused by a sentence.
execute_process(COMMAND ${configure} -B ${work}/refused -D torch=wanted -D Torch_DIR=${work}
  RESULT_VARIABLE status OUTPUT_QUIET ERROR_VARIABLE said)
if(status EQUAL 0 OR NOT said MATCHES "weft::torch:")
  file(REMOVE_RECURSE ${work})
  message(FATAL_ERROR "package: weft::torch without LibTorch was not refused (${status})\n${said}")
endif()

# Nothing of the tree may be needed once installed.
file(GLOB_RECURSE installed ${work}/prefix/*.cmake)
foreach(file IN LISTS installed)
  file(STRINGS ${file} lines REGEX "${weft_build}|${tree}")
  if(lines)
    file(REMOVE_RECURSE ${work})
    message(FATAL_ERROR "package: ${file} names the tree or the build folder: ${lines}")
  endif()
endforeach()

file(REMOVE_RECURSE ${work})
