// Flags that are also keys of a config file: registered once, read by CLI11 from either, and written back as
// the configuration that was in effect.
#pragma once

#include <CLI/CLI.hpp>
#include <array>
#include <charconv>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "config_text.h"

namespace weft::cli {

// Parses; help is printed before CLI::CallForHelp goes on to whoever ends the program.
inline void parse_flags(CLI::App& app, const std::vector<std::string>& arguments) {
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());  // as CLI11 wants them
  try {
    app.parse(reversed);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    throw;
  }
}

class Settings {
 public:
  explicit Settings(CLI::App& app) : app_(app) { app_.config_formatter(std::make_shared<TomlConfig>()); }
  void group(std::string name) { group_ = std::move(name); }

  // REQUIRES: `value` outlives this. An empty optional or text is not written.
  template <class T>
  CLI::Option* add(const std::string& name, T& value, const std::string& help) {
    rows_.push_back({name, [&value] { return text(value); }});
    CLI::Option* option = nullptr;
    if constexpr (std::is_same_v<T, bool>)
      option = app_.add_flag("--" + name, value, help);
    else
      option = app_.add_option("--" + name, value, help);
    if constexpr (std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) option->capture_default_str();
    return option->group(group_);
  }

  // One that is set and told by texts; `text` as TOML has it.
  CLI::Option* add(const std::string& name, std::function<void(const std::string&)> set,
                   std::function<std::string()> text, const std::string& help) {
    rows_.push_back({name, std::move(text)});
    return app_.add_option_function<std::string>("--" + name, std::move(set), help)->group(group_);
  }

  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const Row& row : rows_) out.push_back(row.name);
    return out;
  }

  // As TOML, one line a setting. The environment (WEFT_TOKEN) is not among them.
  std::string toml() const {
    std::string out;
    for (const Row& row : rows_) {
      const std::string value = row.value();
      if (!value.empty()) out += row.name + " = " + value + "\n";
    }
    return out;
  }

 private:
  struct Row {
    std::string name;
    std::function<std::string()> value;
  };
  template <class T>
  static std::string text(const T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      return value ? "true" : "false";
    } else if constexpr (std::is_same_v<T, std::string>) {
      return value.empty() ? "" : toml_string(value);
    } else if constexpr (std::is_arithmetic_v<T>) {
      std::array<char, 64> digits{};
      return {digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr};
    } else {
      return value ? text(*value) : "";
    }
  }

  CLI::App& app_;
  std::string group_;
  std::vector<Row> rows_;
};

}  // namespace weft::cli
