// Text, vocabularies, their cache, Megatron's files, and names that are nearly right.
#include "data/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <thread>

#include "base/names.h"
#include "data/megatron.h"
#include "data/open.h"
#include "data/token_cache.h"
#include "data/tokenizer.h"
#include "message_of.h"
#include "weft/error.h"
#include "weft/train/model_options.h"

namespace weft {
namespace {

using testing::message_of;

namespace fs = std::filesystem;

class Files : public ::testing::Test {
 protected:
  Files() {
    std::string name = (fs::temp_directory_path() / "weft_text_XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  ~Files() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  std::string write(const std::string& name, const std::string& content) const {
    fs::create_directories(fs::path(path(name)).parent_path());
    std::ofstream(path(name), std::ios::binary) << content;
    return path(name);
  }
  static std::string read(const std::string& name) {
    std::ifstream file(name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::string folder_;
};

TEST(Names, SuggestTheNearest) {
  const std::vector<std::string_view> known = {"gpt", "lm", "spardl", "topka"};
  EXPECT_EQ(edit_distance("spardl", "sparld"), 1);
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(nearest_name("gtp", known), "gpt");
  EXPECT_EQ(nearest_name("SparDL", known), "spardl");
  EXPECT_EQ(nearest_name("lmm", known), "lm");
  EXPECT_EQ(nearest_name("transformer-xl", known), "");
  EXPECT_EQ(nearest_name("", known), "");
  EXPECT_EQ(unknown_name("model", "zzzzz", known), "unknown model 'zzzzz'. There are gpt, lm, spardl, topka");
  EXPECT_EQ(message_of([] { model_options("ml"); }),
            "unknown model 'ml': did you mean 'lm'? There are gpt, gpt-moe, lm, gnmt, transformer, bert, "
            "bert2gpt2-moe");
  EXPECT_EQ(message_of([] { model_options("gpt", "tny"); }),
            "unknown preset of a model 'tny': did you mean 'tiny'? There are default, tiny");
}

TEST(Tokenizer, FindsWordsAndPunctuation) {
  using Tokens = std::vector<std::string_view>;
  EXPECT_EQ(tokens_of("Don't panic, it's a well-known -- caf\xc3\xa9!\n\n42 x."),
            (Tokens{"Don't", "panic", ",", "it's", "a", "well-known", "-", "-", "caf\xc3\xa9", "!", "42", "x",
                    "."}));
  EXPECT_EQ(tokens_of("'a' -b- "), (Tokens{"'", "a", "'", "-", "b", "-"}));
  EXPECT_TRUE(tokens_of(" \t\n").empty());
  EXPECT_TRUE(tokens_of("").empty());
}

TEST(Tokenizer, LosesNothingButWhiteSpace) {
  std::string text;
  for (int i = 0; i < 20'000; ++i) text += static_cast<char>(i * 2654435761u >> 13);
  std::string joined, expected;
  for (const std::string_view token : tokens_of(text)) joined += token;
  for (const char c : text) {
    if (c != ' ' && (c < '\t' || c > '\r') && c != '\0') expected += c;
  }
  EXPECT_EQ(joined, expected);
}

TEST(Vocabulary, NumbersWordsByFrequencyAndCountsRoundTrip) {
  const std::string text = "b a b c b a d";
  const Vocabulary all = Vocabulary::of_words(text, 100);
  EXPECT_EQ(all.words(), (std::vector<std::string>{"<unk>", "b", "a", "c", "d"}));
  std::map<std::string, int> counts;
  for (const std::int32_t id : all.encode(text)) ++counts[all.words().at(static_cast<std::size_t>(id))];
  EXPECT_EQ(counts, (std::map<std::string, int>{{"a", 2}, {"b", 3}, {"c", 1}, {"d", 1}}));
  const Vocabulary small = Vocabulary::of_words(text, 3);
  EXPECT_EQ(small.encode(text), (std::vector<std::int32_t>{1, 2, 1, 0, 1, 2, 0}));
  const Vocabulary bytes = Vocabulary::of_bytes();
  EXPECT_EQ(bytes.size(), 256);
  EXPECT_EQ(bytes.encode("a\xff"), (std::vector<std::int32_t>{97, 255}));
}

TEST_F(Files, TextOfAFolderPassesOverWhatIsNone) {
  write("b.txt", "second");
  write("a/x.txt", "first\n");
  write("c.dat", std::string("\0\1\2", 3));
  write("d.txt", "");
  fs::create_symlink(path("b.txt"), path("link"));
  const Text text = read_text(folder_);
  EXPECT_EQ(text.content, "first\nsecond\n");
  EXPECT_EQ(text.files, 2);
}

TEST_F(Files, BadTextIsOneSentence) {
  EXPECT_EQ(message_of([&] { read_text(path("none")); }),
            "text '" + path("none") + "': there is no such file or folder");
  write("empty", " \n");
  EXPECT_EQ(message_of([&] { read_text(path("empty")); }), "text '" + path("empty") + "': is empty");
  write("binary", std::string(10, '\0'));
  EXPECT_EQ(message_of([&] { read_text(path("binary")); }),
            "text '" + path("binary") + "': is not a text: it has NUL bytes");
  fs::create_directories(path("folder"));
  EXPECT_EQ(message_of([&] { read_text(path("folder")); }),
            "text '" + path("folder") + "': no text file is in this folder");
  if (geteuid() != 0) {
    chmod(write("secret", "x").c_str(), 0);
    EXPECT_EQ(message_of([&] { read_text(path("secret")); }),
              "text '" + path("secret") + "': cannot be read: Permission denied");
  }
}

TEST_F(Files, CacheIsUsedAndRebuiltWhenDamaged) {
  const Text text{.path = "x", .content = "one two two three three three", .files = 1};
  const VocabularyOptions options{.limit = 3, .cache = path("cache/deep")};
  const EncodedText first = encode(text, options);
  const std::string file = cache_file(text, options);
  const std::string good = read(file);
  ASSERT_FALSE(good.empty());
  const auto same = [&] {
    const EncodedText again = encode(text, options);
    return again.tokens == first.tokens && again.vocabulary.words() == first.vocabulary.words();
  };
  const auto inode = [&] {
    struct stat status{};
    return stat(file.c_str(), &status) == 0 ? status.st_ino : 0;
  };
  const auto first_inode = inode();
  EXPECT_TRUE(same());
  EXPECT_EQ(inode(), first_inode);  // it was read, not written again
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x41);
    std::ofstream(file, std::ios::binary) << bad;
    EXPECT_TRUE(same()) << "byte " << i;
    EXPECT_EQ(read(file), good) << "byte " << i;
  }
  for (std::size_t length = 0; length < good.size(); ++length) {
    std::ofstream(file, std::ios::binary) << good.substr(0, length);
    EXPECT_TRUE(same()) << length << " bytes";
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(options.cache), {}), 1);  // no temporary file is left
  EXPECT_NE(cache_file(text, {.limit = 4, .cache = options.cache}), file);
  EXPECT_NE(cache_file(text, {.bytes = true, .limit = 3, .cache = options.cache}), file);
  EXPECT_NE(cache_file({.content = "one two two three three thref"}, options), file);
}

TEST_F(Files, CacheThatCannotBeWrittenOnlyCostsTime) {
  const Text text{.path = "x", .content = "one two", .files = 1};
  write("file", "");
  EXPECT_EQ(encode(text, {.cache = path("file/below")}).tokens, (std::vector<std::int32_t>{1, 2}));
}

TEST_F(Files, CacheIsWrittenByManyAtOnce) {
  const Text text{.path = "x", .content = std::string(10'000, 'a') + " b", .files = 1};
  std::vector<std::thread> threads;
  std::vector<std::vector<std::int32_t>> tokens(8);
  for (auto& t : tokens) threads.emplace_back([&] { t = encode(text, {.cache = path("c")}).tokens; });
  for (std::thread& t : threads) t.join();
  for (const auto& t : tokens) EXPECT_EQ(t, tokens[0]);
}

TEST_F(Files, DataByName) {
  const std::string text = write("t.txt", "a b a c a b");
  const DataOptions words{.path = text, .words = 3, .cache = ""};
  const OpenedData data = open_data(words);
  EXPECT_EQ(data.source->tokens(), 6);
  EXPECT_EQ(data.source->vocabulary(), 3);
  EXPECT_EQ(data.words, (std::vector<std::string>{"<unk>", "a", "b"}));
  EXPECT_TRUE(data.note.empty());
  EXPECT_EQ(open_data({.path = text, .vocabulary = "bytes", .cache = ""}).source->tokens(), 11);
  EXPECT_EQ(open_data({.kind = "synthetic", .words = 9}).source->vocabulary(), 9);
  EXPECT_EQ(message_of([] { open_data({.kind = "texts"}); }),
            "unknown kind of data 'texts': did you mean 'text'? There are auto, text, megatron, synthetic");
  EXPECT_EQ(message_of([&] { open_data({.path = text, .vocabulary = "byte"}); }),
            "unknown vocabulary 'byte': did you mean 'bytes'? There are words, bytes");
  EXPECT_EQ(message_of([] { open_data({.kind = "megatron"}); }),
            "Megatron data needs the path of its .bin and .idx");
  // Without a path: the installed text, or synthetic tokens and a line that says so.
  const OpenedData found = open_data({.cache = ""});
  EXPECT_EQ(found.note.empty(), fs::is_directory(kDefaultText));
  EXPECT_GT(found.source->tokens(), 100'000);
}

template <class T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// Sequences {1 2 3} {} {4 5}, uint16, two documents.
struct Megatron {
  std::string bin, idx;
  Megatron() {
    for (const std::uint16_t id : {1, 2, 3, 4, 5}) put(bin, id);
    idx.assign("MMIDIDX\0\0", 9);
    put<std::uint64_t>(idx, 1);
    put<std::uint8_t>(idx, 8);
    put<std::uint64_t>(idx, 3);
    put<std::uint64_t>(idx, 3);
    for (const std::int32_t length : {3, 0, 2}) put(idx, length);
    for (const std::int64_t place : {0, 6, 6}) put(idx, place);
    for (const std::int64_t document : {0, 1, 3}) put(idx, document);
  }
};

TEST_F(Files, MegatronIsReadAcrossSequences) {
  const Megatron good;
  write("d.bin", good.bin);
  write("d.idx", good.idx);
  const auto source = open_megatron(path("d"));
  EXPECT_EQ(source->tokens(), 5);
  EXPECT_EQ(source->vocabulary(), 6);
  std::vector<std::int64_t> all(5), part(2);
  source->read(0, all);
  EXPECT_EQ(all, (std::vector<std::int64_t>{1, 2, 3, 4, 5}));
  source->read(2, part);
  EXPECT_EQ(part, (std::vector<std::int64_t>{3, 4}));
  const auto small = open_megatron(path("d.bin"), 5);
  EXPECT_EQ(message_of([&] { small->read(0, all); }),
            "Megatron data '" + path("d.bin") + "': token 4 is 5, outside the vocabulary of 5");
}

TEST_F(Files, BadMegatronIsOneSentence) {
  const Megatron good;
  const auto try_it = [&](const std::string& bin, const std::string& idx) {
    write("d.bin", bin);
    write("d.idx", idx);
    return message_of([&] { open_megatron(path("d")); });
  };
  const auto with = [&](std::size_t at, auto value) {
    std::string idx = good.idx;
    std::memcpy(idx.data() + at, &value, sizeof value);
    return idx;
  };
  const std::string index = "Megatron data '" + path("d.idx") + "': ";
  EXPECT_EQ(try_it(good.bin, good.idx), "(no UsageError)");
  EXPECT_EQ(try_it(good.bin, with(0, 'X')), index + "is no Megatron index");
  EXPECT_EQ(try_it(good.bin, ""), index + "is no Megatron index");
  EXPECT_EQ(try_it(good.bin, with(9, std::uint64_t{2})), index + "has version 2, not 1");
  EXPECT_EQ(try_it(good.bin, with(17, std::uint8_t{6})), index + "type 6 is none of token ids");
  EXPECT_THAT(try_it(good.bin, with(18, ~std::uint64_t{0})), ::testing::HasSubstr("is truncated: "));
  EXPECT_THAT(try_it(good.bin, with(26, ~std::uint64_t{0})), ::testing::HasSubstr("is truncated: "));
  EXPECT_THAT(try_it(good.bin, with(34, std::int32_t{-1})), ::testing::HasSubstr("sequence 0 (-1 tokens"));
  EXPECT_THAT(try_it(good.bin, with(46, std::int64_t{5})), ::testing::HasSubstr("lies outside the 10 bytes"));
  EXPECT_THAT(try_it(good.bin, with(46, std::int64_t{-2})),
              ::testing::HasSubstr("lies outside the 10 bytes"));
  EXPECT_THAT(try_it(good.bin.substr(0, 9), good.idx),
              ::testing::HasSubstr("sequence 2 (2 tokens at byte 6)"));
  for (std::size_t length = 0; length < good.idx.size(); ++length) {
    EXPECT_NE(try_it(good.bin, good.idx.substr(0, length)), "(no UsageError)") << length;
  }
  fs::remove(path("d.bin"));
  EXPECT_THAT(message_of([&] { open_megatron(path("d")); }), ::testing::HasSubstr("cannot be opened"));
}

}  // namespace
}  // namespace weft
