#include "weft/dtype.h"

#include "base/half.h"

namespace weft {

float to_float(float16 x) { return half::widen(x); }
bfloat16 to_bfloat16(float x) { return half::narrow_bfloat16(x); }
float16 to_float16(float x) { return half::narrow_float16(x); }

}  // namespace weft
