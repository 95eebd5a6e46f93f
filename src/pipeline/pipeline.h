// A pipeline: what a stage's chunks make goes to the stage that has the chunk behind them, and the gradients of it
// come back (Optimus-CC; Song et al., ASPLOS 2023).
//
// In each micro-batch, for every chunk (patterns/pipeline.h says in which order they are computed):
//
//   activation    what the chunk before it gave arrives in front of its forward; what it gives leaves behind it
//   gradient      of what it gave arrives in front of its backward; of what it took leaves behind it
//
// Receives are posted ahead of their use, so that a message never waits for one. A sent activation is let go in
// front of the chunk's backward, when its receiver has long had it; a sent gradient is a copy that is let go as soon as
// it has been sent, and awaited a step later: nobody waits for a send.
//
// Memory follows from the table (message_memory.h). What arrived is kept until the last piece that reads it has ended:
// an activation behind the backward of the chunk's first part, a gradient behind that of its last part (zb-h1: the half
// that makes gradients of weights). So a stage keeps what is under way on it, and what was posted ahead: as many
// items as there are stages. With 1f1b that does not grow with the number of micro-batches.
//
// Which gradients travel as factors, or as whole numbers (stage_codec.h), follows from the table: those of the
// epilogue, or all. Both ends work it out from the same order of pieces, by chunk and micro-batch. Or they were chosen
// one by one (message_set.h), and are part of the options.
//
// Where tensor-parallel ranks have the same activations each of them sends its share of the tokens (rows, never parts
// of one), and what arrives they gather as it came, factors as factors: the pipe carries every token once, and all of
// them make the same bits of it. n is then the share of a rank, and a gather of all shares over these ranks comes
// behind each receive.
//
// With StageOptions::bf16 all of this travels as bfloat16, rounded once, and is float32 again where it arrived. What
// the rounding of factors takes away is part of what they leave behind; what it takes away from activations, and from
// gradients that travel as they are, is lost.
//
// Bytes of a rank, n tokens by m values a micro-batch, values of w bytes (of bfloat16 2), each chunk: forward M n m w
// where it has one behind it; back, where it has one before it, (M - q) n m w + q (n + m) r w, q being those that
// travel as factors; as whole numbers of b bits q n (4 + ceil(m b / 8)), each to a multiple of 4. Gathers, by the ring:
// of every receive, what came to all copies but the next one.
//
// State, of every link over which this rank sends gradients (rule restart: it is of this rank's micro-batches). It is
// never reset between steps, an evaluation does not touch it, and where the loss counts otherwise it is rescaled. Where
// stages, layers or tensor-parallel ranks are others it is another row, and before a step that has messages of more
// tokens than any had, or where those of the run have fewer, the error is dropped; each is said in one line of the log.
//   error    [tokens, values], what the link's messages have left behind
//   factor   Q of its last message
//   scale    of the error, and how many messages there were
//
// Thread: one at a time, that of the driver. Memory: it outlives its operations.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "patterns/blocks.h"
#include "pipeline/message_memory.h"
#include "pipeline/message_set.h"
#include "pipeline/stage_codec.h"
#include "state/registry.h"
#include "step/stage.h"
#include "step/strategy.h"
#include "weft/train/stage_options.h"

namespace weft {

struct PipelineOptions {
  // affects results; equal on all ranks of the group
  std::string name = "pipeline";
  StageOptions stage;
  BackwardOptions backward;
  DType dtype = DType::float32;
  Peers peers;                    // ranks with the same stage, for state
  std::optional<Comm> copies;     // ranks with the same activations; none: this one alone
  std::uint32_t gather_slot = 0;  // in that group, takes num_slots() of it
  std::int64_t tokens = 0;        // of a micro-batch, at most; 0: not known. More were another run's
  // affects speed only
  int micro_batches = 0;         // of a step, for what rows say; 0: not known
  std::uint32_t first_slot = 0;  // takes num_slots()
};

// Throws UsageError of one sentence.
void check(const PipelineOptions& options);

// Of a chunk.
enum class StageExchange : std::uint8_t { arrives, leaves, leaves_back, arrives_back };
inline constexpr int kStageExchanges = 4;
constexpr std::size_t index(StageExchange what) { return static_cast<std::size_t>(what); }
constexpr bool is_back(StageExchange what) {
  return what == StageExchange::leaves_back || what == StageExchange::arrives_back;
}
constexpr bool is_sent(StageExchange what) {
  return what == StageExchange::leaves || what == StageExchange::leaves_back;
}

class Pipeline final : public Strategy {
 public:
  // `group`: the ranks of the pipeline, in order of stages. Throws UsageError. `registry` outlives it.
  Pipeline(Engine& engine, const Comm& group, const ModelShape& shape, PipelineOptions options,
           StateRegistry& registry);
  ~Pipeline() override;
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  std::string_view name() const override { return options_.name; }
  const Comm& group() const override { return comm_; }
  std::uint32_t num_slots() const override;
  std::vector<PlanRow> rows() const override;
  std::vector<Exchange> exchanges() const override;
  std::optional<std::uint64_t> compared() const override;
  void weave(Weaver& weaver) const override;
  void start(int exchange, const When& when, TensorSource& tensors) override;
  Ticket ticket(int exchange, const When& when) const override;
  std::vector<Ticket> work() const override;
  void computed(const Piece& piece) override;
  void step_end() override;
  StepResult verdict() override { return {.committed = true, .step = 0, .bad = {}, .text = {}}; }
  void close(bool, double) override { closed_ = ended_; }

  // Tokens of each micro-batch of the step, or of the evaluation, that is walked next: the same on all ranks of
  // the group. Throws UsageError while something but gradients of the last step is under way.
  void set_tokens(std::span<const std::int64_t> of_micro_batch);
  // How often the loss counts in the gradients of the step, before its first backward.
  void set_scale(double scale);

  // Whoever takes the memory shares it; the strategy lets go of it behind the last piece that reads it, and in an
  // evaluation with the next set_tokens(). Null: the micro-batch has no token. REQUIRES: it was awaited.
  std::shared_ptr<std::byte[]> arrived(const std::string& activation, int micro_batch) const;
  std::shared_ptr<std::byte[]> gradient_arrived(const std::string& activation, int micro_batch) const;

  // Whether the gradient of what that chunk of the model took is compressed, in a step of so many.
  bool is_compressed(int chunk, int micro_batch, int micro_batches) const;
  // Whether what that exchange of the list sends, or receives, in it does: what an end of a message goes by.
  bool is_coded(int exchange, int micro_batch, int micro_batches) const {
    return is_coded(kinds_[static_cast<std::size_t>(exchange)], micro_batch, micro_batches);
  }
  const PipelineOptions& options() const { return options_; }
  std::int64_t width() const { return width_; }
  const std::vector<ChunkShape>& chunks() const { return chunks_; }
  // Of the link over which that chunk of this rank sends gradients; null: none that compresses.
  StageCodec* codec(int chunk);

  // Of what arrives, from when it is posted until it is not needed any more; and of what is on its way in another
  // form than that: copies, factors and rounded values.
  const MessageMemory& kept() const { return kept_; }
  const MessageMemory& on_the_way() const { return on_the_way_; }

  // What of a source's state nobody of this run takes, in one line; "": nothing. `here`: null where it has no stages.
  static std::string left_out(const StateSource& source, const Pipeline* here);

  // Payload of this rank in the step that was committed or rolled back last, and by formula.
  std::uint64_t step_bytes() const { return closed_ == nullptr ? 0 : closed_->sent.load(); }
  std::int64_t formula_bytes() const { return closed_ == nullptr ? 0 : closed_->formula; }

 private:
  struct Flow {  // of a chunk in a micro-batch
    std::array<Ticket, kStageExchanges> tickets;
    MessageMemory::Piece activation, gradient;  // that arrive, while they are needed
  };
  struct MicroBatch {
    std::int64_t tokens = 0;
    std::vector<Flow> chunks;
  };
  struct Kind {     // of an exchange of the list
    int chunk = 0;  // of this rank's
    StageExchange what = StageExchange::arrives;
  };
  // What it is about, in the model's words.
  const std::string& activation_of(const Kind& kind) const;
  int peer_of(const Kind& kind) const;  // in the group
  std::uint32_t slot_of(const Kind& kind) const;
  int place_of(int chunk, StageExchange what) const;  // -1: there is none
  std::string codec_text(int chunk, int micro_batches) const;
  std::int64_t formula_of_step() const;
  // Of so many tokens of a micro-batch, those that this rank sends.
  Blocks shares_of(std::int64_t tokens) const;
  int share() const { return options_.copies ? options_.copies->rank() : 0; }
  // Of what passes between stages.
  DType wire() const { return options_.stage.bf16 ? DType::bfloat16 : options_.dtype; }
  std::int64_t message_bytes(std::int64_t tokens, bool coded) const;
  // What comes to each of the copies for their shares of so many tokens: bytes where it is coded, else values.
  std::vector<std::int64_t> arriving(std::int64_t tokens, bool coded) const;
  std::int64_t gather_bytes(std::int64_t tokens, bool coded) const;
  bool is_coded(const Kind& kind, int micro_batch, int micro_batches) const;
  const Flow* find(const std::string& activation, int micro_batch, bool leaves) const;
  std::vector<LiveRow> state_rows();
  void drop_misfits();
  void start_receive(const Kind& kind, const When& when);
  void start_send(const Kind& kind, const When& when, TensorSource& tensors);
  SubmitOptions submit_options(const Kind& kind, const When& when) const;

  struct Bytes {  // of a step
    std::atomic<std::uint64_t> sent = 0;
    std::int64_t formula = 0;
  };
  // What arrives: as it travels, the shares of all copies end to end, and where it goes.
  struct Arrival {
    MessageMemory::Piece kept;
    Dense into;                        // of that
    MessageMemory::Piece memory;       // of what travels; none: that is what goes there
    Dense all;                         // what travels
    std::vector<std::int64_t> counts;  // of each share
    bool coded = false;
    bool is_in_place() const { return all.data == into.data; }
  };
  // What leaves.
  struct Departure {
    int peer = 0;
    Dense data;
    MessageMemory::Piece copy;  // that `data` is in; none: it is the driver's
    std::shared_ptr<Bytes> bytes;
  };
  static Task<void> send(Comm comm, Pipeline* me, std::shared_ptr<Departure> departure);
  static Task<void> send_coded(Comm comm, Pipeline* me, StageCodec* codec, Ticket before,
                               std::shared_ptr<Departure> departure);
  static Task<void> receive(Comm comm, Pipeline* me, int peer, std::shared_ptr<Arrival> arrival);
  static Task<void> gather(Comm comm, Pipeline* me, std::shared_ptr<Bytes> bytes, Ticket received,
                           std::shared_ptr<Arrival> arrival);
  // Makes of what has travelled what it stands for. Gives its seconds in virtual time.
  double take_over(const KernelCosts& kernels, const Arrival& arrival) const;

  Engine& engine_;
  Comm comm_;
  std::vector<ChunkShape> chunks_;
  std::vector<int> last_parts_;  // of each chunk: its last block's last
  std::int64_t width_;
  PipelineOptions options_;
  const MessageForm form_;
  StateRegistry& registry_;
  const std::optional<MessageSet> chosen_;                   // none: the options have a name
  const std::string layout_;                                 // part of the names of state
  std::vector<Kind> kinds_;                                  // of each exchange
  std::map<int, std::unique_ptr<StageCodec>> codecs_;        // by chunk of the model
  std::map<int, Ticket> coded_;                              // by chunk of the model: of its last message
  std::vector<std::unique_ptr<MicroBatch>> batches_, last_;  // of this step and of the one before
  MessageMemory kept_, on_the_way_;
  std::uint32_t walked_ = 0;               // micro-batches before those of this step
  std::shared_ptr<Bytes> bytes_;           // since set_tokens()
  std::shared_ptr<Bytes> ended_, closed_;  // of the step whose backward, or which, was over last
};

}  // namespace weft
