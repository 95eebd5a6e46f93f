// Shapes of the models: that they hold together, what they cost, and what the presets of the paper amount to.
#include "workload/model_shapes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <tuple>

#include "message_of.h"
#include "workload/train_options.h"

namespace weft {
namespace {

using testing::message_of;

ModelShape tiny(std::string_view model) { return model_shape(model, model_options(model, "tiny")); }

int place_of(const ModelShape& shape, const std::string& parameter) {
  const auto found = std::ranges::find(shape.parameters, parameter, &ParameterShape::name);
  EXPECT_NE(found, shape.parameters.end()) << parameter;
  return static_cast<int>(found - shape.parameters.begin());
}

TEST(ModelShapes, HoldTogether) {
  for (const std::string_view model : model_names()) {
    for (const std::string_view preset : model_presets()) {
      if (model == "gpt" && preset == "paper") continue;
      const ModelOptions options = model_options(model, preset);
      const ModelShape shape = model_shape(model, options);
      EXPECT_NO_THROW(shape.check()) << model << " " << preset;
      EXPECT_EQ(shape.model, model);
      EXPECT_GT(shape.flops_per_token(), 0);
      std::set<std::string> blocks;
      for (const BlockShape& block : shape.blocks) EXPECT_TRUE(blocks.insert(block.name).second);
      for (const ParameterShape& p : shape.parameters) {
        if (!p.table) continue;
        EXPECT_EQ(p.rows(), options.vocabulary) << p.name;
      }
    }
  }
}

TEST(ModelShapes, DefaultsHaveAboutTwentyMillionParameters) {
  for (const std::string_view model : model_names()) {
    const auto elements = static_cast<double>(model_shape(model, model_options(model)).num_elements());
    EXPECT_NEAR(elements, 20e6, 2.5e6) << model;
  }
}

// The encoder's blocks are computed before the decoder's table is read: its rows have that much time.
TEST(ModelShapes, DecodersTableIsUsedBehindTheEncoder) {
  for (const char* model : {"gnmt", "transformer"}) {
    ModelShape shape = tiny(model);
    const int table = place_of(shape, "decoder.embedding.weight");
    EXPECT_EQ(shape.block_of(place_of(shape, "encoder.embedding.weight")), 0);
    EXPECT_EQ(shape.block_of(table), model_options(model, "tiny").layers + 1);
    for (int p = 0; p < table; ++p)
      EXPECT_TRUE(shape.parameters[static_cast<std::size_t>(p)].name.starts_with("encoder."));
    EXPECT_FALSE(shape.parameters.back().table);  // the projection has a matrix of its own
    EXPECT_EQ(shape.blocks.back().name, "projection");
    // Controls: the table's block moved to the front, and a decoder before what it attends to.
    const auto at = shape.blocks.begin() + shape.block_of(table);
    ModelShape early = shape;
    std::rotate(early.blocks.begin(), early.blocks.begin() + (at - shape.blocks.begin()),
                early.blocks.begin() + (at - shape.blocks.begin()) + 1);
    EXPECT_NE(message_of([&] { early.check(); }).find("in order of use"), std::string::npos);
    (at - 1)->parts.back().gives = {"nothing"};  // what the encoder gives
    EXPECT_NE(message_of([&] { shape.check(); }).find("which no part before it gives"), std::string::npos);
  }
}

// A product with a matrix takes two operations for each of its elements; attention takes products of a token's
// query and of its weights with as many keys and values as it sees, two operations for each element of them.
// A head with a matrix of its own: the embedding is a table then, and as many FLOPs are computed.
TEST(ModelShapes, UntiedHeadsHaveTheirOwnMatrix) {
  for (const char* model : {"gpt", "gpt-moe"}) {
    ModelOptions o = model_options(model, "tiny");
    const ModelShape tied = model_shape(model, o);
    o.untied = true;
    const ModelShape untied = model_shape(model, o);
    EXPECT_NO_THROW(untied.check());
    EXPECT_TRUE(tied.parameters.front().tied && !tied.parameters.front().table);
    EXPECT_TRUE(!untied.parameters.front().tied && untied.parameters.front().table);
    EXPECT_EQ(untied.parameters.back().name, "head.weight");
    EXPECT_EQ(untied.num_elements(), tied.num_elements() + o.vocabulary * o.width);
    EXPECT_EQ(untied.flops_per_token(), tied.flops_per_token());
  }
  ModelOptions bert = model_options("bert", "tiny");
  bert.untied = true;
  EXPECT_EQ(message_of([&] { check_model("bert", bert); }),
            "model bert: its output has a matrix of its own, untied is of gpt and gpt-moe");
}

TEST(ModelShapes, FlopsAreThoseOfTheProducts) {
  for (const char* model : {"gpt", "gnmt", "transformer", "bert"}) {
    const std::string name = model;
    const ModelOptions o = model_options(name, "tiny");
    const ModelShape shape = tiny(name);
    double products = 0;
    for (const ParameterShape& p : shape.parameters) {
      const bool looked_up = p.table || p.name.ends_with("position.weight");
      if (p.dims.size() == 2 && !looked_up) products += 2 * static_cast<double>(p.count());
    }
    const double all = 4 * static_cast<double>(o.context * o.width), half = all / 2;
    const double attention = name == "gnmt"          ? all
                             : name == "gpt"         ? o.layers * half
                             : name == "transformer" ? o.layers * (all + half + all)
                                                     : o.layers * all;
    EXPECT_DOUBLE_EQ(shape.flops_per_token(), products + attention) << name;
  }
}

struct Published {
  const char* model;
  double model_mib, table_mib;
  double off_mib;  // by which the whole model differs, and why
};

// The sizes in MiB of EmbRace's table of models (float32), and its shares of the tables.
//   lm            two layers with the projection inside, 12 MiB less than theirs (one layer that is projected
//                 behind it would have as many). The output's bias is a column of its table: 3 MiB more of tables
//   gnmt          eight LSTMs are four on either side, the first one in both directions
//   transformer   the projection has a bias, and norms stand before the layers
//   bert          theirs has a pooled output and segments
TEST(ModelShapes, PresetsOfThePaperHaveItsTables) {
  constexpr double kMiB = 4.0 / (1 << 20);
  for (const Published& known :
       {Published{"lm", 3186.5, 3099.5, 13}, Published{"gnmt", 739.1, 252.5, 0.2},
        Published{"transformer", 1067.5, 263.4, 0.6}, Published{"bert", 417.7, 89.4, 2.5}}) {
    const auto share_of = [&](const ModelOptions& options) {
      const ModelShape shape = model_shape(known.model, options);
      double tables = 0;
      for (const ParameterShape& p : shape.parameters)
        tables += p.table ? static_cast<double>(p.count()) * kMiB : 0;
      return std::pair(tables, static_cast<double>(shape.num_elements()) * kMiB);
    };
    ModelOptions options = model_options(known.model, "paper");
    const auto [tables, whole] = share_of(options);
    const double column = std::string(known.model) == "lm" ? 793'471 * kMiB : 0;
    EXPECT_NEAR(tables - column, known.table_mib, 0.06) << known.model;
    EXPECT_NEAR(whole, known.model_mib, known.off_mib) << known.model;
    EXPECT_NEAR(100 * tables / whole, 100 * known.table_mib / known.model_mib, 1) << known.model;
    options.layers *= 2;  // control
    const auto [same, larger] = share_of(options);
    EXPECT_LT(100 * same / larger, 100 * known.table_mib / known.model_mib - 1) << known.model;
  }
}

// Lina's table of models: Transformer-XL with experts in all layers, in millions of parameters. Words are none of
// theirs: they train on characters.
TEST(ModelShapes, PresetOfExpertsHasThePapersParameters) {
  const auto millions = [](int layers, int experts) {
    ModelOptions o = model_options("gpt-moe", "paper");
    EXPECT_EQ(o.layers, 24);
    o.layers = layers;
    o.experts.count = experts;
    const ModelShape shape = model_shape("gpt-moe", o);
    return static_cast<double>(shape.num_elements() - shape.parameters.front().count()) / 1e6;
  };
  for (const auto& [layers, experts, published] :
       {std::tuple{12, 4, 117.0}, {24, 4, 233.0}, {36, 4, 349.0}, {12, 16, 419.0}, {24, 16, 838.0}})
    EXPECT_NEAR(millions(layers, experts), published, 0.03 * published) << layers << " " << experts;
  EXPECT_GT(millions(24, 8), 1.5 * 233);  // control
}

// An encoder and a decoder with experts in every second layer of either; a decoder's stand behind the attention
// over what the encoder gave.
TEST(ModelShapes, EncoderAndDecoderHaveExperts) {
  ModelOptions o = model_options("bert2gpt2-moe", "tiny");
  o.layers = 4;
  const ModelShape shape = model_shape("bert2gpt2-moe", o);
  std::vector<std::string> names;
  for (const ExpertShape& layer : shape.experts) {
    names.push_back(layer.name);
    const BlockShape& block = shape.blocks[static_cast<std::size_t>(layer.block)];
    EXPECT_EQ(layer.merge() + 1, static_cast<int>(block.parts.size())) << "they end their block";
    EXPECT_EQ(layer.gate, block.name.starts_with("decoder") ? 2 : 1);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"encoder.1.experts", "encoder.3.experts", "decoder.1.experts",
                                             "decoder.3.experts"}));
  EXPECT_EQ(shape.block_of(place_of(shape, "encoder.norm.weight")), 5);  // a block of its own
  EXPECT_EQ(shape.block_of(place_of(shape, "decoder.embedding.weight")), 6);
  // As many FLOPs as the transformer's, but for experts: of each token's choices, and the gate's.
  ModelOptions plain = model_options("transformer", "tiny");
  plain.layers = 4;
  const auto width = static_cast<double>(o.width);
  const double more = 4 * ((o.experts.choices - 1) * 16 * width * width + 2 * width * o.experts.count);
  EXPECT_DOUBLE_EQ(shape.flops_per_token(), model_shape("transformer", plain).flops_per_token() + more);
  ModelOptions none = o;
  none.experts.every = 5;
  EXPECT_TRUE(model_shape("bert2gpt2-moe", none).experts.empty());  // control
  EXPECT_TRUE(has_experts("bert2gpt2-moe"));
  EXPECT_TRUE(has_experts("gpt-moe"));
  EXPECT_FALSE(has_experts("transformer"));
}

TEST(ModelShapes, SayWhatTheyAreTrainedOn) {
  EXPECT_EQ(batch_kind_of("gpt"), BatchKind::tokens);
  EXPECT_EQ(batch_kind_of("lm"), BatchKind::tokens);
  EXPECT_EQ(batch_kind_of("gnmt"), BatchKind::pairs);
  EXPECT_EQ(batch_kind_of("transformer"), BatchKind::pairs);
  EXPECT_EQ(batch_kind_of("bert"), BatchKind::spans);
  EXPECT_EQ(batch_kind_of("bert2gpt2-moe"), BatchKind::pairs);
  EXPECT_EQ(message_of([] { batch_kind_of("brt"); }),
            "unknown model 'brt': did you mean 'bert'? There are gpt, gpt-moe, lm, gnmt, transformer, bert, "
            "bert2gpt2-moe");
}

TEST(ModelShapes, RefuseWhatTheyCannotBe) {
  const auto refusal = [](std::string_view model, const std::function<void(ModelOptions&)>& spoil) {
    ModelOptions options = model_options(model, "tiny");
    spoil(options);
    return message_of([&] { check_model(model, options); });
  };
  EXPECT_EQ(refusal("gnmt", [](ModelOptions& o) { o.layers = 1; }),
            "model gnmt: layers must be 2 to 1000, not 1");
  EXPECT_EQ(refusal("bert", [](ModelOptions& o) { o.context = 3; }),
            "model bert: context must be 4 to 2^20 tokens, not 3");
  EXPECT_EQ(refusal("transformer", [](ModelOptions& o) { o.heads = 5; }),
            "model transformer: width 32 must be a multiple of heads, not 5");
  EXPECT_EQ(refusal("gnmt", [](ModelOptions& o) { o.samples = 5; }),
            "model gnmt: samples are of lm's softmax");
  EXPECT_EQ(refusal("bert", [](ModelOptions&) {}), "(no UsageError)");
  EXPECT_EQ(message_of([] { model_options("gpt", "paper"); }),
            "unknown preset of a model 'paper'. There are default, tiny");
}

// Ranks compare what they train: also heads, of which no tensor tells, and layers, of which a stage's do not.
TEST(TrainOptions, RanksCompareEverySizeOfTheModel) {
  const auto hash_with = [](const std::function<void(ModelOptions&)>& change) {
    TrainOptions options;
    change(options.sizes);
    return hash_of(options);
  };
  const std::uint64_t same = hash_with([](ModelOptions&) {});
  for (std::int64_t ModelOptions::* size :
       {&ModelOptions::vocabulary, &ModelOptions::context, &ModelOptions::width, &ModelOptions::hidden,
        &ModelOptions::projection, &ModelOptions::samples})
    EXPECT_NE(hash_with([size](ModelOptions& o) { o.*size += 1; }), same);
  for (int ModelOptions::* size : {&ModelOptions::layers, &ModelOptions::heads})
    EXPECT_NE(hash_with([size](ModelOptions& o) { o.*size += 1; }), same);
  // Control: what affects speed only is not compared, nor whose stage it is.
  EXPECT_EQ(hash_with([](ModelOptions& o) { o.sparse_gradients = true; }), same);
  EXPECT_EQ(hash_with([](ModelOptions& o) { o.stage.stage = 1; }), same);
}

}  // namespace
}  // namespace weft
