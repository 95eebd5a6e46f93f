// Starts the ranks of a job as processes on this host, over tcp, and ends them all when one fails. The token
// that they prove to each other is drawn here, goes to them through their environment, and is printed
// nowhere.
#pragma once

#include <string>
#include <vector>

namespace weft::cli {

struct LaunchOptions {
  int ranks = 2;
  int port = 0;  // MASTER_PORT; the rendezvous is at the next one. 0: two that are free
  // After a failure all ranks are started again, with a token of their own, so often at most.
  int restarts = 0;
  bool verbose = false;
  // true: every line of output starts with "[rank] ". false: rank 0 has this process's own stdout and stderr,
  // the others' stdout is dropped (weft bench: only rank 0 prints)
  bool prefix = true;
  std::vector<std::string> command;
};

// Gives 0, or the exit status of the rank that failed first (128 + signal if one ended it), or 128 + signal
// if this process was told to end. Says on stderr which rank failed first and how. The others then have a
// second to notice and to say so before they are ended.
int launch(const LaunchOptions& options);

}  // namespace weft::cli
