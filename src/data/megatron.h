// Megatron's indexed data set: PREFIX.bin holds token ids, PREFIX.idx the type, length and place of each
// sequence. Both are mapped, not read, and nothing of the index is believed before it was checked against the
// size of the .bin.
#pragma once

#include <memory>
#include <string>

#include "data/source.h"

namespace weft {

// All sequences, one behind the other. `prefix` may end in .bin or .idx. vocabulary 0: the largest id and 1,
// for which all data is read once. Throws UsageError that names the file and what is wrong with it.
std::shared_ptr<const DataSource> open_megatron(const std::string& prefix, std::int64_t vocabulary = 0);

}  // namespace weft
