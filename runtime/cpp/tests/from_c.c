/* Generates from a bundle in plain C. Arguments: BUNDLE; prints ids, then logits' largest index. */
#include <stdio.h>
#include <stdlib.h>

#include "llama_runtime.h"

static int show(int32_t id, void* count) {
  printf("%d ", id);
  return ++*(int*)count < 8;
}

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, llama_last_error());
  return 1;
}

int main(int argc, char** argv) {
  const int32_t prompt[] = {1, 10, 7};
  int count = 0;
  llama_options options = llama_default_options();
  llama_model* model = argc == 2 ? llama_model_load(argv[1], 1) : NULL;
  if (model == NULL) return failed("load");
  llama_session* session = llama_session_new(model);
  if (session == NULL) return failed("session");
  const size_t size = (size_t)(llama_model_batch(model) * llama_model_vocab_size(model));
  llama_model_free(model);
  if (llama_session_generate(session, prompt, 3, &options, show, &count)) return failed("generate");
  if (llama_session_feed(session, prompt, 0, NULL, 0) != LLAMA_ERROR_INPUT) return 1;
  llama_session_reset(session);
  float* logits = malloc(size * sizeof *logits);
  if (llama_session_feed(session, prompt, 3, logits, size)) return failed("feed");
  size_t best = 0;
  for (size_t i = 1; i < size / 2; ++i) best = logits[i] > logits[best] ? i : best;
  printf("%zu at %d\n", best, (int)llama_session_position(session));
  free(logits);
  llama_session_free(session);
  return 0;
}
