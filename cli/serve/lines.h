// Lines from whoever asks, and answers to them: standard input and output, or a unix socket that any number of
// clients connect to. SIGINT and SIGTERM end it like the end of the input, after what is being answered.
//
// Thread: one at a time. The calling thread has those signals, and SIGPIPE, blocked from the beginning on
// (block_signals()), and so have the threads that it starts.
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <string>
#include <vector>

namespace weft::cli {

void block_signals();

class Lines {
 public:
  // An empty path: standard input and output. Throws UsageError for a socket that cannot be.
  explicit Lines(const std::string& socket_path);
  ~Lines();
  Lines(const Lines&) = delete;
  Lines& operator=(const Lines&) = delete;

  struct Line {
    int client = 0;
    std::string text;
    bool too_long = false;  // more than kMostBytes: it was not kept
  };
  // What has come, at most so many; waits for the first of them, up to so long. None: nothing came, or it has
  // ended.
  std::vector<Line> wait(std::size_t most, int milliseconds);
  bool ended() const { return ended_ && ready_.empty(); }
  // One line, for each that came. A client that is gone, or does not read, is dropped; throws Error where standard output is gone.
  void answer(int client, const std::string& line);

  static constexpr std::size_t kMostBytes = std::size_t{1} << 20;

 private:
  struct Client {
    int in = -1, out = -1;  // in: -1: it has sent its last
    std::string begun;      // of a line
    bool skips = false;     // the rest of a line that is too long
    int unanswered = 0;     // lines
  };
  void listen_at(const std::string& path);
  void accept_one();
  void read_from(int client);
  void take(int client, std::string_view bytes);
  void close_client(int client);
  void close_all();

  std::string path_;
  int signals_ = -1, listening_ = -1;
  int next_client_ = 0;
  std::map<int, Client> clients_;
  std::deque<Line> ready_;
  bool ended_ = false;
};

}  // namespace weft::cli
