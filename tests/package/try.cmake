# Installs a built weft to a temporary prefix, builds the program beside this file against it with
# find_package(weft) in a folder outside the tree, and runs it.
cmake_minimum_required(VERSION 3.25)

function(run what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    file(REMOVE_RECURSE ${work})
    message(FATAL_ERROR "package: ${what} failed (${status})\n${output}")
  endif()
endfunction()

execute_process(COMMAND mktemp -d OUTPUT_VARIABLE work OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
file(COPY ${CMAKE_CURRENT_LIST_DIR}/CMakeLists.txt ${CMAKE_CURRENT_LIST_DIR}/program.cc DESTINATION ${work}/source)

run("installing" ${CMAKE_COMMAND} --install ${weft_build} --prefix ${work}/prefix)
run("configuring the program" ${CMAKE_COMMAND} -S ${work}/source -B ${work}/build -G ${generator}
  -D CMAKE_PREFIX_PATH=${work}/prefix -D CMAKE_CXX_COMPILER=${compiler} -D weft_version=${version})
run("building the program" ${CMAKE_COMMAND} --build ${work}/build)
run("running the program" ${work}/build/program)

# Nothing of the tree may be needed once installed.
file(GLOB_RECURSE installed ${work}/prefix/*.cmake)
foreach(file IN LISTS installed)
  file(STRINGS ${file} lines REGEX "${weft_build}")
  if(lines)
    file(REMOVE_RECURSE ${work})
    message(FATAL_ERROR "package: ${file} names the build folder: ${lines}")
  endif()
endforeach()

file(REMOVE_RECURSE ${work})
