// What all ranks must have alike, as lines of text: they tell each other a hash of them, and only where the
// hashes differ the lines, so that every rank can say what differs and where. A rank that has failed before it
// has any takes part with that in their place, so that nobody waits for it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "weft/engine.h"

namespace weft::python {

struct AgreedLine {
  std::string what;      // "table 'words'"; empty: this rank has failed
  std::string value;     // "50 x 4 of float32"; why it has, a sentence
  bool of_part = false;  // alike on the ranks of a part, else on all
};

class Agreement {
 public:
  // Ranks whose numbers in the group differ by a multiple of `parts` are a part: the same number on all ranks.
  explicit Agreement(int parts = 1) : parts_(parts) {}
  // On all ranks of the group, under the same slot and step. `fix`: ends the sentence.
  void start(Engine& engine, const Comm& group, const SubmitOptions& submit,
             const std::vector<AgreedLine>& lines, std::string fix);
  const Ticket& ticket() const { return ticket_; }  // of the last start; not valid: there was none
  // Throws UsageError of one sentence, the same on all ranks, where some rank has failed (not, where all have
  // and say the same), or where its lines were others than rank 0's, or than those of the first of its part;
  // once. REQUIRES: the ticket is done, without an error.
  void check();

 private:
  struct Told;
  int parts_;
  std::shared_ptr<Told> told_;
  Ticket ticket_;
};

}  // namespace weft::python
