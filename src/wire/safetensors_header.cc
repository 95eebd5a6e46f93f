// The parser is strict and small on purpose: a header has a fixed depth and four kinds of values, so there is
// no recursion, no number that is not a whole one, and nothing that a general JSON library would let through.
#include "wire/safetensors_header.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "weft/error.h"
#include "wire/crc32c.h"

namespace weft::wire::safetensors {

namespace {

constexpr std::string_view kMetadataKey = "__metadata__";
constexpr std::string_view kDataCrcKey = "weft.crc32c";
constexpr std::string_view kHeaderCrcKey = "weft.header_crc32c";
constexpr std::string_view kNoCrc = "00000000";  // stands for the header's checksum while it is computed
constexpr std::size_t kAlignment = 8;

// ---- what the format says about types, shapes and text ----

struct TypeRow {
  std::string_view name;
  std::uint64_t bits;
};
constexpr TypeRow kTypes[] = {
    {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
    {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
    {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
    {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64},
};

// 0 for a name that is not in the format.
std::uint64_t bits_of(std::string_view dtype) {
  const auto* row = std::find_if(std::begin(kTypes), std::end(kTypes),
                                 [dtype](const TypeRow& type) { return type.name == dtype; });
  return row == std::end(kTypes) ? 0 : row->bits;
}

// Bytes of a tensor; throws if the type is unknown, a dimension negative, or the product too large.
std::uint64_t tensor_bytes(const TensorEntry& entry, const std::string& where) {
  std::uint64_t bits = bits_of(entry.dtype);
  if (bits == 0)
    fail(where, "tensor " + printable(entry.name) + " has the unknown type " + printable(entry.dtype));
  for (const std::int64_t extent : entry.shape) {
    if (extent < 0) fail(where, "tensor " + printable(entry.name) + " has a negative dimension");
    if (__builtin_mul_overflow(bits, static_cast<std::uint64_t>(extent), &bits)) {
      fail(where,
           "the shape " + text_of(entry.shape) + " of tensor " + printable(entry.name) + " is too large");
    }
  }
  if (bits % 8 != 0) fail(where, "tensor " + printable(entry.name) + " does not end at a whole byte");
  return bits / 8;
}

bool is_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i++]);
    if (lead < 0x80) continue;
    const int more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
    if (lead < 0xc2 || lead > 0xf4 || text.size() - i < static_cast<std::size_t>(more)) return false;
    std::uint32_t code = lead & (0x3fu >> more);
    for (int k = 0; k < more; ++k) {
      const auto next = static_cast<unsigned char>(text[i++]);
      if ((next & 0xc0) != 0x80) return false;
      code = code << 6 | (next & 0x3f);
    }
    constexpr std::uint32_t kLeast[] = {0, 0x80, 0x800, 0x10000};
    if (code < kLeast[more] || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) return false;
  }
  return true;
}

void append_utf8(std::string& out, std::uint32_t code) {
  const auto put = [&out](std::uint32_t byte) { out += static_cast<char>(byte); };
  const auto put_more = [&put, code](int shift) { put(0x80 | (code >> shift & 0x3f)); };
  if (code < 0x80) return put(code);
  if (code < 0x800) {
    put(0xc0 | code >> 6);
  } else if (code < 0x10000) {
    put(0xe0 | code >> 12);
    put_more(6);
  } else {
    put(0xf0 | code >> 18);
    put_more(12);
    put_more(6);
  }
  put_more(0);
}

constexpr std::string_view kHexDigits = "0123456789abcdef";

// Of the prefix and the header, with the digits at `at` as zeros.
std::uint32_t header_crc(std::string_view json, std::size_t at) {
  const std::uint64_t length = json.size();
  std::uint32_t crc = crc32c(std::as_bytes(std::span(&length, 1)));
  crc = crc32c(bytes_of(json.substr(0, at)), crc);
  crc = crc32c(bytes_of(kNoCrc), crc);
  return crc32c(bytes_of(json.substr(at + kNoCrc.size())), crc);
}

// ---- reading a header ----

class HeaderParser {
 public:
  HeaderParser(std::string_view json, const std::string& where) : json_(json), where_(where) {}

  Header parse() {
    if (!is_utf8(json_)) fail(where_, "the header is not UTF-8");
    if (!json_.starts_with('{')) fail(where_, "the header does not begin with '{'");
    bool seen_metadata = false;
    members([&](std::string name) {
      if (name != kMetadataKey) return tensor(std::move(name));
      if (std::exchange(seen_metadata, true)) wrong("a second __metadata__");
      metadata();
    });
    skip_space();
    if (at_ != json_.size()) wrong("something behind the closing '}'");
    return std::move(header_);
  }

 private:
  [[noreturn]] void wrong(const std::string& what) const {
    fail(where_, what + " at byte " + std::to_string(at_) + " of the header");
  }

  void skip_space() {
    while (at_ < json_.size() && std::string_view(" \t\n\r").find(json_[at_]) != std::string_view::npos)
      ++at_;
  }
  bool accept(char c) {
    skip_space();
    if (at_ == json_.size() || json_[at_] != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) wrong(std::string("no '") + c + "'");
  }

  template <class OnMember>
  void members(OnMember on_member) {  // of an object
    expect('{');
    if (accept('}')) return;
    do {
      std::string key = string();
      expect(':');
      on_member(std::move(key));
    } while (accept(','));
    expect('}');
  }

  std::string string() {
    expect('"');
    std::string out;
    for (;;) {
      if (at_ == json_.size()) wrong("a text without end");
      const char c = json_[at_];
      if (static_cast<unsigned char>(c) < ' ') wrong("a control character");
      ++at_;
      if (c == '"') return out;
      if (c == '\\') {
        escaped(out);
      } else {
        out += c;
      }
    }
  }
  void escaped(std::string& out) {
    const char c = at_ < json_.size() ? json_[at_++] : '\0';
    if (c == 'u') return append_utf8(out, code_point());
    constexpr std::string_view kFrom = "\"\\/bfnrt";
    constexpr std::string_view kTo = "\"\\/\b\f\n\r\t";
    const std::size_t which = kFrom.find(c);
    if (which == std::string_view::npos) wrong("an unknown escape");
    out += kTo[which];
  }
  std::uint32_t code_point() {  // behind "\u"
    const std::uint32_t first = four_digits();
    if (first < 0xd800 || first > 0xdfff) return first;
    if (first > 0xdbff || json_.substr(at_, 2) != "\\u") wrong("half a surrogate pair");
    at_ += 2;
    const std::uint32_t second = four_digits();
    if (second < 0xdc00 || second > 0xdfff) wrong("half a surrogate pair");
    return 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00);
  }
  std::uint32_t four_digits() {
    std::uint32_t value = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = at_ < json_.size() ? json_[at_] : '\0';
      const char lower = c >= 'A' && c <= 'F' ? static_cast<char>(c - 'A' + 'a') : c;
      const std::size_t digit = kHexDigits.find(lower);
      if (digit == std::string_view::npos) wrong("an unknown escape");
      value = value << 4 | static_cast<std::uint32_t>(digit);
      ++at_;
    }
    return value;
  }

  // A whole number that an std::int64_t holds.
  std::int64_t number() {
    skip_space();
    const std::size_t first = at_;
    std::int64_t value = 0;
    for (; at_ < json_.size() && json_[at_] >= '0' && json_[at_] <= '9'; ++at_) {
      if (at_ > first && json_[first] == '0') wrong("a number that begins with 0");
      if (__builtin_mul_overflow(value, 10, &value) ||
          __builtin_add_overflow(value, json_[at_] - '0', &value)) {
        wrong("a number that is too large");
      }
    }
    if (at_ == first) wrong("no whole number");
    return value;
  }
  std::vector<std::int64_t> numbers() {
    std::vector<std::int64_t> out;
    expect('[');
    if (accept(']')) return out;
    do {
      out.push_back(number());
    } while (accept(','));
    expect(']');
    return out;
  }

  void metadata() {
    members([&](std::string key) {
      skip_space();
      if (key == kHeaderCrcKey) header_.header_crc_at = at_ + 1;
      std::string value = string();
      if (!header_.metadata.emplace(std::move(key), std::move(value)).second)
        wrong("a second key of metadata");
    });
  }

  void tensor(std::string name) {
    std::optional<std::string> dtype;
    std::optional<std::vector<std::int64_t>> shape;
    std::optional<std::vector<std::int64_t>> offsets;
    members([&](const std::string& field) {
      if (field == "dtype" && !dtype) {
        dtype = string();
      } else if (field == "shape" && !shape) {
        shape = numbers();
      } else if (field == "data_offsets" && !offsets) {
        offsets = numbers();
      } else {
        wrong("the field " + printable(field) + ", unknown or for the second time,");
      }
    });
    if (!dtype || !shape || !offsets)
      wrong("tensor " + printable(name) + " without dtype, shape or data_offsets");
    if (offsets->size() != 2)
      wrong("tensor " + printable(name) + " with data_offsets that are not two numbers");
    header_.tensors.push_back({.entry = {.name = std::move(name),
                                         .dtype = std::move(*dtype),
                                         .shape = std::move(*shape),
                                         .data = {}},
                               .begin = static_cast<std::uint64_t>((*offsets)[0]),
                               .end = static_cast<std::uint64_t>((*offsets)[1])});
  }

  std::string_view json_;
  const std::string& where_;
  std::size_t at_ = 0;
  Header header_;
};

}  // namespace

[[noreturn]] void fail(const std::string& where, const std::string& what) {
  throw UsageError("'" + where + "': " + what);
}

std::string printable(std::string_view text) {
  constexpr std::size_t kMost = 64;
  std::string out = "'";
  for (const char c : text.substr(0, kMost)) out += c >= ' ' && c <= '~' ? c : '?';
  return out + (text.size() > kMost ? "...'" : "'");
}

std::string text_of(const std::vector<std::int64_t>& shape) {
  constexpr std::size_t kMost = 8;
  std::string out = "[";
  for (std::size_t i = 0; i < std::min(shape.size(), kMost); ++i) {
    out += (i == 0 ? "" : ",") + std::to_string(shape[i]);
  }
  return out + (shape.size() > kMost ? ",...]" : "]");
}

std::string crc_text(std::uint32_t crc) {
  std::string out;
  for (int shift = 28; shift >= 0; shift -= 4) out += kHexDigits[crc >> shift & 15];
  return out;
}

Header parse_header(std::string_view json, const std::string& where) {
  return HeaderParser(json, where).parse();
}

void check_layout(std::vector<ParsedTensor>& tensors, std::uint64_t data_bytes, const std::string& where) {
  std::sort(tensors.begin(), tensors.end(), [](const ParsedTensor& a, const ParsedTensor& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  std::uint64_t filled = 0;
  for (const ParsedTensor& tensor : tensors) {
    const std::string& name = tensor.entry.name;
    if (tensor.end < tensor.begin) fail(where, "tensor " + printable(name) + " ends before it begins");
    if (tensor.begin < filled) fail(where, "tensor " + printable(name) + " overlaps the one before it");
    if (tensor.begin > filled) fail(where, "there is a hole before tensor " + printable(name));
    const std::uint64_t bytes = tensor_bytes(tensor.entry, where);
    if (bytes != tensor.end - tensor.begin) {
      fail(where, "tensor " + printable(name) + " has " + std::to_string(tensor.end - tensor.begin) +
                      " bytes, its type " + tensor.entry.dtype + " and shape " + text_of(tensor.entry.shape) +
                      " ask for " + std::to_string(bytes));
    }
    filled = tensor.end;
  }
  if (filled != data_bytes) {
    fail(where, "the file has " + std::to_string(data_bytes) + " bytes of data, its header describes " +
                    std::to_string(filled) + (data_bytes < filled ? " (it was cut off)" : ""));
  }
}

void check_header(Header& header, std::string_view json, const std::string& where) {
  const auto of_data = header.metadata.extract(std::string(kDataCrcKey));
  const auto of_header = header.metadata.extract(std::string(kHeaderCrcKey));
  if (of_data.empty() && of_header.empty()) return;
  if (of_data.empty() || of_header.empty()) fail(where, "one of its two checksums is missing");
  const std::string& told = of_header.mapped();
  // The same text in the JSON: escapes would have other digits there.
  if (told.size() != kNoCrc.size() || json.substr(header.header_crc_at, kNoCrc.size()) != told) {
    fail(where, "the checksum of the header is not 8 hexadecimal digits");
  }
  const std::string found = crc_text(header_crc(json, header.header_crc_at));
  if (found != told) fail(where, "the checksum of the header is " + found + ", expected " + printable(told));
  header.data_checksum = of_data.mapped();
  header.header_checksum = told;
}

Header read_header(ReadAt read_at, std::size_t file_bytes, const std::string& where) {
  if (file_bytes < kPrefixBytes) fail(where, "it has only " + std::to_string(file_bytes) + " bytes");
  std::uint64_t length = 0;
  read_at(0, std::as_writable_bytes(std::span(&length, 1)));
  if (length > kMaxSafetensorsHeaderBytes) {
    fail(where, "a header of " + std::to_string(length) + " bytes is above the limit of 100 MB");
  }
  if (length > file_bytes - kPrefixBytes) {
    fail(where, "its header of " + std::to_string(length) + " bytes does not fit into the file of " +
                    std::to_string(file_bytes) + " bytes");
  }
  std::string json(length, '\0');
  read_at(kPrefixBytes, std::as_writable_bytes(std::span(json)));
  Header header = parse_header(json, where);
  header.data_at = kPrefixBytes + length;
  check_layout(header.tensors, file_bytes - header.data_at, where);
  check_header(header, json, where);
  return header;
}

// ---- writing a header ----

namespace {

void append_text(std::string& json, std::string_view text) {
  json += '"';
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < ' ') {
      json += "\\u00";
      json += kHexDigits[static_cast<unsigned char>(c) >> 4];
      json += kHexDigits[static_cast<unsigned char>(c) & 15];
    } else {
      if (c == '"' || c == '\\') json += '\\';
      json += c;
    }
  }
  json += '"';
}

// Wide elements first, so that none needs filling before it; then by name, so that equal tensors give equal
// files.
std::vector<const TensorEntry*> data_order(std::span<const TensorEntry> entries, const std::string& where) {
  std::vector<const TensorEntry*> order;
  for (const TensorEntry& entry : entries) {
    const std::uint64_t bytes = tensor_bytes(entry, where);
    if (entry.data.size() != bytes) {
      fail(where, "tensor " + printable(entry.name) + " of type " + entry.dtype + " and shape " +
                      text_of(entry.shape) + " needs " + std::to_string(bytes) + " bytes and was given " +
                      std::to_string(entry.data.size()));
    }
    if (entry.name == kMetadataKey || !is_utf8(entry.name)) {
      fail(where, printable(entry.name) + " cannot be the name of a tensor");
    }
    order.push_back(&entry);
  }
  const auto by_name = [](const TensorEntry* a, const TensorEntry* b) { return a->name < b->name; };
  std::sort(order.begin(), order.end(), by_name);
  const auto same_name = [](const TensorEntry* a, const TensorEntry* b) { return a->name == b->name; };
  const auto twin = std::adjacent_find(order.begin(), order.end(), same_name);
  if (twin != order.end()) fail(where, "there are two tensors of the name " + printable((*twin)->name));
  std::sort(order.begin(), order.end(), [](const TensorEntry* a, const TensorEntry* b) {
    const std::uint64_t wide = bits_of(a->dtype);
    const std::uint64_t other = bits_of(b->dtype);
    return wide != other ? wide > other : a->name < b->name;
  });
  return order;
}

}  // namespace

Encoding encode_header(std::span<const TensorEntry> entries, const Metadata& metadata,
                       const std::string& where) {
  Encoding out{.head = {}, .tensors = data_order(entries, where)};
  std::uint32_t data_crc = 0;
  for (const TensorEntry* tensor : out.tensors) data_crc = crc32c(tensor->data, data_crc);

  std::string json = "{\"__metadata__\":{\"" + std::string(kDataCrcKey) + "\":\"" + crc_text(data_crc) +
                     "\",\"" + std::string(kHeaderCrcKey) + "\":\"";
  const std::size_t crc_at = json.size();
  json += std::string(kNoCrc) + "\"";
  for (const auto& [key, value] : metadata) {
    if (key == kDataCrcKey || key == kHeaderCrcKey || !is_utf8(key) || !is_utf8(value)) {
      fail(where, "the metadata " + printable(key) + " is the writer's own or not UTF-8");
    }
    json += ',';
    append_text(json, key);
    json += ':';
    append_text(json, value);
  }
  json += '}';
  std::uint64_t offset = 0;
  for (const TensorEntry* tensor : out.tensors) {
    json += ',';
    append_text(json, tensor->name);
    json += ":{\"dtype\":\"" + tensor->dtype + "\",\"shape\":[";
    for (std::size_t i = 0; i < tensor->shape.size(); ++i) {
      json += (i == 0 ? "" : ",") + std::to_string(tensor->shape[i]);
    }
    json += "],\"data_offsets\":[" + std::to_string(offset) + ",";
    offset += tensor->data.size();
    json += std::to_string(offset) + "]}";
  }
  json += '}';
  json.append((kAlignment - (kPrefixBytes + json.size()) % kAlignment) % kAlignment, ' ');
  if (json.size() > kMaxSafetensorsHeaderBytes) fail(where, "names and metadata take more than 100 MB");
  json.replace(crc_at, kNoCrc.size(), crc_text(header_crc(json, crc_at)));

  const std::uint64_t length = json.size();
  out.head.resize(kPrefixBytes);
  std::memcpy(out.head.data(), &length, kPrefixBytes);
  out.head += json;
  return out;
}

}  // namespace weft::wire::safetensors
