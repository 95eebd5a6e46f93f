# The optional parts: what each needs, whether it is there, and one line about it.
# Sets WEFT_MPI, WEFT_TCP, WEFT_TORCH, WEFT_PYTHON, WEFT_HIGHWAY, WEFT_SPDLOG, WEFT_TESTS, WEFT_BENCH, WEFT_CLI, WEFT_FUZZ
# to TRUE or FALSE, and WEFT_TRANSPORTS to the compile definitions that say which transports there are.

set(WEFT_WITH_MPI AUTO CACHE STRING "mpi transport: AUTO, ON or OFF")
set(WEFT_WITH_TCP AUTO CACHE STRING "tcp transport: AUTO, ON or OFF")
set(WEFT_WITH_HIGHWAY AUTO CACHE STRING "SIMD kernels: AUTO, ON or OFF")
set(WEFT_WITH_SPDLOG AUTO CACHE STRING "Logs through spdlog (else plain stderr): AUTO, ON or OFF")
set(WEFT_WITH_TORCH AUTO CACHE STRING "weft_torch, models in LibTorch: AUTO, ON or OFF")
set(WEFT_WITH_PYTHON AUTO CACHE STRING "The Python package: AUTO, ON or OFF")
set(WEFT_WITH_CUDA OFF CACHE STRING "Device kernels: nothing in the tree needs it yet")
set(WEFT_BUILD_TESTS AUTO CACHE STRING "Tests: AUTO, ON or OFF")
set(WEFT_BUILD_BENCH AUTO CACHE STRING "Micro-benchmarks: AUTO, ON or OFF")
option(WEFT_BUILD_EXAMPLES "The C++ programs of examples/" ON)
set(WEFT_BUILD_CLI AUTO CACHE STRING "The weft command: AUTO, ON or OFF")
set(WEFT_BUILD_FUZZ AUTO CACHE STRING "libFuzzer targets: AUTO, ON or OFF")

# weft_decide(<result> <option> <what> [<condition variable> <what is missing otherwise>]...)
# The first condition that does not hold switches the part off (AUTO) or stops the configuration (ON).
function(weft_decide result option what)
  set(${result} TRUE PARENT_SCOPE)
  if(NOT ${option})
    set(${result} FALSE PARENT_SCOPE)
    message(STATUS "weft: ${what} off: ${option}=${${option}}")
    return()
  endif()
  while(ARGN)
    list(POP_FRONT ARGN condition missing)
    if(NOT ${condition})
      if(NOT ${option} STREQUAL "AUTO")
        message(FATAL_ERROR "weft: ${what} was asked for (${option}=${${option}}): ${missing}")
      endif()
      set(${result} FALSE PARENT_SCOPE)
      message(STATUS "weft: ${what} off: ${missing}")
      return()
    endif()
  endwhile()
  message(STATUS "weft: ${what} on")
endfunction()

find_package(Threads REQUIRED)

if(WEFT_WITH_SPDLOG)
  find_package(fmt QUIET CONFIG)
  find_package(spdlog QUIET CONFIG)
endif()
weft_decide(WEFT_SPDLOG WEFT_WITH_SPDLOG "spdlog"
  fmt_FOUND "fmt not found, logs go to stderr (apt-get install libfmt-dev)"
  spdlog_FOUND "spdlog not found, logs go to stderr (apt-get install libspdlog-dev)")

if(WEFT_WITH_HIGHWAY)
  find_package(hwy QUIET CONFIG)
endif()
weft_decide(WEFT_HIGHWAY WEFT_WITH_HIGHWAY "SIMD kernels"
  hwy_FOUND "Highway not found, the plain kernels are used (apt-get install libhwy-dev)")

if(WEFT_WITH_TCP)
  find_package(asio QUIET MODULE)  # cmake/Findasio.cmake
  find_package(OpenSSL QUIET COMPONENTS Crypto)
endif()
weft_decide(WEFT_TCP WEFT_WITH_TCP "tcp transport"
  asio_FOUND "asio not found (apt-get install libasio-dev)"
  OpenSSL_FOUND "OpenSSL's libcrypto not found (apt-get install libssl-dev)")

if(WEFT_WITH_MPI)
  # The C interface under a C++ compiler: the C++ bindings are gone from the standard.
  set(MPI_CXX_SKIP_MPICXX ON)
  find_package(MPI QUIET COMPONENTS CXX)
endif()
weft_decide(WEFT_MPI WEFT_WITH_MPI "mpi transport"
  MPI_CXX_FOUND "MPI not found (apt-get install openmpi-bin libopenmpi-dev)")

# For the few files that ask: in every file's flags, they would keep ccache from giving the core alone what release has.
set(WEFT_TRANSPORTS "WEFT_HAVE_TCP=$<BOOL:${WEFT_TCP}>;WEFT_HAVE_MPI=$<BOOL:${WEFT_MPI}>")

if(WEFT_WITH_TORCH)
  find_package(LibTorch 2.11 QUIET MODULE)  # cmake/FindLibTorch.cmake
endif()
weft_decide(WEFT_TORCH WEFT_WITH_TORCH "weft_torch"
  LibTorch_FOUND "${LibTorch_PROBLEM}")
if(WEFT_TORCH)
  message(STATUS "weft: torch ${LibTorch_VERSION}")
endif()

# The interpreter of .venv, unless whoever builds a wheel names another. Torch is not asked for: the package does not
# link it.
if(WEFT_WITH_PYTHON)
  if(NOT Python_EXECUTABLE AND EXISTS ${PROJECT_SOURCE_DIR}/.venv/bin/python)
    set(Python_EXECUTABLE ${PROJECT_SOURCE_DIR}/.venv/bin/python)
  endif()
  find_package(Python QUIET COMPONENTS Interpreter Development.Module)
  if(Python_Interpreter_FOUND AND NOT pybind11_DIR)
    execute_process(COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir
      OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed)
      set(pybind11_DIR ${folder})
    endif()
  endif()
  set(PYBIND11_FINDPYTHON ON)
  find_package(pybind11 2.10 QUIET CONFIG)
endif()
weft_decide(WEFT_PYTHON WEFT_WITH_PYTHON "Python package"
  Python_Development.Module_FOUND "no Python with its headers was found (apt-get install python3-dev)"
  pybind11_FOUND "pybind11 not found (make setup installs it into .venv)")

if(WEFT_BUILD_CLI)
  find_package(CLI11 QUIET CONFIG)
  find_package(nlohmann_json QUIET CONFIG)
endif()
weft_decide(WEFT_CLI WEFT_BUILD_CLI "weft command"
  CLI11_FOUND "CLI11 not found (apt-get install libcli11-dev)"
  nlohmann_json_FOUND "nlohmann-json not found (apt-get install nlohmann-json3-dev)")

if(WEFT_BUILD_TESTS)
  find_package(GTest QUIET)
  find_package(rapidcheck QUIET CONFIG)
endif()
weft_decide(WEFT_TESTS WEFT_BUILD_TESTS "tests"
  GTest_FOUND "GoogleTest not found (apt-get install libgtest-dev libgmock-dev)")
if(WEFT_TESTS AND NOT rapidcheck_FOUND)
  message(STATUS "weft: property tests off: rapidcheck not found (apt-get install librapidcheck-dev)")
endif()

if(WEFT_BUILD_BENCH)
  find_package(benchmark QUIET CONFIG)
endif()
weft_decide(WEFT_BENCH WEFT_BUILD_BENCH "micro-benchmarks"
  benchmark_FOUND "Google Benchmark not found (apt-get install libbenchmark-dev)")

# Fuzzing needs the library itself instrumented, so it has a build of its own.
set(fuzz_instrumented FALSE)
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang" AND WEFT_SANITIZE MATCHES "fuzzer-no-link")
  set(fuzz_instrumented TRUE)
endif()
weft_decide(WEFT_FUZZ WEFT_BUILD_FUZZ "fuzz targets"
  fuzz_instrumented "they are built by clang in build/fuzz (make fuzz)")
