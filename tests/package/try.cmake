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
set(configure ${CMAKE_COMMAND} -S ${work}/source -G ${generator} -D CMAKE_CXX_COMPILER=${compiler}
  -D weft_version=${version} -D weft_ROOT=${work}/prefix)
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
file(REAL_PATH ${CMAKE_CURRENT_LIST_DIR}/../.. tree)
foreach(file IN LISTS installed)
  file(STRINGS ${file} lines REGEX "${weft_build}|${tree}")
  if(lines)
    file(REMOVE_RECURSE ${work})
    message(FATAL_ERROR "package: ${file} names the tree or the build folder: ${lines}")
  endif()
endforeach()

file(REMOVE_RECURSE ${work})
