// The files of a checkpoint (checkpoint.h): shards of one rank, and the index of all of them. Readable by any
// reader of safetensors:
//
//   metadata of both   weft.checkpoint (shards, index), weft.version, weft.step, weft.seed, weft.size
//   shards             weft.rank, weft.rows: its rows as lines (row_lines.h)
//     <owner>/<kind>/<name>   what is stored of a row, of the shard's extent
//   index              the user's metadata; weft.file.<name> of each file of shards: the checksum of its
//                      header, in which that of its data is
//     rows/<name>      U8, the lines of that file
//     extra/<name>     U8
//
// All errors are UsageErrors of one sentence with the path.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "state/registry.h"
#include "state/row_lines.h"
#include "wire/safetensors_reader.h"

namespace weft {

// What a checkpoint says beside its rows. Names are not empty, UTF-8, and without line ends.
struct CheckpointInfo {
  std::int64_t step = 0;  // of training; the registry counts only those that were committed
  std::uint64_t seed = 0;
  std::map<std::string, std::string> metadata;  // free UTF-8 text (configuration); no key begins with "weft."
  std::map<std::string, std::vector<std::byte>> extra;  // bytes of others (random numbers, data)
};

std::string shards_name(int rank, int size);
inline constexpr const char* kIndexName = "index.safetensors";

// What rank `rank` of `size` is to store of its rows. Those that peers share are dealt out among them so that
// sizes balance; all peers compute the same.
void write_shards_file(const std::filesystem::path& path, const CheckpointInfo& info,
                       std::span<const LiveRow> rows, int rank, int size);

// A file of shards whose kind, version, step, seed, size and rank were found right. Its tensors are those
// that its lines tell.
class ShardsFile {
 public:
  ShardsFile(const std::filesystem::path& path, const CheckpointInfo& info, int rank, int size);
  const std::string& lines() const;
  const std::string& checksum() const { return reader_.header_checksum(); }
  // Of the value of a row that is here, its piece number `piece`, checked.
  void read_piece(const RowLine& line, std::size_t piece, std::span<std::byte> into) const;

 private:
  std::string where_;
  wire::SafetensorsReader reader_;
};

struct CheckpointIndex {
  struct File {
    std::string name;
    std::string checksum;
    std::string lines;
  };
  CheckpointInfo info;
  std::vector<File> files;  // one a rank
};
void write_index(const std::filesystem::path& path, const CheckpointIndex& index);
CheckpointIndex read_index(const std::filesystem::path& path, std::int64_t step);

// Throws UsageError unless the rows of all files (one list a rank) are a whole: no range of a tensor is
// missing or there twice, of sums every peer's is there, and what several ranks have has one value. Where it
// has not, the sentence names a rank that differs from most.
void check_whole(const std::filesystem::path& folder, const std::vector<std::vector<RowLine>>& rows_of_rank);

}  // namespace weft
