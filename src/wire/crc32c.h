// CRC32C (Castagnoli): by the processor's instruction where there is one, by table otherwise. Both give the
// same value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace weft::wire {

// Goes on from `crc` (0 at the start), so that pieces can be checked as they arrive.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t crc = 0);
std::uint32_t crc32c_table(std::span<const std::byte> bytes, std::uint32_t crc = 0);  // the plain twin
bool crc32c_is_hardware();

}  // namespace weft::wire
