// The text form of a link, as it stands on command lines and in plans: RATE[,LATENCY].
//
//   1gbit,50us    100mbit    2.5gbit,1ms    2GB,10us
//
// Rates: bit, kbit, mbit, gbit, tbit (any case, decimal, per second) and B, kB, MB, GB, TB (bytes per second;
// upper case B, because "gb" means either to some reader). Latencies: ns, us, ms, s. A number has digits and
// at most one point.
#pragma once

#include <string_view>

namespace weft {

struct LinkSpec {
  double bytes_per_second = 0;
  double latency_seconds = 0;  // 0 where the text names none
};

// Throws UsageError that quotes the text and shows an example: for anything that is not exactly the form
// above, a rate of zero, and a number that is not finite.
LinkSpec parse_link(std::string_view text);

// Bytes a second inside a node: a rate, or "10x", so many times the rate of `link` between nodes.
double parse_scale_up(std::string_view text, const LinkSpec& link);

}  // namespace weft
