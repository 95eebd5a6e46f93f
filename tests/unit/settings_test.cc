// Settings: what is written as config.toml is read back as it was.
#include "settings.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace weft::cli {
namespace {

class SettingsTest : public ::testing::Test {
 protected:
  ~SettingsTest() override { std::filesystem::remove(path_); }
  // What `--config` makes of a file's text.
  std::string read(const std::string& text) {
    std::ofstream(path_) << text;
    CLI::App app;
    Settings settings(app);
    app.set_config("--config");
    app.allow_config_extras(CLI::config_extras_mode::error);
    std::string name;
    settings.add("name", name, "");
    settings.add("count", count_, "");
    settings.add("on", on_, "");
    app.parse(std::vector<std::string>{"--config=" + path_});
    written_ = settings.toml();
    return name;
  }
  std::string path_ =
      (std::filesystem::temp_directory_path() / ("weft-settings-" + std::to_string(getpid()) + ".toml"))
          .string();
  std::int64_t count_ = 0;
  bool on_ = false;
  std::string written_;
};

const std::vector<std::string> kStrings{
    "plain", "with space", "a\"b",       "\"",        "'",       "it's \"both\"", "back\\slash",
    "\\",    "end\\",      "two\nlines", "tab\tcr\r", "# hash",  "a#b",           "a, b",
    "[x]",   "k = v",      "\x01 2\x1f", "\x7f",      "ü π 語",  "%d \\u0041",    "-1",
    "true",  " padded ",   "\n",         "\"\\\"",    "C:\\new", "a;b",           "{}"};

TEST_F(SettingsTest, EveryStringComesBack) {
  for (const std::string& text : kStrings) {
    EXPECT_EQ(read("name = " + toml_string(text) + "\ncount = 7\non = true\n"), text) << toml_string(text);
    EXPECT_EQ(count_, 7);
    EXPECT_TRUE(on_);
    // What is written is what was read.
    const std::string again = written_;
    EXPECT_EQ(read(again), text) << again;
    EXPECT_EQ(written_, again);
  }
}

TEST_F(SettingsTest, WithoutEscapesTheyDoNot) {  // control
  int lost = 0;
  for (const std::string& text : kStrings) {
    try {
      lost += read("name = \"" + text + "\"\n") == text ? 0 : 1;
    } catch (const CLI::ParseError&) {
      ++lost;
    }
  }
  EXPECT_GT(lost, 8);
}

TEST_F(SettingsTest, WhatPeopleWrite) {
  EXPECT_EQ(read("# a comment = \"x\n\n  name='C:\\new'  # why\ncount=3\n"), "C:\\new");
  EXPECT_EQ(count_, 3);
  EXPECT_EQ(read("name = word\n"), "word");
  EXPECT_EQ(read("name = \"\\u00fc\\U0001F600\"\r\n"), "ü😀");
  EXPECT_EQ(read("name = \"\"\ncount = 4 # \"four\"\n"), "");
  EXPECT_EQ(count_, 4);
}

TEST_F(SettingsTest, WhatIsNoStringIsRefused) {
  for (const char* bad : {"name = \"open", "name = \"a\" b", "name = \"\\q\"", "name = \"\\u12\"",
                          "name = 'open", "name = \"\\ud800\"", "name = \"\\U00110000\"", "name = \"end\\"}) {
    EXPECT_THROW(read(bad), CLI::ParseError) << bad;
  }
}

}  // namespace
}  // namespace weft::cli
