// What a series of measured values is reduced to. Every figure of the name means this one.
#pragma once

#include <vector>

namespace weft {

// Of an even number: the mean of the two in the middle. Of none: 0.
double median(std::vector<double> values);
// The smallest value that at least this share of the values does not exceed. REQUIRES: values; 0 < share
// <= 1.
double quantile(std::vector<double> values, double share);

// The median with the narrowest interval between two order statistics that has it inside with a probability
// of 95 % whatever the distribution; of fewer than 6 values, which have none, from the least to the largest.
struct Median {
  double value = 0, low = 0, high = 0;
};
Median median_with_interval(std::vector<double> values);

}  // namespace weft
