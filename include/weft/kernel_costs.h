// What the kernels that operations compute with cost in virtual time: seconds of one byte, element or entry
// of each. All zeros (the default): computation takes no virtual time. Measured by
// workload/measure_kernels.h.
//
// On real clocks nobody reads them, but for the predictions of a plan.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "weft/dtype.h"

namespace weft {

// A product of a matrix with factors of `rank` columns: seconds of one element of the matrix, and of one
// multiply-add. Of orthonormalize(): of one element of the columns, and of one in each pair of columns.
struct ProductCost {
  double element = 0;
  double multiply_add = 0;
  double of(std::int64_t elements, double multiply_adds) const {
    return element * static_cast<double>(elements) + multiply_add * multiply_adds;
  }
};

// Equal on all ranks where a plan goes by them.
struct KernelCosts {
  double copy_byte = 0;
  double fold_byte = 0;       // kernels/fold.h
  double fold_half_byte = 0;  // of 16-bit floats

  // vectors
  double add_element = 0;       // gradient + residual
  double check_element = 0;     // whether it is finite
  double round_element = 0;     // to bfloat16, the error kept
  double narrow_element = 0;    // a rounded one into 16 bits
  double widen_element = 0;     // and back
  double velocity_element = 0;  // momentum correction

  // selection (kernels/select.h)
  double sample_element = 0;  // estimate_thresholds(), of those that are sampled
  double scan_element = 0;    // accumulate()
  double cut_candidate = 0;   // cut(), of its candidates
  double read_element = 0;    // cut() of a block that is read again

  // entries
  std::array<double, 3> encode_entry{};  // by wire::SparseCodec
  std::array<double, 3> decode_entry{};
  double scatter_entry = 0;  // scatter_add()
  double unite_index = 0;    // union of sorted indices, of both lists
  double merge_entry = 0;    // merge_add(), of both lists
  double keep_entry = 0;     // keep_largest()
  double sum_entry = 0;      // sum of several lists, of all of them
  double move_entry = 0;     // copied, split or filtered
  double settle_place = 0;   // the residual rule, of a place that it writes
  double measure_entry = 0;  // scale of a result

  // kernels/low_rank.h
  ProductCost multiply, multiply_transposed, reconstruct, orthonormalize;

  double fold(DType dtype) const { return size_of(dtype) == 2 ? fold_half_byte : fold_byte; }  // a byte
  double orthonormal(std::int64_t length, int rank) const {
    const double pairs = 0.5 * rank * (rank - 1);
    return orthonormalize.of(length * rank, pairs * static_cast<double>(length));
  }
};

// f(name, seconds) for every figure, const or not as `costs` is.
template <class Costs, class F>
void for_each_cost(Costs& costs, F&& f) {
  f("copy_byte", costs.copy_byte);
  f("fold_byte", costs.fold_byte);
  f("fold_half_byte", costs.fold_half_byte);
  f("add_element", costs.add_element);
  f("check_element", costs.check_element);
  f("round_element", costs.round_element);
  f("narrow_element", costs.narrow_element);
  f("widen_element", costs.widen_element);
  f("velocity_element", costs.velocity_element);
  f("sample_element", costs.sample_element);
  f("scan_element", costs.scan_element);
  f("cut_candidate", costs.cut_candidate);
  f("read_element", costs.read_element);
  f("encode_entry_coo", costs.encode_entry[0]);
  f("decode_entry_coo", costs.decode_entry[0]);
  f("encode_entry_packed", costs.encode_entry[1]);
  f("decode_entry_packed", costs.decode_entry[1]);
  f("encode_entry_packed_bf16", costs.encode_entry[2]);
  f("decode_entry_packed_bf16", costs.decode_entry[2]);
  f("scatter_entry", costs.scatter_entry);
  f("unite_index", costs.unite_index);
  f("merge_entry", costs.merge_entry);
  f("keep_entry", costs.keep_entry);
  f("sum_entry", costs.sum_entry);
  f("move_entry", costs.move_entry);
  f("settle_place", costs.settle_place);
  f("measure_entry", costs.measure_entry);
  f("multiply_element", costs.multiply.element);
  f("multiply_multiply_add", costs.multiply.multiply_add);
  f("multiply_transposed_element", costs.multiply_transposed.element);
  f("multiply_transposed_multiply_add", costs.multiply_transposed.multiply_add);
  f("reconstruct_element", costs.reconstruct.element);
  f("reconstruct_multiply_add", costs.reconstruct.multiply_add);
  f("orthonormalize_element", costs.orthonormalize.element);
  f("orthonormalize_multiply_add", costs.orthonormalize.multiply_add);
}

// Of data of which each byte, element and entry stands for so many.
inline KernelCosts scaled(KernelCosts costs, double factor) {
  for_each_cost(costs, [factor](const char*, double& seconds) { seconds *= factor; });
  return costs;
}

}  // namespace weft
