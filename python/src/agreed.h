// What all ranks must have alike, as lines of text: they tell each other a hash of them, and only where the
// hashes differ the lines, so that every rank can say what differs and where.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "weft/engine.h"

namespace weft::python {

struct AgreedLine {
  std::string what;   // "table 'words'"
  std::string value;  // "50 x 4 of float32"
};

class Agreement {
 public:
  // On all ranks of the group, under the same slot and step. `fix`: ends the sentence.
  void start(Engine& engine, const Comm& group, const SubmitOptions& submit,
             const std::vector<AgreedLine>& lines, std::string fix);
  const Ticket& ticket() const { return ticket_; }  // of the last start; not valid: there was none
  // Throws UsageError of one sentence, the same on all ranks, where some rank's lines were others than
  // rank 0's; once. REQUIRES: the ticket is done, without an error.
  void check();

 private:
  struct Told;
  std::shared_ptr<Told> told_;
  Ticket ticket_;
};

}  // namespace weft::python
