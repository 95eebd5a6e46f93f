#include "measure/bench/case.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "base/identity.h"
#include "transports/link_model.h"
#include "weft/error.h"

namespace weft {

namespace {

constexpr int kClasses = 13;  // of elements, by a hash of their index
constexpr std::size_t kAlignment = 4096;

bool reduces(Family family) { return family == Family::all_reduce || family == Family::reduce_scatter; }
bool by_block(Family family) { return family == Family::all_gather || family == Family::all_to_all; }

int class_of(std::int64_t index) {
  return static_cast<int>(mix(static_cast<std::uint64_t>(index)) % kClasses);
}

// What a rank adds to an element of this class. Sums stay integers that the type holds: below 2^24 for
// float32; the 16-bit floats count to 256, so that only 256 ranks add anything.
int term(DType dtype, int rank, int element_class) {
  const bool narrow = dtype == DType::bfloat16 || dtype == DType::float16;
  if (!narrow) return (element_class * 5 + rank * 7) % kClasses - 6;
  return rank < 256 ? (element_class + rank) % 3 - 1 : 0;
}

// An element that is only moved: from whom, for whom, where.
int token(int source, int target, std::int64_t index) {
  const auto pair = static_cast<std::uint64_t>(source) << 20 ^ static_cast<std::uint64_t>(target);
  return static_cast<int>(mix(mix(pair) ^ static_cast<std::uint64_t>(index)) % 251);
}

template <class T>
T element(int value) {
  if constexpr (std::is_same_v<T, bfloat16>)
    return to_bfloat16(static_cast<float>(value));
  else if constexpr (std::is_same_v<T, float16>)
    return to_float16(static_cast<float>(value));
  else
    return static_cast<T>(value);
}

// Calls f with a null pointer of the element's type.
template <class F>
auto with_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::float32:
      return f(static_cast<float*>(nullptr));
    case DType::float64:
      return f(static_cast<double*>(nullptr));
    case DType::bfloat16:
      return f(static_cast<bfloat16*>(nullptr));
    case DType::float16:
      return f(static_cast<float16*>(nullptr));
    case DType::int32:
      return f(static_cast<std::int32_t*>(nullptr));
    case DType::int64:
      return f(static_cast<std::int64_t*>(nullptr));
    case DType::bytes:
      break;
  }
  return f(static_cast<std::byte*>(nullptr));
}

Shape shape_of(const BenchOptions& options, Family family, std::size_t bytes) {
  const std::size_t element_bytes = size_of(options.dtype);
  const double real = static_cast<double>(bytes) / options.byte_scale;
  const double elements = real / static_cast<double>(element_bytes);
  if (elements != std::floor(elements)) {
    std::string what = "--bytes " + std::to_string(bytes);
    if (options.byte_scale != 1) what += " at a byte scale of " + std::to_string(options.byte_scale);
    throw UsageError(what + " is no whole number of " + std::string(name_of(options.dtype)) + " elements");
  }
  Shape shape;
  shape.size = options.ranks;
  shape.count = static_cast<std::int64_t>(elements) * (by_block(family) ? options.ranks : 1);
  shape.element_bytes = element_bytes;
  shape.node_size = node_size(options);
  return shape;
}

// Ranks of the smallest and of the largest node.
struct NodeSizes {
  int smallest = 1, largest = 1;
};
NodeSizes node_sizes(const BenchOptions& options) {
  if (options.nodes == 0) return {};
  return {options.ranks / options.nodes, (options.ranks + options.nodes - 1) / options.nodes};
}

// Bytes that must pass the busiest port between `parts` (ranks, or nodes of several ranks).
double port_bytes(const BenchCase& c, int parts, const NodeSizes& node) {
  const double n = static_cast<double>(c.bytes);
  const int ranks = c.shape.size;
  switch (c.family) {
    case Family::all_reduce:
      return 2 * n * (parts - 1) / parts;
    case Family::reduce_scatter:
      return n * (ranks - node.smallest) / ranks;
    case Family::all_gather:
      return n * (ranks - node.smallest);
    case Family::broadcast:
      return n;
    case Family::all_to_all: {
      const auto out = [ranks](int m) { return static_cast<double>(m) * (ranks - m); };
      return n * std::max(out(node.smallest), out(node.largest));
    }
    default:
      return 0;
  }
}

}  // namespace

int node_size(const BenchOptions& options) {
  if (options.nodes == 0) return 1;
  return options.ranks % options.nodes == 0 ? options.ranks / options.nodes : 0;
}

std::vector<BenchCase> make_cases(const BenchOptions& options, Family family) {
  if (reduces(family) && options.dtype == DType::bytes) {
    throw UsageError(options.family + ": bytes have no sum; choose another --dtype");
  }
  std::vector<BenchCase> cases;
  for (const std::size_t bytes : options.sizes) {
    BenchCase c;
    c.family = family;
    c.bytes = bytes;
    c.dtype = options.dtype;
    c.shape = shape_of(options, family, bytes);
    const auto add = [&](const Algorithm& row) {
      c.algorithm = &row;
      c.slot = static_cast<std::uint32_t>(cases.size()) + 1;
      cases.push_back(c);
    };
    for (const std::string& name : options.algorithms) {
      if (name == "auto") {
        c.algorithm = nullptr;
        c.slot = static_cast<std::uint32_t>(cases.size()) + 1;
        cases.push_back(c);
      } else {
        add(pick(family, name, c.shape, LinkCost{}));
      }
    }
    if (!options.algorithms.empty()) continue;
    for (const Algorithm& row : algorithms(family)) {
      if (row.supports(c.shape)) add(row);
    }
  }
  return cases;
}

std::optional<double> ideal_seconds(const BenchOptions& options, const BenchCase& c) {
  const std::optional<LinkSpec>& link = options.link ? options.link : options.ideal;
  if (!link || c.shape.size == 1) return std::nullopt;
  if (options.nodes == 1) {  // nothing leaves the node
    if (options.scale_up_bytes_per_second <= 0) return std::nullopt;
    return port_bytes(c, c.shape.size, {}) / options.scale_up_bytes_per_second;
  }
  const int parts = options.nodes > 0 ? options.nodes : c.shape.size;
  return port_bytes(c, parts, node_sizes(options)) / link->bytes_per_second;
}

double algorithm_bytes(const BenchCase& c) {
  return static_cast<double>(c.bytes) * (by_block(c.family) ? c.shape.size : 1);
}

double bus_factor(const BenchCase& c) {
  const double share = static_cast<double>(c.shape.size - 1) / c.shape.size;
  if (c.family == Family::broadcast) return 1;
  return c.family == Family::all_reduce ? 2 * share : share;
}

void CaseBuffers::Free::operator()(std::byte* memory) const { std::free(memory); }

CaseBuffers::Memory CaseBuffers::allocate(std::size_t bytes) {
  const std::size_t whole = (std::max<std::size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kAlignment, whole));
  if (memory == nullptr) throw std::bad_alloc();
  return Memory(memory);
}

CaseBuffers::CaseBuffers(const BenchCase& c, int rank)
    : case_(c),
      rank_(rank),
      given_(c.family == Family::all_gather ? block_of(c.shape.count, c.shape.size, rank)
                                            : BlockRange{0, c.shape.count}),
      original_(allocate(static_cast<std::size_t>(given_.count) * c.shape.element_bytes)),
      data_(allocate(c.shape.bytes())) {
  for (int element_class = 0; reduces(c.family) && element_class < kClasses; ++element_class) {
    int sum = 0;
    for (int r = 0; r < c.shape.size; ++r) sum += term(c.dtype, r, element_class);
    sums_.push_back(sum);
  }
  with_type(c.dtype, [this](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    T* const first = reinterpret_cast<T*>(original_.get());
    for (std::int64_t i = 0; i < given_.count; ++i) first[i] = element<T>(input(given_.first + i));
  });
}

int CaseBuffers::input(std::int64_t index) const {
  if (reduces(case_.family)) return term(case_.dtype, rank_, class_of(index));
  if (case_.family == Family::broadcast) return rank_ == 0 ? token(0, 0, index) : 255;
  const auto block =
      static_cast<int>(index / std::max<std::int64_t>(case_.shape.count / case_.shape.size, 1));
  if (case_.family == Family::all_to_all) return token(rank_, block, index);
  return token(rank_, 0, index);
}

int CaseBuffers::expected(std::int64_t index) const {
  if (reduces(case_.family)) return sums_[static_cast<std::size_t>(class_of(index))];
  if (case_.family == Family::broadcast) return token(0, 0, index);
  const std::int64_t length = std::max<std::int64_t>(case_.shape.count / case_.shape.size, 1);
  const auto block = static_cast<int>(index / length);
  if (case_.family == Family::all_to_all) return token(block, rank_, rank_ * length + index % length);
  return token(block, 0, index);
}

void CaseBuffers::refill() {
  if (given_.count < case_.shape.count || case_.family == Family::all_to_all)
    std::memset(data_.get(), 0xff, case_.shape.bytes());
  if (case_.family == Family::all_to_all) return;
  const std::size_t width = case_.shape.element_bytes;
  std::memcpy(data_.get() + static_cast<std::size_t>(given_.first) * width, original_.get(),
              static_cast<std::size_t>(given_.count) * width);
}

Task<void> CaseBuffers::run(Comm comm) const {
  const std::string_view name = case_.algorithm != nullptr ? case_.algorithm->name : "auto";
  switch (case_.family) {
    case Family::all_reduce:
      return all_reduce(comm, dense(data_), {.algorithm = name});
    case Family::reduce_scatter:
      return reduce_scatter(comm, dense(data_), {.algorithm = name});
    case Family::all_gather:
      return all_gather(comm, dense(data_), {.algorithm = name});
    case Family::broadcast:
      return broadcast(comm, dense(data_), {.algorithm = name});
    default:
      break;
  }
  return all_to_all(comm, dense(original_), dense(data_), {.algorithm = name});
}

// Where the result lies: everywhere, or in the own block.
BlockRange CaseBuffers::result() const {
  if (case_.family == Family::reduce_scatter) return block_of(case_.shape.count, case_.shape.size, rank_);
  return {0, case_.shape.count};
}

bool CaseBuffers::correct() const {
  const BlockRange range = result();
  return with_type(case_.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* const first = reinterpret_cast<const T*>(data_.get());
    for (std::int64_t i = range.first; i < range.first + range.count; ++i) {
      if (!(first[i] == element<T>(expected(i)))) return false;
    }
    return true;
  });
}

void CaseBuffers::spoil() {
  if (const BlockRange range = result(); range.count > 0) {
    std::byte& touched = data_.get()[static_cast<std::size_t>(range.first) * case_.shape.element_bytes];
    touched ^= std::byte{1};
  }
}

}  // namespace weft
