/* The C interface of llama_runtime: for embedding, from any language that calls C.
 *
 * Functions that return `int` return 0 or one of the codes below; functions that return a pointer
 * return NULL after a failure. `llama_last_error` then tells the calling thread what happened.
 * A session may be used by one thread at a time; models and all else by any number. */
#ifndef LLAMA_RUNTIME_H
#define LLAMA_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  LLAMA_OK = 0,
  LLAMA_ERROR_MANIFEST = 1,
  LLAMA_ERROR_INTEGRITY = 2,
  LLAMA_ERROR_COMPATIBILITY = 3,
  LLAMA_ERROR_INPUT = 4,
  LLAMA_ERROR_SESSION = 5,
  LLAMA_ERROR_TOKENIZER = 6,
  LLAMA_ERROR_OTHER = 99
};

typedef struct llama_model llama_model;
typedef struct llama_session llama_session;

typedef struct {
  int64_t max_new;    /* at least 1 */
  double temperature; /* 0 is greedy */
  int64_t top_k;      /* 0 keeps all */
  double top_p;       /* 1 keeps all */
  double min_p;       /* 0 keeps all */
  uint64_t seed;
  int has_seed; /* 0: a fresh seed */
} llama_options;

/* Greedy, 128 new tokens. */
llama_options llama_default_options(void);

/* Opens a bundle; `threads` 0 leaves their number. To be freed; sessions may outlive it. */
llama_model* llama_model_load(const char* folder, int threads);
void llama_model_free(llama_model* model);

/* Sizes of the model. */
int64_t llama_model_vocab_size(const llama_model* model);
int64_t llama_model_batch(const llama_model* model);

/* Writes the ids of UTF-8 text, at most `capacity` of them, and sets `count` to how many there
 * are; call it again with more room where that is more. */
int llama_model_encode(llama_model* model, const char* text, int32_t* ids, size_t capacity,
                       size_t* count);
/* Writes the text of ids with a zero at the end, at most `capacity` bytes; `count` is the length
 * of the whole text without the zero. */
int llama_model_decode(llama_model* model, const int32_t* ids, size_t num_ids, char* text,
                       size_t capacity, size_t* count);

/* A conversation at position 0. To be freed. */
llama_session* llama_session_new(llama_model* model);
void llama_session_free(llama_session* session);
int64_t llama_session_position(const llama_session* session);
/* Back to position 0, also after a failure. */
void llama_session_reset(llama_session* session);

/* Ends a running `llama_session_generate` before its next step, or the next one where none is
 * running. The one function that any thread may call on a session that is in use. */
void llama_session_stop(llama_session* session);

/* Feeds ids to every row and writes the logits [batch, vocab_size] after the last of them as
 * float32; `capacity` is in floats. After LLAMA_ERROR_INPUT nothing has changed; after any other
 * failure the session must be reset. */
int llama_session_feed(llama_session* session, const int32_t* ids, size_t num_ids, float* logits,
                       size_t capacity);

/* Feeds ids, then generates until a stop token of the bundle, `max_new`, or the last position.
 * Calls `on_token` with each new id and `data`; where that returns 0 generation ends. */
int llama_session_generate(llama_session* session, const int32_t* ids, size_t num_ids,
                           const llama_options* options, int (*on_token)(int32_t id, void* data),
                           void* data);

/* What the last failure of this thread was, in one line; "" before the first. Valid until the
 * next failure of the thread. */
const char* llama_last_error(void);

#ifdef __cplusplus
}
#endif

#endif
