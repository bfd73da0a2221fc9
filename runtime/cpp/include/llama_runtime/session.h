// One conversation: a set of states and the position up to which they are filled.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "llama_runtime/model.h"
#include "llama_runtime/sampler.h"
#include "llama_runtime/state.h"

namespace llama_runtime {

struct GenerateOptions;
struct Generated;

// Feeds tokens and keeps count of positions. A call that is refused for its arguments (kInput)
// changes nothing. A call that fails while a program runs may have written a part of its step:
// from then on every call throws Error(kSession) until `reset`. One thread at a time; sessions of
// one model may be used from several threads, and outlive the model.
class Session {
 public:
  // Throws Error(kSession): the bundle has neither `decode` nor `prefill`, or they keep different
  // states; otherwise as `Model::entry`.
  explicit Session(Model& model);

  // Feeds any number of tokens to every row, in chunks where they are many. Returns logits
  // [Batch, V] after the last one, in the program's dtype.
  // Throws Error(kInput): no token, an unknown one, or more than the positions that are left.
  Tensor prefill(const std::vector<int32_t>& tokens);
  // The same with tokens of its own for each row, equal in number.
  Tensor prefill_rows(const std::vector<std::vector<int32_t>>& rows);
  // Feeds one token to every row.
  Tensor decode(int32_t token) { return prefill({token}); }

  // What `prefill` would throw for these tokens.
  void check(const std::vector<std::vector<int32_t>>& rows) const;
  // Back to position 0, also after a failure. Old contents are never read again.
  void reset();
  // Ends `generate` before its next step, with the reason `cancelled`; where none is running, the
  // next one. May be called from any thread, and changes nothing else.
  void stop() { is_stopped_->store(true); }

  int64_t position() const { return position_; }
  int64_t capacity() const { return capacity_; }
  int64_t batch() const { return batch_; }
  // Elements of the logits that a call returns: Batch x V.
  int64_t num_logits() const { return num_logits_; }

 private:
  friend Generated generate(Session&, const std::vector<int32_t>&, const GenerateOptions&);
  Tensor step(const std::vector<std::vector<int32_t>>& rows, size_t start, size_t count);
  size_t chunk_len() const;

  std::shared_ptr<Entry> prefill_;
  std::shared_ptr<Entry> decode_;
  TensorSpec tokens_;
  std::unique_ptr<States> states_;
  int64_t batch_ = 1;
  int64_t capacity_ = 0;
  int64_t num_logits_ = 0;
  int64_t position_ = 0;
  bool is_broken_ = false;
  // Held by pointer so that a session can be moved.
  std::unique_ptr<std::atomic<bool>> is_stopped_ = std::make_unique<std::atomic<bool>>(false);
};

struct GenerateOptions {
  int64_t max_new = 128;
  SamplingParams sampling;
  std::vector<int64_t> stop_tokens;  // any of them ends the text and is not part of it
  // Called with each new token; false ends the generation.
  std::function<bool(int32_t)> on_token;
};

struct Generated {
  std::vector<int32_t> tokens;
  std::string finish_reason;  // `stop`, `length` (also: no position is left) or `cancelled`
};

// New tokens after a prompt, of row 0. Throws Error(kInput): the prompt is empty or too long, or an
// option is out of range.
Generated generate(Session& session, const std::vector<int32_t>& prompt,
                   const GenerateOptions& options);

}  // namespace llama_runtime
