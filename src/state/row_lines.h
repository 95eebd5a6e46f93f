// Rows as lines of text: what a file of shards, and the index of a checkpoint, say of themselves.
//
//   <held> <rule> <dtype> <peer>/<peers>[/<divisor>] <shape> <first> <extent> <owner> <kind> <checksums> <name>
//
// held: `here` (a tensor of the file), `zeros` (nothing is stored), `told` (another peer's file has it; of
// the rules same and moves). Sums have a divisor; those without one are of before it was told. Lists are numbers
// with commas between them, or "-". Checksums: CRC32C, 8 hexadecimal digits for each piece of kPieceBytes of the
// value. The name is the rest of the line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "state/rows.h"

namespace weft {

inline constexpr std::size_t kPieceBytes = std::size_t{1} << 20;

struct RowLine {
  enum class Held : std::uint8_t { here, zeros, told };
  StateRow row;
  Held held = Held::here;
  std::string checksums;
};

std::string checksums_of(std::span<const std::byte> values);
std::string text_of(const RowLine& line);  // without the line end
// Throws UsageError, `where` first, for a text that is none of lines like that, or of rows that cannot be.
std::vector<RowLine> lines_of(std::string_view text, const std::string& where);
// Of the tensor that holds it: owner/kind/name, with its place behind where it is not whole.
std::string tensor_name(const StateRow& row);

}  // namespace weft
