// Programs that the command runs and listens to.
#pragma once

#include <string>
#include <vector>

#include "weft/clock.h"

namespace weft::cli {

struct Finished {
  int status = 0;  // 0..255, 128 + signal; 127: not found
  bool timed_out = false;
  std::string output;  // stdout
  std::string errors;  // stderr
};

// Runs `arguments` (the first is the program, looked for in PATH) to its end, at most `limit` long: then it
// is killed with all that it started.
Finished run_program(const std::vector<std::string>& arguments, Time limit);
// Full path of a program in PATH; empty if there is none.
std::string find_program(const std::string& name);
// mpirun with what lets ranks outnumber cores: unbound, and idle ranks yield.
std::vector<std::string> mpirun(int ranks);

// For the child between fork and exec: signals as a program expects them, in a process group of its own,
// ended with its parent.
void become_child(int parent_pid);
std::string signal_text(int signal);

}  // namespace weft::cli
