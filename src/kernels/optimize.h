// Optimizer updates on spans: one pass over value, gradient and state, no allocation.
//
// What they compute, to the bit and on every processor: torch's single-tensor CPU update (torch/optim/sgd.py,
// adam.py, adagrad.py), operation by operation in its order; scalars are computed in float64 and rounded once
// to T. Products and sums are rounded apart (no fused multiply-add), so that replicas on different processors
// stay equal; torch fuses some of them, from which a float32 result differs by a few ulp.
//
// With w = value, g = gradient; g += weight_decay * w first, where decay is not decoupled:
//   sgd      buffer = momentum * buffer + (1 - dampening) * g; first step: buffer = g
//            w -= lr * (nesterov ? g + momentum * buffer : buffer); without momentum: w -= lr * g
//   adam     m += (1 - beta1) * (g - m);  v = beta2 * v + (1 - beta2) * g * g
//            w -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
//   adamw    w *= 1 - lr * weight_decay, then adam
//   adagrad  sum += g * g;  w -= lr / (1 + (step - 1) * lr_decay) * g / (sqrt(sum) + eps)
//   velocity next = momentum * velocity + gradient: what momentum correction does before the sum
//
// Rows of a table, of which only some have a gradient: the others, and their state, stay as they are. sgd and
// adagrad are those above; adam is torch.optim.SparseAdam, whose small number joins the plain root:
//   adam     m += (1 - beta1) * (g - m);  v += (1 - beta2) * (g * g - v)
//            w -= lr * sqrt(1 - beta2^step) / (1 - beta1^step) * (m / (sqrt(v) + eps))
//   adamw    w *= 1 - lr * weight_decay, of these rows only, then adam
// An element's result does not depend on the place of its row among the others.
//
// REQUIRES everywhere: spans of one length (a momentum buffer may be empty), no two overlap; step >= 1.
#pragma once

#include <cstdint>
#include <span>

namespace weft {

struct SgdStep {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool first = false;  // the buffer holds nothing yet
};

struct AdamStep {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  bool decoupled = false;  // AdamW
  std::int64_t step = 1;   // of this parameter, counted from 1
};

struct AdagradStep {
  double lr = 1e-2;
  double lr_decay = 0;
  double eps = 1e-10;
  double weight_decay = 0;
  std::int64_t step = 1;
};

// REQUIRES: `buffer` empty exactly where momentum is 0.
void sgd_update(std::span<float> value, std::span<const float> gradient, std::span<float> buffer,
                const SgdStep& step);
void sgd_update(std::span<double> value, std::span<const double> gradient, std::span<double> buffer,
                const SgdStep& step);

void adam_update(std::span<float> value, std::span<const float> gradient, std::span<float> exp_avg,
                 std::span<float> exp_avg_sq, const AdamStep& step);
void adam_update(std::span<double> value, std::span<const double> gradient, std::span<double> exp_avg,
                 std::span<double> exp_avg_sq, const AdamStep& step);

void adagrad_update(std::span<float> value, std::span<const float> gradient, std::span<float> sum,
                    const AdagradStep& step);
void adagrad_update(std::span<double> value, std::span<const double> gradient, std::span<double> sum,
                    const AdagradStep& step);

// `velocity` may be empty: zeros.
void accumulate_velocity(float momentum, std::span<const float> velocity, std::span<const float> gradient,
                         std::span<float> next);

// Row i of `gradient` belongs to row ids[i] of `value` and of its state; all have `width` columns. REQUIRES: no
// id twice; every id has its row.
struct TableRows {
  std::span<const std::int32_t> ids;
  std::size_t width = 0;
};
void sgd_rows(std::span<float> value, std::span<const float> gradient, const TableRows& rows,
              const SgdStep& step);  // REQUIRES: no momentum, no weight decay
void sgd_rows(std::span<double> value, std::span<const double> gradient, const TableRows& rows,
              const SgdStep& step);
void adam_rows(std::span<float> value, std::span<const float> gradient, std::span<float> exp_avg,
               std::span<float> exp_avg_sq, const TableRows& rows, const AdamStep& step);
void adam_rows(std::span<double> value, std::span<const double> gradient, std::span<double> exp_avg,
               std::span<double> exp_avg_sq, const TableRows& rows, const AdamStep& step);
void adagrad_rows(std::span<float> value, std::span<const float> gradient, std::span<float> sum,
                  const TableRows& rows, const AdagradStep& step);
void adagrad_rows(std::span<double> value, std::span<const double> gradient, std::span<double> sum,
                  const TableRows& rows, const AdagradStep& step);

// In float64, eight lanes: lane l sums what stands at l, l+8, ..; then ((0+4)+(2+6)) + ((1+5)+(3+7)).
double sum_of_squares(std::span<const float> values);
double sum_of_squares(std::span<const double> values);

}  // namespace weft
