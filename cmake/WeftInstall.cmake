# The installed package: find_package(weft) gives weft::weft (and weft::core, weft::tcp, weft::mpi as built).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(weft_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/weft)
get_property(weft_libraries GLOBAL PROPERTY WEFT_LIBRARIES)

install(TARGETS ${weft_libraries} EXPORT weftTargets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/weft DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(EXPORT weftTargets NAMESPACE weft:: DESTINATION ${weft_package_dir})

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/weftConfig.cmake.in weftConfig.cmake
  INSTALL_DESTINATION ${weft_package_dir})
write_basic_package_version_file(weftConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/weftConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/weftConfigVersion.cmake
  DESTINATION ${weft_package_dir})
