#include <queue>
#include <tuple>

#include "tokenizer_tables.h"

namespace llama_runtime {
namespace {

// A token of the word so far; a doubly linked list in one array.
struct Symbol {
  int32_t id;  // -1: merged into the one before
  int32_t previous;
  int32_t next;
};

struct Candidate {
  int32_t rank;
  int32_t position;
  int32_t id;
  // The lowest rank comes first, then what stands first.
  bool operator<(const Candidate& other) const {
    return std::tie(rank, position) > std::tie(other.rank, other.position);
  }
};

class Word {
 public:
  Word(const Tokenizer::Tables& tables, std::string_view bytes) : tables_(tables) {
    for (const char byte : bytes) {
      const int32_t id = tables.byte_ids[static_cast<uint8_t>(byte)];
      if (id < 0) continue;
      const auto index = static_cast<int32_t>(symbols_.size());
      symbols_.push_back({id, index - 1, index + 1});
    }
    if (!symbols_.empty()) symbols_.back().next = -1;
    for (size_t i = 0; i + 1 < symbols_.size(); ++i) propose(static_cast<int32_t>(i));
  }

  void merge_all() {
    while (!queue_.empty()) {
      const Candidate best = queue_.top();
      queue_.pop();
      const Merge* merge = merge_at(best.position);
      if (merge && merge->id == best.id) merge_pair(best);
    }
  }

  void append_to(std::vector<int32_t>& ids) const {
    for (const Symbol& symbol : symbols_) {
      if (symbol.id >= 0) ids.push_back(symbol.id);
    }
  }

 private:
  Symbol& at(int32_t index) { return symbols_[static_cast<size_t>(index)]; }

  // What the token at `position` and the next one become, if anything.
  const Merge* merge_at(int32_t position) {
    const Symbol& first = at(position);
    if (first.id < 0 || first.next < 0) return nullptr;
    const auto found = tables_.merges.find(pair_key(first.id, at(first.next).id));
    return found == tables_.merges.end() ? nullptr : &found->second;
  }

  void propose(int32_t position) {
    if (position < 0) return;
    if (const Merge* merge = merge_at(position)) queue_.push({merge->rank, position, merge->id});
  }

  void merge_pair(const Candidate& best) {
    Symbol& first = at(best.position);
    Symbol& second = at(first.next);
    first.id = best.id;
    second.id = -1;
    first.next = second.next;
    if (first.next >= 0) at(first.next).previous = best.position;
    propose(first.previous);
    propose(best.position);
  }

  const Tokenizer::Tables& tables_;
  std::vector<Symbol> symbols_;
  std::priority_queue<Candidate> queue_;
};

}  // namespace

void append_word(const Tokenizer::Tables& tables, std::string_view word,
                 std::vector<int32_t>& ids) {
  if (tables.ignores_merges) {
    const auto found = tables.vocab.find(std::string(word));
    if (found != tables.vocab.end()) {
      ids.push_back(found->second);
      return;
    }
  }
  Word merged(tables, word);
  merged.merge_all();
  merged.append_to(ids);
}

}  // namespace llama_runtime
