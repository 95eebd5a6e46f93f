# The installed package: find_package(weft) gives weft::weft (and weft::core, weft::tcp, weft::mpi as built), and weft::torch
# (the LibTorch driver, trainer, models) where it was built and the program's LibTorch is of the same version.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(weft_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/weft)
get_property(weft_libraries GLOBAL PROPERTY WEFT_LIBRARIES)

install(TARGETS ${weft_libraries} EXPORT weftTargets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/weft DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(EXPORT weftTargets NAMESPACE weft:: DESTINATION ${weft_package_dir})

if(TARGET weft_torch)
  install(TARGETS weft_draws weft_torch EXPORT weftTorchTargets)
  install(EXPORT weftTorchTargets NAMESPACE weft:: DESTINATION ${weft_package_dir})
  install(FILES ${PROJECT_SOURCE_DIR}/cmake/FindLibTorch.cmake DESTINATION ${weft_package_dir})
  foreach(header IN ITEMS models/model.h train/replica.h train/trainer.h)
    get_filename_component(folder ${header} DIRECTORY)
    install(FILES ${PROJECT_SOURCE_DIR}/weft_torch/${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/weft_torch/${folder})
  endforeach()
endif()

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/weftConfig.cmake.in weftConfig.cmake
  INSTALL_DESTINATION ${weft_package_dir})
write_basic_package_version_file(weftConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/weftConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/weftConfigVersion.cmake
  DESTINATION ${weft_package_dir})
