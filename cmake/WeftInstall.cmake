# The installed package: find_package(weft) gives weft::weft (and weft::core, weft::tcp, weft::mpi as built), and weft::torch
# (the LibTorch driver, trainer, models) where it was built and the program's LibTorch is of the same version.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(weft_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/weft)
get_property(weft_libraries GLOBAL PROPERTY WEFT_LIBRARIES)

install(TARGETS ${weft_libraries} EXPORT weftTargets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/weft DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(EXPORT weftTargets NAMESPACE weft:: DESTINATION ${weft_package_dir})

# Installs a header of weft_torch/ and the headers of weft_torch/ and src/ that it includes, nothing else. Those of src/ go
# to a folder that only weft::torch has on its path: a prefix may be shared, and their names are short.
function(weft_install_header name)
  get_property(done GLOBAL PROPERTY WEFT_INSTALLED_HEADERS)
  if(name IN_LIST done OR EXISTS ${PROJECT_SOURCE_DIR}/include/${name})
    return()
  endif()
  set_property(GLOBAL APPEND PROPERTY WEFT_INSTALLED_HEADERS ${name})
  get_filename_component(folder ${name} DIRECTORY)
  if(name MATCHES "^weft_torch/")
    set(path ${PROJECT_SOURCE_DIR}/${name})
    install(FILES ${path} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/${folder})
  else()
    set(path ${PROJECT_SOURCE_DIR}/src/${name})
    install(FILES ${path} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/weft/inner/${folder})
  endif()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${path})
  file(STRINGS ${path} includes REGEX "^#include \"")
  foreach(line IN LISTS includes)
    string(REGEX REPLACE "^#include \"([^\"]+)\".*" "\\1" included "${line}")
    weft_install_header(${included})
  endforeach()
endfunction()

if(TARGET weft_torch)
  install(TARGETS weft_draws weft_torch EXPORT weftTorchTargets)
  install(EXPORT weftTorchTargets NAMESPACE weft:: DESTINATION ${weft_package_dir})
  install(FILES ${PROJECT_SOURCE_DIR}/cmake/FindLibTorch.cmake DESTINATION ${weft_package_dir})
  foreach(header IN ITEMS models/model.h train/replica.h train/trainer.h)
    weft_install_header(weft_torch/${header})
  endforeach()
endif()

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/weftConfig.cmake.in weftConfig.cmake
  INSTALL_DESTINATION ${weft_package_dir})
write_basic_package_version_file(weftConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/weftConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/weftConfigVersion.cmake
  DESTINATION ${weft_package_dir})
