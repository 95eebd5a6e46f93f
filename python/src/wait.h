// Waiting from Python: without the interpreter's lock, and in slices between which signals are looked at, so
// that Ctrl-C ends a wait at once and other Python threads go on.
#pragma once

#include <functional>

#include "weft/engine.h"

namespace weft::python {

// Until the ticket is done; says to the engine that somebody waits. Does not look at the ticket's error.
// Throws pybind11::error_already_set where a signal handler raised: the operation then goes on, and what it
// reads and writes must stay. REQUIRES: the interpreter's lock; `engine` is the ticket's and lives.
void wait(Engine& engine, const Ticket& ticket);

// Runs `work` on a thread of its own and waits for it in the same way; rethrows its error. After a signal the
// thread is left behind: what `work` refers to must belong to it.
void run_interruptibly(std::function<void()> work);

}  // namespace weft::python
