// `llama-run`: text or tokens from a bundle, as they come.
#include <getopt.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <iterator>
#include <optional>
#include <sstream>

#include "llama_runtime/error.h"
#include "llama_runtime/session.h"
#include "llama_runtime/stop.h"
#include "llama_runtime/vectors.h"

namespace {

using namespace llama_runtime;
using Clock = std::chrono::steady_clock;

constexpr int kFailure = 1, kUsage = 2;

constexpr const char* kHelp = R"(Usage: llama-run [OPTIONS] BUNDLE

  Generate text or tokens from a bundle, without Python. BUNDLE is the folder that
  `llama-export build --format aoti` wrote.

Prompt (one of them):
  -p, --prompt TEXT    A text to go on with, as it stands; `-` reads it from stdin.
  --tokens IDS         Token ids such as "1 9690 198"; prints ids instead of text.

Length and end:
  --max-new N          New tokens at most. The bundle's stop tokens always end the text.
                       [default: 128]
  --stop TEXT          End before this text; repeat it for several.
  --stop-tokens IDS    End at any of these tokens, too.

Sampling:
  --temperature T      0 takes the likeliest token. [default: 0]
  --top-k K            Sample from the K likeliest tokens; 0 keeps all. [default: 0]
  --top-p P            Sample from the likeliest that together reach P. [default: 1]
  --min-p P            Drop tokens with less than P times the likeliest's probability.
                       [default: 0]
  --seed N             Makes the draws repeatable. [default: a fresh one]

Program:
  --format FORMAT      The format to run: aoti, or onnx where it was built in.
                       [default: the first of them that fits this machine]
  --device DEVICE      `cpu`, `cuda`, or one GPU such as `cuda:1`. [default: cpu]
  --no-cuda-graphs     On a GPU, launch every step anew instead of replaying a captured graph.
  --threads N          CPU threads. [default: one per core]
  --no-native          Refuse compiled programs: they are code, and run with your rights.
  --weights-dir DIR    The checkpoint's folder, for a bundle that refers to its weights.

Checks (in place of a prompt):
  --integrity          Compare every file with the manifest; run nothing.
  --vectors            Hold the programs against the test vectors in the bundle.

Output:
  --stats              Times and counts, on stderr.
  -h, --help           Show this text.

Examples:
  llama-run smollm2-135m -p "Once upon a time" --max-new 64 --stats
  llama-run smollm2-135m --tokens "1 9690 198" --temperature 0.8 --seed 7
)";

struct UsageError {
  std::string message;
};

struct Arguments {
  std::string bundle;
  std::optional<std::string> prompt;
  std::optional<std::vector<int32_t>> tokens;
  std::vector<std::string> stop_texts;
  GenerateOptions generate;
  LoadOptions load;
  bool checks_integrity = false;
  bool checks_vectors = false;
  bool shows_stats = false;
};

template <typename T>
T number(const char* option, const char* text) {
  std::istringstream stream(text);
  T value{};
  const bool is_negative = text[0] == '-';
  if (is_negative || !(stream >> value) || !stream.eof()) {
    throw UsageError{std::string("--") + option + ": expected a number from 0, got `" + text + "`"};
  }
  return value;
}

std::vector<int32_t> token_ids(const char* option, std::string text) {
  const std::string expected = std::string(option) + ": expected token ids such as `1 9690 198`, ";
  for (char& c : text) c = c == ',' ? ' ' : c;
  std::istringstream words(text);
  std::vector<int32_t> ids;
  for (std::string word; words >> word;) {
    if (word.size() > 9 || word.find_first_not_of("0123456789") != word.npos) {
      throw UsageError{expected + "got `" + word.substr(0, 40) + "`"};
    }
    ids.push_back(std::stoi(word));
  }
  if (ids.empty()) throw UsageError{expected + "got none"};
  return ids;
}

enum Option {
  kTokens = 256,
  kMaxNew,
  kStop,
  kStopTokens,
  kTemperature,
  kTopK,
  kTopP,
  kMinP,
  kSeed,
  kFormat,
  kThreads,
  kDevice,
  kNoCudaGraphs,
  kNoNative,
  kWeightsDir,
  kIntegrity,
  kVectors,
  kStats
};

constexpr option kOptions[] = {
    {"prompt", required_argument, nullptr, 'p'},
    {"tokens", required_argument, nullptr, kTokens},
    {"max-new", required_argument, nullptr, kMaxNew},
    {"stop", required_argument, nullptr, kStop},
    {"stop-tokens", required_argument, nullptr, kStopTokens},
    {"temperature", required_argument, nullptr, kTemperature},
    {"top-k", required_argument, nullptr, kTopK},
    {"top-p", required_argument, nullptr, kTopP},
    {"min-p", required_argument, nullptr, kMinP},
    {"seed", required_argument, nullptr, kSeed},
    {"format", required_argument, nullptr, kFormat},
    {"threads", required_argument, nullptr, kThreads},
    {"device", required_argument, nullptr, kDevice},
    {"no-cuda-graphs", no_argument, nullptr, kNoCudaGraphs},
    {"no-native", no_argument, nullptr, kNoNative},
    {"weights-dir", required_argument, nullptr, kWeightsDir},
    {"integrity", no_argument, nullptr, kIntegrity},
    {"vectors", no_argument, nullptr, kVectors},
    {"stats", no_argument, nullptr, kStats},
    {"help", no_argument, nullptr, 'h'},
    {nullptr, 0, nullptr, 0},
};

void take_option(int code, const char* value, Arguments& arguments) {
  SamplingParams& sampling = arguments.generate.sampling;
  switch (code) {
    case 'p':
      arguments.prompt = value;
      break;
    case kTokens:
      arguments.tokens = token_ids("--tokens", value);
      break;
    case kMaxNew:
      arguments.generate.max_new = number<int64_t>("max-new", value);
      break;
    case kStop:
      if (*value == '\0') throw UsageError{"--stop: expected a text, got none"};
      arguments.stop_texts.emplace_back(value);
      break;
    case kStopTokens: {
      const std::vector<int32_t> ids = token_ids("--stop-tokens", value);
      auto& stops = arguments.generate.stop_tokens;
      stops.insert(stops.end(), ids.begin(), ids.end());
      break;
    }
    case kTemperature:
      sampling.temperature = number<double>("temperature", value);
      break;
    case kTopK:
      sampling.top_k = number<int64_t>("top-k", value);
      break;
    case kTopP:
      sampling.top_p = number<double>("top-p", value);
      break;
    case kMinP:
      sampling.min_p = number<double>("min-p", value);
      break;
    case kSeed:
      sampling.seed = number<uint64_t>("seed", value);
      break;
    case kThreads:
      arguments.load.threads = number<int>("threads", value);
      break;
    case kDevice:
      arguments.load.device = value;
      break;
    case kNoCudaGraphs:
      arguments.load.cuda_graphs = false;
      break;
    case kNoNative:
      arguments.load.allow_native = false;
      break;
    case kWeightsDir:
      arguments.load.weights_dir = value;
      break;
    case kIntegrity:
      arguments.checks_integrity = true;
      break;
    case kVectors:
      arguments.checks_vectors = true;
      break;
    case kStats:
      arguments.shows_stats = true;
      break;
    case kFormat:
      if (std::strcmp(value, "aoti") != 0 && std::strcmp(value, "onnx") != 0) {
        throw UsageError{std::string("--format: expected aoti or onnx, got `") + value + "`"};
      }
      arguments.load.format = value;
      break;
    case 'h':
      std::fputs(kHelp, stdout);
      std::exit(0);
    default:
      std::exit(kUsage);  // getopt has said why
  }
}

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int code; (code = getopt_long(argc, argv, "p:h", kOptions, nullptr)) != -1;) {
    take_option(code, optarg, arguments);
  }
  if (argc - optind != 1) throw UsageError{"expected one BUNDLE"};
  arguments.bundle = argv[optind];
  const int num_tasks = arguments.prompt.has_value() + arguments.tokens.has_value() +
                        arguments.checks_integrity + arguments.checks_vectors;
  if (num_tasks != 1) {
    throw UsageError{"expected one of `-p TEXT`, `--tokens IDS`, `--integrity` and `--vectors`"};
  }
  if (!arguments.prompt && !arguments.stop_texts.empty()) {
    throw UsageError{"`--stop` needs `-p TEXT`"};
  }
  if (arguments.prompt == "-") {
    arguments.prompt = std::string(std::istreambuf_iterator<char>(std::cin), {});
    if (arguments.prompt->ends_with('\n')) arguments.prompt->pop_back();
  }
  return arguments;
}

double seconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

void write_piece(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

struct Times {
  Clock::time_point start, loaded, first, last;
};

void show_stats(const Times& times, size_t num_prompt, const Generated& result) {
  const size_t count = result.tokens.size();
  std::fprintf(stderr, "load         %.2f s\n", seconds(times.start, times.loaded));
  std::fprintf(stderr, "first token  %.1f ms\n", 1000 * seconds(times.loaded, times.first));
  const double decoding = seconds(times.first, times.last);
  if (count > 1 && decoding > 0) {
    std::fprintf(stderr, "decode       %.1f tokens/s\n", static_cast<double>(count - 1) / decoding);
  }
  std::fprintf(stderr, "tokens       %zu prompt, %zu new\n", num_prompt, count);
  std::fprintf(stderr, "finish       %s\n", result.finish_reason.c_str());
}

// What is printed of the tokens: ids, or text up to a stop text.
class Printer {
 public:
  Printer(std::optional<TextStream> text, const std::vector<std::string>& stops)
      : text_(std::move(text)), stops_(stops) {}

  // Whether to go on.
  bool print(int32_t token) {
    write_piece(text_ ? stops_.push(text_->push(token))
                      : (is_first_ ? "" : " ") + std::to_string(token));
    is_first_ = false;
    return !is_stopped() && std::ferror(stdout) == 0;
  }

  void finish() {
    std::string rest;
    if (text_) rest = stops_.push(text_->finish());
    write_piece(rest + stops_.finish() + "\n");
  }

  bool is_stopped() const { return stops_.matched().has_value(); }

 private:
  std::optional<TextStream> text_;
  StopTexts stops_;
  bool is_first_ = true;
};

int run(Arguments& arguments) {
  Times times{};
  times.start = Clock::now();
  Model model(arguments.bundle, arguments.load);
  Session session(model);
  std::optional<TextStream> text;
  if (!arguments.tokens) {
    text = model.tokenizer().stream();
    arguments.tokens = model.tokenizer().encode(*arguments.prompt);
  }
  Printer printer(std::move(text), arguments.stop_texts);
  GenerateOptions& options = arguments.generate;
  const std::vector<int64_t>& stops = model.manifest().stop_tokens;
  options.stop_tokens.insert(options.stop_tokens.end(), stops.begin(), stops.end());
  options.on_token = [&](int32_t token) {
    const bool is_first = times.last == times.loaded;
    times.last = Clock::now();
    if (is_first) times.first = times.last;
    return printer.print(token);
  };
  times.loaded = times.first = times.last = Clock::now();
  Generated result = generate(session, *arguments.tokens, options);
  printer.finish();
  if (printer.is_stopped()) result.finish_reason = "stop";
  if (arguments.shows_stats) show_stats(times, arguments.tokens->size(), result);
  return 0;
}

int check_all(const Arguments& arguments) {
  if (arguments.checks_integrity) {
    check_integrity(open_bundle(arguments.bundle));
    std::puts("every file is as the manifest lists it");
    return 0;
  }
  Model model(arguments.bundle, arguments.load);
  const std::vector<VectorResult> results = check_vectors(model);
  bool is_good = !results.empty();
  for (const VectorResult& result : results) {
    std::printf("%-4s  %-20s  %-4s  %.3g (at most %.3g)  %s\n", result.passed() ? "ok" : "FAIL",
                result.entry.c_str(), result.format.c_str(), result.figure, result.limit,
                result.detail.c_str());
    is_good = is_good && result.passed();
  }
  if (results.empty()) std::fputs("error: no program that runs here has test vectors\n", stderr);
  return is_good ? 0 : kFailure;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Arguments arguments = parse(argc, argv);
    const bool is_check = arguments.checks_integrity || arguments.checks_vectors;
    return is_check ? check_all(arguments) : run(arguments);
  } catch (const UsageError& error) {
    std::fprintf(stderr, "error: %s\nhint: `llama-run --help` shows what can be said\n",
                 error.message.c_str());
    return kUsage;
  } catch (const Error& error) {
    std::fprintf(stderr, "error: %s\nhint: %s\n", error.what(), error.hint().c_str());
    return kFailure;
  }
}
