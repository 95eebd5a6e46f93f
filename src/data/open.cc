#include "data/open.h"

#include <algorithm>
#include <filesystem>
#include <iterator>

#include "base/names.h"
#include "base/units.h"
#include "data/megatron.h"
#include "data/text.h"
#include "data/token_cache.h"
#include "data/zipf.h"
#include "weft/error.h"

namespace weft {

namespace {

class TextSource final : public DataSource {
 public:
  TextSource(const Text& text, EncodedText encoded)
      : vocabulary_(encoded.vocabulary.size()),
        tokens_(std::move(encoded.tokens)),
        description_(std::to_string(tokens_.size()) + " tokens of " + std::to_string(vocabulary_) +
                     (encoded.vocabulary.bytes() ? " bytes" : " words") + " from " + text.path + " (" +
                     bytes_text(text.content.size()) + " in " + std::to_string(text.files) +
                     (text.files == 1 ? " file)" : " files)")) {}

  std::int64_t vocabulary() const override { return vocabulary_; }
  std::int64_t tokens() const override { return static_cast<std::int64_t>(tokens_.size()); }
  void read(std::int64_t first, std::span<std::int64_t> out) const override {
    std::copy_n(tokens_.begin() + first, out.size(), out.begin());
  }
  std::string description() const override { return description_; }

 private:
  std::int64_t vocabulary_;
  std::vector<std::int32_t> tokens_;
  std::string description_;
};

void require_name(std::string_view kind, const std::string& name,
                  const std::vector<std::string_view>& known) {
  if (std::find(known.begin(), known.end(), name) == known.end()) {
    throw UsageError(unknown_name(kind, name, known));
  }
}

OpenedData open_text(const DataOptions& o, const std::string& path) {
  require_name("vocabulary", o.vocabulary, {"words", "bytes"});
  if (o.words < 2) throw UsageError("a vocabulary has at least 2 words, not " + std::to_string(o.words));
  const Text text = read_text(path);
  EncodedText encoded = encode(text, {.bytes = o.vocabulary == "bytes",
                                      .limit = o.words,
                                      .cache = o.cache == "default" ? default_cache_folder() : o.cache});
  OpenedData out{.words = encoded.vocabulary.words()};
  out.source = std::make_shared<TextSource>(text, std::move(encoded));
  return out;
}

}  // namespace

OpenedData open_data(const DataOptions& o) {
  require_name("kind of data", o.kind, {"auto", "text", "megatron", "synthetic"});
  if (o.kind == "megatron") {
    if (o.path.empty()) throw UsageError("Megatron data needs the path of its .bin and .idx");
    return {.source = open_megatron(o.path, o.words)};
  }
  const auto synthetic = [&] { return std::make_shared<ZipfSource>(o.words, o.synthetic_tokens, o.seed); };
  if (o.kind == "synthetic") return {.source = synthetic()};
  if (!o.path.empty()) return open_text(o, o.path);
  std::error_code error;
  if (std::filesystem::is_directory(kDefaultText, error)) return open_text(o, std::string(kDefaultText));
  if (o.kind == "text") {
    throw UsageError("no path of a text was given, and " + std::string(kDefaultText) +
                     " (Debian's package fortunes, make setup) is not there");
  }
  return {.source = synthetic(),
          .note = "no text: " + std::string(kDefaultText) +
                  " is not there (apt-get install fortunes), so training runs on synthetic tokens; --text "
                  "PATH names another"};
}

}  // namespace weft
