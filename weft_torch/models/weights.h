// Numbers that a model draws, as functions of what they are for. No torch here.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace weft {

// Elements [first, first + out.size()): element i is a function of (seed, name, i). At most 2^34 elements.
void fill_normal(std::uint64_t seed, std::string_view name, float deviation, std::int64_t first,
                 std::span<float> out);
void fill_uniform(std::uint64_t seed, std::string_view name, float bound, std::int64_t first,
                  std::span<float> out);  // in (-b, b)

// Words in [0, vocabulary) with probability ln((w + 2) / (w + 1)) / ln(vocabulary + 1), with replacement:
// element i is a function of (seed, step, i).
void draw_words(std::uint64_t seed, std::int64_t step, std::int64_t vocabulary, std::span<std::int64_t> out);

}  // namespace weft
