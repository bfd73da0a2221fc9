#include "llama_runtime/session.h"

#include <algorithm>

#include "call.h"
#include "llama_runtime/error.h"

namespace llama_runtime {
namespace {

// The entry of that name where the bundle has one.
std::shared_ptr<Entry> entry_or_null(Model& model, const std::string& name) {
  const std::vector<std::string> names = model.manifest().entries();
  if (std::find(names.begin(), names.end(), name) == names.end()) return nullptr;
  return model.entry(name);
}

const TensorSpec& input(const Entry& entry, const std::string& name) {
  const std::vector<TensorSpec>& inputs = entry.signature().inputs;
  for (const TensorSpec& spec : inputs) {
    if (inputs.size() == 2 && spec.name == name) return spec;
  }
  throw Error(ErrorCode::kSession,
              "expected `" + entry.record().entry + "` with the inputs tokens and pos");
}

}  // namespace

Session::Session(Model& model)
    : prefill_(entry_or_null(model, "prefill")),
      decode_(entry_or_null(model, "decode")),
      batch_(model.manifest().batch),
      capacity_(model.manifest().max_seq - 1),
      num_logits_(model.manifest().batch * model.manifest().model.vocab_size) {
  if (!prefill_ && !decode_) {
    throw Error(ErrorCode::kSession,
                "a session needs the entry `decode` or `prefill`, this bundle has neither",
                model.folder().string(), "build it with --entry prefill --entry decode");
  }
  const Entry& entry = decode_ ? *decode_ : *prefill_;
  if (prefill_ && decode_ &&
      !are_same_states(prefill_->signature().states, decode_->signature().states)) {
    throw Error(ErrorCode::kSession, "`prefill` and `decode` keep different states",
                model.folder().string(), "build the bundle again");
  }
  tokens_ = input(entry, "tokens");
  const TensorSpec& pos = input(entry, "pos");
  if (pos.values) capacity_ = std::min(capacity_, pos.values->max + 1);
  states_ = std::make_unique<States>(entry.new_states());
}

Tensor Session::prefill(const std::vector<int32_t>& tokens) {
  return prefill_rows(std::vector(static_cast<size_t>(batch_), tokens));
}

Tensor Session::prefill_rows(const std::vector<std::vector<int32_t>>& rows) {
  check(rows);
  Tensor logits;
  for (size_t start = 0; start < rows[0].size(); start += chunk_len()) {
    logits = step(rows, start, std::min(chunk_len(), rows[0].size() - start));
  }
  return logits;
}

void Session::check(const std::vector<std::vector<int32_t>>& rows) const {
  if (is_broken_) {
    throw Error(ErrorCode::kSession, "an earlier call failed in the middle of a step", "",
                "call reset()");
  }
  const size_t count = rows.empty() ? 0 : rows[0].size();
  const bool is_even = std::all_of(rows.begin(), rows.end(),
                                   [count](const auto& row) { return row.size() == count; });
  if (static_cast<int64_t>(rows.size()) != batch_ || count == 0 || !is_even) {
    throw Error(ErrorCode::kInput,
                "expected a list of ids, or " + std::to_string(batch_) + " such lists, none empty",
                "tokens");
  }
  if (static_cast<int64_t>(count) > capacity_ - position_) {
    const std::string number = std::to_string(count);
    throw Error(ErrorCode::kInput,
                number + " tokens do not fit: " + std::to_string(position_) + " + " + number +
                    " positions are more than the capacity of " + std::to_string(capacity_),
                "tokens", "shorten the prompt, or build with a larger --max-seq");
  }
  for (const auto& row : rows) {
    const auto [smallest, largest] = std::minmax_element(row.begin(), row.end());
    check_values(tokens_, *smallest, *largest, {});
  }
}

void Session::reset() {
  position_ = 0;
  is_broken_ = false;
}

size_t Session::chunk_len() const {
  const Dim* dim = prefill_ ? prefill_->signature().dim("S") : nullptr;
  return dim ? static_cast<size_t>(dim->max) : 1;
}

Tensor Session::step(const std::vector<std::vector<int32_t>>& rows, size_t start, size_t count) {
  std::vector<int32_t> ids;
  for (const auto& row : rows) {
    const auto first = row.begin() + static_cast<std::ptrdiff_t>(start);
    ids.insert(ids.end(), first, first + static_cast<std::ptrdiff_t>(count));
  }
  const auto num_tokens = static_cast<int64_t>(count);
  Entry& entry = (count == 1 && decode_) || !prefill_ ? *decode_ : *prefill_;
  is_broken_ = true;  // until the step is done
  std::vector<Tensor> results =
      entry.run(states_.get(), {{"tokens", Tensor::from_ids(ids, {batch_, num_tokens})},
                                {"pos", Tensor::scalar(static_cast<int32_t>(position_))}});
  is_broken_ = false;
  position_ += num_tokens;
  return results[0];
}

Generated generate(Session& session, const std::vector<int32_t>& prompt,
                   const GenerateOptions& options) {
  if (options.max_new < 1) {
    throw Error(ErrorCode::kInput,
                "expected at least 1 new token, got " + std::to_string(options.max_new), "max_new");
  }
  Sampler sampler(options.sampling);
  Generated result;
  session.check(std::vector(static_cast<size_t>(session.batch()), prompt));
  std::vector<int32_t> fed = prompt;
  while (true) {
    if (session.is_stopped_->exchange(false)) {
      result.finish_reason = "cancelled";
      return result;
    }
    const Tensor logits = session.prefill(fed);
    Tensor first = logits;
    first.shape[0] = 1;  // row 0
    const int32_t token = sampler.sample(first)[0];
    const auto& stops = options.stop_tokens;
    if (std::find(stops.begin(), stops.end(), token) != stops.end()) {
      result.finish_reason = "stop";
      return result;
    }
    result.tokens.push_back(token);
    if (options.on_token && !options.on_token(token)) {
      result.finish_reason = "cancelled";
      return result;
    }
    if (static_cast<int64_t>(result.tokens.size()) == options.max_new ||
        session.position() == session.capacity()) {
      result.finish_reason = "length";
      return result;
    }
    fed = {token};
  }
}

}  // namespace llama_runtime
