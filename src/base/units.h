// Sizes and durations as people write them. One parser for the environment, the command line and config
// files.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "weft/clock.h"

namespace weft {

// "8192", "64KiB", "4MiB", "1GiB", "10MB". Throws UsageError that quotes the text.
std::size_t parse_bytes(std::string_view text);
// "50ms", "1.5s", "200us", "10ns", "2min"; "never". A bare number is refused: its unit would be a guess.
Time parse_duration(std::string_view text);
// A whole number in [low, high].
long long parse_integer(std::string_view text, long long low, long long high);

std::string bytes_text(std::size_t bytes);  // "64 KiB"
std::string duration_text(Time duration);   // "50 ms"

}  // namespace weft
