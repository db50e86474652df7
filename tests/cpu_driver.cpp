// Do the functions of kernels/cpu compute what double precision does, on every instruction set?
//
// A program of its own, so that it can be built with sanitizers and run under an emulator:
//   c++ -std=c++17 -O3 -I kernels/cpu tests/cpu_driver.cpp kernels/cpu/*.cpp && ./a.out [name]
// With a name, that instruction set must be there. Inputs are random, every array is a heap block
// of exactly the size that it may be read or written in. Prints a line per instruction set; the
// exit code is 1 if anything differs. Run by tests/test_cpu_driver.py.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "linear.h"
#include "numbers.h"

extern "C" {
const char* bonsai_choose_isa(const char* name);
void bonsai_unpack(const Layer*, int64_t, int64_t, int64_t, int64_t, int32_t, int32_t, void*,
                   int64_t, int32_t);
void bonsai_one_hot(const Layer*, int64_t, int64_t, int64_t, int64_t, int32_t, void*, int64_t,
                    int32_t);
int64_t bonsai_few_workspace(const Layer*, int64_t, int32_t, int32_t);
void bonsai_linear_few(const Layer*, int32_t, const void*, int64_t, void*, int64_t, int64_t, void*,
                       int32_t);
void bonsai_codeword_products(const Layer*, int32_t, const void*, int64_t, int64_t, void*, int64_t,
                              int32_t);
void bonsai_codeword_gradient(const Layer*, int32_t, const void*, int64_t, const void*, int64_t,
                              int64_t, float*, int32_t);
}

namespace {

std::mt19937_64 generator(1);
int failures = 0;

double uniform() { return std::uniform_real_distribution<double>(-1.0, 1.0)(generator); }
int below(int n) { return int(generator() % uint64_t(n)); }

void expect(bool is_true, const std::string& what) {
  if (is_true) return;
  if (++failures <= 10) std::printf("differs: %s\n", what.c_str());
}

// |one - other| / |size|, in the root of the mean square
struct Ratio {
  double error = 0, size = 0;
  void add(double one, double other, double magnitude) {
    error += (one - other) * (one - other);
    size += magnitude * magnitude;
  }
  bool is_below(double bound) const { return error <= bound * bound * size; }
};

double limit(Dtype dtype) { return dtype == kFloat32 ? 2e-6 : 1e-2; }

// Activations or results in one of the three dtypes.
struct Numbers {
  Dtype dtype;
  std::vector<uint8_t> bytes;
  Numbers(Dtype dtype_, int64_t count) : dtype(dtype_), bytes(size_t(count) * size_of(dtype_)) {}
  void* data() { return bytes.data(); }
  int64_t count() const { return int64_t(bytes.size() / size_of(dtype)); }
  double at(int64_t i) const { return load_as_float(dtype, bytes.data(), i); }
  void fill() {
    for (int64_t i = 0; i < count(); ++i) store_as(dtype, bytes.data(), i, float(uniform()));
  }
};

struct Weight {
  std::vector<uint8_t> ternary, codes;
  std::vector<uint16_t> scale;
  std::vector<float> codewords;
  std::vector<double> dense, signs;  // S*T + R, S*T
  std::vector<int> chosen;
  Layer layer = {};

  Weight(int64_t out, int64_t width, Packing packing, bool is_per_row, int dim, int k) {
    const int64_t groups = ceil_div(width, kGroup), per_byte = packing == kBase3 ? 5 : 4;
    layer.out_features = out;
    layer.in_features = width;
    layer.packing = packing;
    layer.ternary_stride = ceil_div(width, per_byte);
    layer.scale_stride = is_per_row ? 1 : groups;
    for (int64_t i = 0; i < out * layer.scale_stride; ++i) {
      scale.push_back(float_to_f16(float(uniform() + 1.2)));
    }
    for (int64_t o = 0; o < out; ++o) {
      for (int64_t byte = 0; byte < layer.ternary_stride; ++byte) {
        unsigned value = 0, unit = 1;
        for (int64_t j = byte * per_byte; j < (byte + 1) * per_byte; ++j) {
          const unsigned code = j < width ? unsigned(below(3)) : 1;
          value += unit * code;
          unit *= packing == kBase3 ? 3 : 4;
          if (j >= width) continue;
          const double s = f16_to_float(
              scale[size_t(o * layer.scale_stride + (is_per_row ? 0 : j / kGroup))]);
          signs.push_back(s * (double(code) - 1));
        }
        ternary.push_back(uint8_t(value));
      }
    }
    dense = signs;
    if (k) add_residual(out, width, groups, dim, k);
    layer.ternary = ternary.data();
    layer.scale = scale.data();
  }

  void add_residual(int64_t out, int64_t width, int64_t groups, int dim, int k) {
    int bits = 1;
    while ((1 << bits) < k) bits *= 2;
    for (int64_t i = 0; i < groups * k * dim; ++i) codewords.push_back(float(uniform()));
    const int64_t subvectors = ceil_div(width, dim);
    layer.codes_stride = ceil_div(subvectors * bits, 8);
    codes.assign(size_t(out * layer.codes_stride), 0);
    for (int64_t o = 0; o < out; ++o) {
      for (int64_t s = 0; s < subvectors; ++s) {
        const int code = below(k);
        chosen.push_back(code);
        const int64_t bit = s * bits;
        codes[size_t(o * layer.codes_stride + bit / 8)] |= uint8_t(code << (bit % 8));
        for (int64_t j = s * dim; j < (s + 1) * dim && j < width; ++j) {
          dense[size_t(o * width + j)] += word(dim, k, s, code, j - s * dim);
        }
      }
    }
    layer.codes = codes.data();
    layer.codewords = codewords.data();
    layer.code_bits = bits;
    layer.codewords_k = k;
    layer.codewords_dim = dim;
  }

  double word(int dim, int k, int64_t s, int code, int64_t j) const {
    const int64_t group = s / (kGroup / dim);
    return codewords[size_t((group * k + code) * dim + j)];
  }
};

std::string name_of(const char* what, const Weight& weight, Dtype dtype, int64_t tokens) {
  const Layer& layer = weight.layer;
  char text[160];
  std::snprintf(text, sizeof text, "%s out=%d in=%d packing=%d scales=%d d=%d K=%d dtype=%d M=%d",
                what, int(layer.out_features), int(layer.in_features), int(layer.packing),
                int(layer.scale_stride), int(layer.codewords_dim), int(layer.codewords_k),
                int(dtype), int(tokens));
  return text;
}

void check_unpack(const Weight& weight, Dtype dtype, int threads) {
  const Layer& layer = weight.layer;
  const int64_t out = layer.out_features, width = layer.in_features;
  for (int with_residual = 0; with_residual <= (layer.codes ? 1 : 0); ++with_residual) {
    for (int64_t begin = 0; begin < width; begin += 3 * kGroup) {
      const int64_t end = begin + 3 * kGroup + 40 < width ? begin + 3 * kGroup + 40 : width;
      const int64_t first = out / 3, ld = end - begin + below(3);
      // the last row ends with its last column
      Numbers block(dtype, (out - first - 1) * ld + end - begin);
      bonsai_unpack(&layer, first, out, begin, end, with_residual, dtype, block.data(), ld,
                    threads);
      bool is_same = true;
      for (int64_t o = first; o < out; ++o) {
        for (int64_t j = begin; j < end; ++j) {
          const double got = block.at((o - first) * ld + j - begin);
          const double exact = (with_residual ? weight.dense : weight.signs)[size_t(o * width + j)];
          Numbers rounded(dtype, 1);
          store_as(dtype, rounded.data(), 0, float(exact));
          // the sum in float32 may be rounded twice
          const double room =
              with_residual ? std::fabs(exact) * (dtype == kFloat32 ? 1e-6 : 8e-3) + 1e-7 : 0;
          is_same = is_same && std::fabs(got - rounded.at(0)) <= room;
        }
      }
      expect(is_same, name_of("unpack", weight, dtype, 0));
    }
  }
}

void check_one_hot(const Weight& weight, Dtype dtype, int threads) {
  const Layer& layer = weight.layer;
  const int64_t subvectors = num_subvectors(layer), k = layer.codewords_k;
  const int64_t first = subvectors / 3, count = subvectors - first;
  Numbers block(dtype, layer.out_features * count * k);
  block.fill();
  bonsai_one_hot(&layer, 0, layer.out_features, first, subvectors, dtype, block.data(), count * k,
                 threads);
  bool is_same = true;
  for (int64_t o = 0; o < layer.out_features; ++o) {
    for (int64_t s = 0; s < count; ++s) {
      for (int64_t i = 0; i < k; ++i) {
        const bool is_one = weight.chosen[size_t(o * subvectors + first + s)] == i;
        is_same = is_same && block.at((o * count + s) * k + i) == (is_one ? 1.0 : 0.0);
      }
    }
  }
  expect(is_same, name_of("one_hot", weight, dtype, 0));
}

void check_few(const Weight& weight, Dtype dtype, int64_t tokens, int threads) {
  const Layer& layer = weight.layer;
  const int64_t width = layer.in_features, out = layer.out_features;
  const int64_t stride = width + below(3);
  Numbers x(dtype, (tokens - 1) * stride + width), y(dtype, tokens * out);
  x.fill();
  y.fill();
  std::vector<uint8_t> workspace(size_t(bonsai_few_workspace(&layer, tokens, dtype, threads)));
  bonsai_linear_few(&layer, dtype, x.data(), stride, y.data(), out, tokens, workspace.data(),
                    threads);
  Ratio ratio;
  for (int64_t m = 0; m < tokens; ++m) {
    for (int64_t o = 0; o < out; ++o) {
      double exact = 0, terms = 0;
      for (int64_t j = 0; j < width; ++j) {
        const double term = x.at(m * stride + j) * weight.dense[size_t(o * width + j)];
        exact += term;
        terms += term * term;
      }
      ratio.add(y.at(m * out + o), exact, std::sqrt(terms));
    }
  }
  expect(ratio.is_below(limit(dtype)), name_of("linear_few", weight, dtype, tokens));
  Numbers again(dtype, tokens * out);
  bonsai_linear_few(&layer, dtype, x.data(), stride, again.data(), out, tokens, workspace.data(),
                    1);
  expect(again.bytes == y.bytes, name_of("threads", weight, dtype, tokens));
}

void check_residual(const Weight& weight, Dtype dtype, int64_t tokens, int threads) {
  const Layer& layer = weight.layer;
  const int64_t width = layer.in_features, k = layer.codewords_k, dim = layer.codewords_dim;
  const int64_t subvectors = num_subvectors(layer), groups = num_groups(layer);
  Numbers x(dtype, tokens * width), p(dtype, tokens * subvectors * k);
  x.fill();
  bonsai_codeword_products(&layer, dtype, x.data(), width, tokens, p.data(), subvectors * k,
                           threads);
  Ratio products, gradients;
  std::vector<double> exact(size_t(groups * k * dim), 0), sizes(exact);
  for (int64_t m = 0; m < tokens; ++m) {
    for (int64_t s = 0; s < subvectors; ++s) {
      for (int64_t i = 0; i < k; ++i) {
        double sum = 0, terms = 0;
        const double d = p.at(m * subvectors * k + s * k + i);
        for (int64_t j = 0; j < dim && s * dim + j < width; ++j) {
          const double value = x.at(m * width + s * dim + j);
          const double term = value * weight.word(int(dim), int(k), s, int(i), j);
          sum += term;
          terms += term * term;
          const size_t at = size_t((s / (kGroup / dim) * k + i) * dim + j);
          exact[at] += d * value;
          sizes[at] += d * value * d * value;
        }
        products.add(d, sum, std::sqrt(terms));
      }
    }
  }
  expect(products.is_below(limit(dtype)), name_of("products", weight, dtype, tokens));
  std::vector<float> gradient(exact.size(), NAN);
  bonsai_codeword_gradient(&layer, dtype, p.data(), subvectors * k, x.data(), width, tokens,
                           gradient.data(), threads);
  for (size_t i = 0; i < exact.size(); ++i) {
    gradients.add(gradient[i], exact[i], std::sqrt(sizes[i]));
  }
  expect(gradients.is_below(2e-6), name_of("gradient", weight, dtype, tokens));
}

// What is not finite reaches its token's results, and large and tiny numbers do not break them.
void check_extremes(const Weight& weight, Dtype dtype) {
  const Layer& layer = weight.layer;
  const int64_t width = layer.in_features, out = layer.out_features, tokens = 3;
  const double specials[] = {NAN, INFINITY, -INFINITY, 1e4, 1e-38, 0.0};
  for (double special : specials) {
    Numbers x(dtype, tokens * width), y(dtype, tokens * out);
    x.fill();
    store_as(dtype, x.data(), width + below(int(width)), float(special));
    std::vector<uint8_t> workspace(size_t(bonsai_few_workspace(&layer, tokens, dtype, 1)));
    bonsai_linear_few(&layer, dtype, x.data(), width, y.data(), out, tokens, workspace.data(), 1);
    bool is_right = true;
    for (int64_t m = 0; m < tokens; ++m) {
      for (int64_t o = 0; o < out; ++o) {
        const bool is_finite = std::isfinite(y.at(m * out + o));
        is_right = is_right && is_finite == (m != 1 || std::isfinite(special));
      }
    }
    expect(is_right, name_of("extremes", weight, dtype, tokens));
  }
}

void check_isa() {
  const int64_t widths[] = {1, 3, 4, 15, 16, 17, 33, 64, 127, 128, 130, 200, 255, 257, 576, 1030};
  const int residuals[][2] = {{128, 4}, {64, 4}, {32, 16}, {8, 256}, {16, 2}, {128, 200}, {0, 0}};
  int turn = 0;
  for (int64_t width : widths) {
    for (const auto& residual : residuals) {
      for (Packing packing : {kTwoBit, kBase3}) {
        // each width meets each residual and packing; the rest takes turns
        const int64_t outs[] = {1, 5, 24, 7}, counts[] = {1, 2, 3, 17, 6};
        const int64_t out = outs[turn % 4], tokens = counts[turn % 5];
        const int threads = 1 + turn % 3;
        Weight weight(out, width, packing, turn % 7 < 3, residual[0], residual[1]);
        const Dtype dtype = Dtype(turn++ % 3);
        check_unpack(weight, dtype, threads);
        check_few(weight, dtype, tokens, threads);
        check_extremes(weight, dtype);
        if (!residual[1]) continue;
        check_one_hot(weight, dtype, threads);
        check_residual(weight, dtype, tokens, threads);
      }
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  const std::string wanted = count > 1 ? arguments[1] : "";
  bool is_found = wanted.empty();
  for (const char* name : {"scalar", "avx2", "avx512", "neon"}) {
    if (!bonsai_choose_isa(name)) continue;
    is_found = is_found || wanted == name;
    const int before = failures;
    check_isa();
    std::printf("%s: %s\n", name, failures == before ? "right" : "wrong");
  }
  if (!is_found) std::printf("there is no %s here\n", wanted.c_str());
  return failures == 0 && is_found ? 0 : 1;
}
