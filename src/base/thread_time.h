// Processor time of the calling thread: what a computation takes where others compete for the cores.
#pragma once

namespace weft {

double thread_seconds();

}  // namespace weft
