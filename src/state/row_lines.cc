#include "state/row_lines.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <iterator>

#include "weft/error.h"
#include "wire/crc32c.h"
#include "wire/safetensors_header.h"

namespace weft {

namespace {

using wire::safetensors::fail;
using wire::safetensors::printable;

constexpr std::string_view kHeld[] = {"here", "zeros", "told"};
constexpr std::size_t kDigits = 8;  // of a checksum

std::string joined(const std::vector<std::int64_t>& numbers) {
  if (numbers.empty()) return "-";
  std::string out;
  for (const std::int64_t n : numbers) out += (out.empty() ? "" : ",") + std::to_string(n);
  return out;
}

// "peer/peers", and "/divisor" behind it where it is a sum's, in the fewest digits that read the same.
std::string peers_text(const StateRow& row) {
  std::string out = std::to_string(row.peers.rank) + "/" + std::to_string(row.peers.size);
  if (row.rule != LayoutRule::sum || row.divisor == 0) return out;
  std::array<char, 32> digits{};
  char* const end = std::to_chars(digits.data(), digits.data() + digits.size(), row.divisor).ptr;
  return out + "/" + std::string(digits.data(), end);
}

// A line, taken apart from its beginning.
class Fields {
 public:
  Fields(std::string_view line, const std::string& where) : line_(line), rest_(line), where_(where) {}
  [[noreturn]] void wrong() const { fail(where_, "its line " + printable(line_) + " is not that of a row"); }

  std::string_view word() {
    const std::size_t end = rest_.find(' ');
    if (end == std::string_view::npos || end == 0) wrong();
    const std::string_view out = rest_.substr(0, end);
    rest_.remove_prefix(end + 1);
    return out;
  }
  std::string_view rest() const { return rest_; }
  template <class T>
  T number(std::string_view text) const {
    T out{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
    if (error != std::errc() || end != text.data() + text.size()) wrong();
    return out;
  }
  std::vector<std::int64_t> numbers() {
    std::string_view text = word();
    std::vector<std::int64_t> out;
    if (text == "-") return out;
    for (;;) {
      const std::size_t end = std::min(text.find(','), text.size());
      out.push_back(number<std::int64_t>(text.substr(0, end)));
      if (end == text.size()) return out;
      text.remove_prefix(end + 1);
    }
  }
  template <std::size_t n>
  std::size_t one_of(const std::array<std::string_view, n>& names) {
    const auto found = std::find(names.begin(), names.end(), word());
    if (found == names.end()) wrong();
    return static_cast<std::size_t>(found - names.begin());
  }

 private:
  std::string_view line_, rest_;
  const std::string& where_;
};

void take_peers(Fields& fields, StateRow& row) {
  const std::string_view rank = fields.word();
  const std::size_t cut = rank.find('/');
  if (cut == std::string_view::npos) fields.wrong();
  const std::string_view size = rank.substr(cut + 1);
  const std::size_t end = size.find('/');
  row.peers = {fields.number<int>(rank.substr(0, cut)), fields.number<int>(size.substr(0, end))};
  if (row.rule == LayoutRule::sum) row.divisor = 0;
  if (end == std::string_view::npos) return;
  row.divisor = fields.number<double>(size.substr(end + 1));
  if (row.rule != LayoutRule::sum || !(row.divisor > 0)) fields.wrong();
}

RowLine parse(std::string_view text, const std::string& where) {
  Fields fields(text, where);
  RowLine out;
  out.held = static_cast<RowLine::Held>(fields.one_of(std::to_array(kHeld)));
  constexpr std::array kRules = {LayoutRule::sum, LayoutRule::same, LayoutRule::restart, LayoutRule::moves};
  constexpr std::array kTypes = {DType::float32, DType::float64, DType::int64};
  const std::string_view rule = fields.word();
  const auto* const found =
      std::find_if(kRules.begin(), kRules.end(), [&](LayoutRule r) { return name_of(r) == rule; });
  const std::string_view dtype = fields.word();
  const auto* const type =
      std::find_if(kTypes.begin(), kTypes.end(), [&](DType t) { return name_of(t) == dtype; });
  if (found == kRules.end() || type == kTypes.end()) fields.wrong();
  out.row.rule = *found;
  out.row.dtype = *type;
  take_peers(fields, out.row);
  out.row.shard.shape = fields.numbers();
  out.row.shard.first = fields.numbers();
  out.row.shard.extent = fields.numbers();
  out.row.key.owner = fields.word();
  out.row.key.kind = fields.word();
  const std::string_view checksums = fields.word();
  out.checksums = checksums == "-" ? std::string_view() : checksums;
  out.row.key.name = fields.rest();
  if (const std::string why = trouble_with(out.row); !why.empty()) fail(where, why);
  const std::size_t pieces =
      out.held == RowLine::Held::zeros ? 0 : (out.row.num_bytes() + kPieceBytes - 1) / kPieceBytes;
  const bool fits = out.checksums.size() == kDigits * pieces &&
                    (out.held != RowLine::Held::zeros || out.row.rule == LayoutRule::sum) &&
                    (out.held != RowLine::Held::told || one_is_enough(out.row.rule));
  if (!fits) fields.wrong();
  return out;
}

}  // namespace

std::string checksums_of(std::span<const std::byte> values) {
  std::string out;
  for (std::size_t at = 0; at < values.size(); at += kPieceBytes) {
    out += wire::safetensors::crc_text(
        wire::crc32c(values.subspan(at, std::min(kPieceBytes, values.size() - at))));
  }
  return out;
}

std::string text_of(const RowLine& line) {
  const StateRow& row = line.row;
  std::string out(kHeld[static_cast<std::size_t>(line.held)]);
  for (const std::string& field :
       {std::string(name_of(row.rule)), std::string(name_of(row.dtype)), peers_text(row),
        joined(row.shard.shape), joined(row.shard.first), joined(row.shard.extent), row.key.owner,
        row.key.kind, line.checksums.empty() ? std::string("-") : line.checksums, row.key.name}) {
    out += " " + field;
  }
  return out;
}

std::vector<RowLine> lines_of(std::string_view text, const std::string& where) {
  std::vector<RowLine> out;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    out.push_back(parse(text.substr(0, end), where));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return out;
}

std::string tensor_name(const StateRow& row) {
  return name_of_part(row.key.owner + "/" + row.key.kind + "/" + row.key.name, row.shard);
}

}  // namespace weft
