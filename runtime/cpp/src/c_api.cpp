#include <algorithm>
#include <memory>

#include "llama_runtime.h"
#include "llama_runtime/error.h"
#include "llama_runtime/session.h"

using llama_runtime::ErrorCode;

struct llama_model {
  llama_runtime::Model model;
};

struct llama_session {
  llama_runtime::Session session;
  std::vector<int64_t> stop_tokens;
};

namespace {

thread_local std::string last_error;

// Runs what may throw: nothing may pass through C.
template <typename Body>
int guarded(const Body& body) {
  try {
    body();
    return LLAMA_OK;
  } catch (const llama_runtime::Error& error) {
    last_error = error.what();
    return static_cast<int>(error.code());
  } catch (const std::exception& error) {
    last_error = error.what();
    return LLAMA_ERROR_OTHER;
  }
}

std::vector<int32_t> id_list(const int32_t* ids, size_t num_ids) {
  return num_ids ? std::vector<int32_t>(ids, ids + num_ids) : std::vector<int32_t>();
}

void check_room(size_t capacity, size_t needed, const char* where) {
  if (capacity >= needed) return;
  throw llama_runtime::Error(
      ErrorCode::kInput,
      "expected room for " + std::to_string(needed) + ", got " + std::to_string(capacity), where);
}

}  // namespace

llama_options llama_default_options(void) {
  return {128, 0.0, 0, 1.0, 0.0, 0, 0};
}

llama_model* llama_model_load(const char* folder, int threads) {
  llama_model* result = nullptr;
  llama_runtime::LoadOptions options;
  options.threads = threads;
  guarded([&] { result = new llama_model{llama_runtime::Model(folder, options)}; });
  return result;
}

void llama_model_free(llama_model* model) {
  delete model;
}

int64_t llama_model_vocab_size(const llama_model* model) {
  return model->model.manifest().model.vocab_size;
}

int64_t llama_model_batch(const llama_model* model) {
  return model->model.manifest().batch;
}

int llama_model_encode(llama_model* model, const char* text, int32_t* ids, size_t capacity,
                       size_t* count) {
  return guarded([&] {
    const std::vector<int32_t> found = model->model.tokenizer().encode(text);
    std::copy_n(found.begin(), std::min(capacity, found.size()), ids);
    *count = found.size();
  });
}

int llama_model_decode(llama_model* model, const int32_t* ids, size_t num_ids, char* text,
                       size_t capacity, size_t* count) {
  return guarded([&] {
    const std::string found = model->model.tokenizer().decode(id_list(ids, num_ids));
    *count = found.size();
    if (capacity == 0) return;
    const size_t num_bytes = std::min(capacity - 1, found.size());
    std::copy_n(found.begin(), num_bytes, text);
    text[num_bytes] = '\0';
  });
}

llama_session* llama_session_new(llama_model* model) {
  llama_session* result = nullptr;
  guarded([&] {
    result = new llama_session{llama_runtime::Session(model->model),
                               model->model.manifest().stop_tokens};
  });
  return result;
}

void llama_session_free(llama_session* session) {
  delete session;
}

int64_t llama_session_position(const llama_session* session) {
  return session->session.position();
}

void llama_session_reset(llama_session* session) {
  session->session.reset();
}

void llama_session_stop(llama_session* session) {
  session->session.stop();
}

int llama_session_feed(llama_session* session, const int32_t* ids, size_t num_ids, float* logits,
                       size_t capacity) {
  return guarded([&] {
    check_room(capacity, static_cast<size_t>(session->session.num_logits()), "logits");
    const std::vector<float> found = to_floats(session->session.prefill(id_list(ids, num_ids)));
    std::copy(found.begin(), found.end(), logits);
  });
}

int llama_session_generate(llama_session* session, const int32_t* ids, size_t num_ids,
                           const llama_options* options, int (*on_token)(int32_t id, void* data),
                           void* data) {
  return guarded([&] {
    llama_runtime::GenerateOptions own;
    own.max_new = options->max_new;
    own.sampling = {options->temperature, options->top_k, options->top_p, options->min_p, {}};
    if (options->has_seed) own.sampling.seed = options->seed;
    own.stop_tokens = session->stop_tokens;
    own.on_token = [&](int32_t id) { return on_token == nullptr || on_token(id, data) != 0; };
    llama_runtime::generate(session->session, id_list(ids, num_ids), own);
  });
}

const char* llama_last_error(void) {
  return last_error.c_str();
}
