# asio (standalone, header-only) has no CMake package of its own in Debian. Defines asio::asio.
find_path(ASIO_INCLUDE_DIR asio.hpp)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(asio REQUIRED_VARS ASIO_INCLUDE_DIR)
mark_as_advanced(ASIO_INCLUDE_DIR)

if(asio_FOUND AND NOT TARGET asio::asio)
  add_library(asio::asio INTERFACE IMPORTED)
  target_include_directories(asio::asio INTERFACE ${ASIO_INCLUDE_DIR})
  target_compile_definitions(asio::asio INTERFACE ASIO_STANDALONE ASIO_NO_DEPRECATED)
endif()
