// y = x (S*T + R)^T on packed weights: what bonsai_ft/ops/cpu_kernels.py calls.
//
//   bonsai_unpack      a block of W = S*T (+ R) as float32, bfloat16 or float16, for a library GEMM
//   bonsai_one_hot     a block of Z = one_hot(codes), likewise
//   bonsai_linear_few  y for few tokens, without ever writing a weight:
//                      y[m, o] = sum_j S T x + sum_s P[m, s, code[o, s]],   P = x_s C_s^T
//
// Memory belongs to the caller. Every function runs on the given number of OpenMP threads (on one
// without OpenMP) and gives the same bits whatever that number is: a row is one thread's work.
// Tested by tests/test_cpu_kernels.py against float64, for every instruction set.
#include "linear.h"

#include <cstring>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "numbers.h"

namespace {

const Isa* chosen_isa = nullptr;

// base-3 byte -> five 2-bit codes
struct Base3Table {
  uint16_t codes[256];
  Base3Table() {
    for (int byte = 0; byte < 256; ++byte) {
      int rest = byte;
      unsigned bits = 0;
      for (int i = 0; i < 5; ++i) {
        bits |= unsigned(rest % 3) << (2 * i);
        rest /= 3;
      }
      codes[byte] = uint16_t(bits);
    }
  }
};

const Base3Table base3_table;

// Columns begin..end of a base-3 row as 2-bit codes from bit 0 on; begin is a multiple of 4.
// dst holds ceil((end - begin) / 4) bytes and 16 more.
void base3_to_two_bit(const uint8_t* row, int64_t begin, int64_t end, uint8_t* dst) {
  int64_t byte = begin / 5;
  int64_t last = (end + 4) / 5;
  uint64_t bits = base3_table.codes[row[byte++]] >> (2 * (begin % 5));
  int filled = int(10 - 2 * (begin % 5));
  for (; byte + 4 <= last; byte += 4) {
    uint64_t four = uint64_t(base3_table.codes[row[byte]]) |
                    uint64_t(base3_table.codes[row[byte + 1]]) << 10 |
                    uint64_t(base3_table.codes[row[byte + 2]]) << 20 |
                    uint64_t(base3_table.codes[row[byte + 3]]) << 30;
    bits |= four << filled;
    std::memcpy(dst, &bits, 8);
    dst += 5;
    bits >>= 40;
  }
  while (filled > 0 || byte < last) {
    if (filled < 8 && byte < last) {
      bits |= uint64_t(base3_table.codes[row[byte++]]) << filled;
      filled += 10;
    } else {
      *dst++ = uint8_t(bits);
      bits >>= 8;
      filled -= 8;
    }
  }
}

inline unsigned code_of(const uint8_t* codes, int64_t s, int bits) {
  if (bits == 8) return codes[s];
  int64_t bit = s * bits;
  return (codes[bit >> 3] >> (bit & 7)) & ((1u << bits) - 1);
}

inline const float* codeword(const Layer& layer, int64_t s, unsigned code) {
  int64_t per_group = kGroup / layer.codewords_dim;
  return layer.codewords +
         ((s / per_group) * layer.codewords_k + code) * int64_t(layer.codewords_dim);
}

inline const uint16_t* scales_of(const Layer& layer, int64_t row, int64_t group) {
  return layer.scale + row * layer.scale_stride + (layer.scale_stride == 1 ? 0 : group);
}

// With one group per row both readings of a stride of 1 agree.
inline int64_t scale_step(const Layer& layer) { return layer.scale_stride == 1 ? 0 : 1; }

// Columns of a row that pass through buffers on the stack; a multiple of the group.
constexpr int64_t kStrip = 4096;

// begin is a multiple of the group; with base 3 or a residual at most kStrip columns
void unpack_strip(const Isa& isa, const Layer& layer, int64_t row, int64_t begin, int64_t end,
                  bool with_residual, Dtype dtype, void* dst) {
  uint8_t codes[kStrip / 4 + 16];
  float values[kStrip];
  const uint8_t* bytes = layer.ternary + row * layer.ternary_stride;
  if (layer.packing == kBase3) {
    base3_to_two_bit(bytes, begin, end, codes);
    bytes = codes;
  } else {
    bytes += begin / 4;
  }
  const uint16_t* scale = scales_of(layer, row, begin / kGroup);
  int64_t columns = end - begin;
  if (!with_residual) {
    isa.unpack(bytes, scale, scale_step(layer), columns, dtype, dst);
    return;
  }
  // summed in float32 and rounded once
  isa.unpack(bytes, scale, scale_step(layer), columns, kFloat32, values);
  int64_t dim = layer.codewords_dim;
  for (int64_t s = begin / dim; s * dim < end; ++s) {
    unsigned code = code_of(layer.codes + row * layer.codes_stride, s, layer.code_bits);
    const float* word = codeword(layer, s, code);
    int64_t here = s * dim - begin;
    int64_t length = columns - here < dim ? columns - here : dim;
    for (int64_t j = 0; j < length; ++j) values[here + j] += word[j];
  }
  for (int64_t j = 0; j < columns; ++j) store_as(dtype, dst, j, values[j]);
}

}  // namespace

const Isa& current_isa() { return chosen_isa ? *chosen_isa : *bonsai_isa_scalar(); }

extern "C" {

// "auto" takes the best there is; null if the name is not available here.
const char* bonsai_choose_isa(const char* name) {
  const Isa* known[] = {bonsai_isa_avx512(), bonsai_isa_avx2(), bonsai_isa_neon(),
                        bonsai_isa_scalar()};
  for (const Isa* isa : known) {
    if (isa && (std::strcmp(name, "auto") == 0 || std::strcmp(name, isa->name) == 0)) {
      chosen_isa = isa;
      return isa->name;
    }
  }
  return nullptr;
}

int bonsai_has_threads() {
#ifdef _OPENMP
  return 1;
#else
  return 0;
#endif
}

// dst[(r - row_begin) * ld + (c - column_begin)] for rows and columns of the block; column_begin is
// a multiple of 128.
void bonsai_unpack(const Layer* layer, int64_t row_begin, int64_t row_end, int64_t column_begin,
                   int64_t column_end, int32_t with_residual, int32_t dtype, void* dst, int64_t ld,
                   int32_t threads) {
  const Isa& isa = current_isa();
  const size_t element = size_of(Dtype(dtype));
  const bool is_direct = layer->packing == kTwoBit && !with_residual;
  const int64_t strip = is_direct ? column_end - column_begin : kStrip;
  (void)threads;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = row_begin; row < row_end; ++row) {
    char* out = static_cast<char*>(dst) + size_t((row - row_begin) * ld) * element;
    for (int64_t begin = column_begin; begin < column_end; begin += strip) {
      const int64_t end = column_end - begin < strip ? column_end : begin + strip;
      unpack_strip(isa, *layer, row, begin, end, with_residual != 0, Dtype(dtype),
                   out + size_t(begin - column_begin) * element);
    }
  }
}

// dst[(r - row_begin) * ld + (s - first) * K + k] = 1 where code[r, s] = k, else 0
void bonsai_one_hot(const Layer* layer, int64_t row_begin, int64_t row_end, int64_t first,
                    int64_t last, int32_t dtype, void* dst, int64_t ld, int32_t threads) {
  const size_t element = size_of(Dtype(dtype));
  const int64_t k = layer->codewords_k;
  (void)threads;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = row_begin; row < row_end; ++row) {
    char* out = static_cast<char*>(dst) + (row - row_begin) * ld * element;
    std::memset(out, 0, size_t((last - first) * k) * element);
    const uint8_t* codes = layer->codes + row * layer->codes_stride;
    for (int64_t s = first; s < last; ++s) {
      store_as(Dtype(dtype), out, (s - first) * k + code_of(codes, s, layer->code_bits), 1.0f);
    }
  }
}

// Bytes of workspace that `bonsai_linear_few` needs.
int64_t bonsai_few_workspace(const Layer* layer, int64_t tokens, int32_t dtype, int32_t threads) {
  return int64_t(few_workspace(current_isa(), *layer, tokens, Dtype(dtype), threads));
}

// y[m * y_stride + o] for `tokens` rows x[m * x_stride + i]
void bonsai_linear_few(const Layer* layer, int32_t dtype, const void* x, int64_t x_stride, void* y,
                       int64_t y_stride, int64_t tokens, void* workspace, int32_t threads) {
  const Isa& isa = current_isa();
  Few few(isa, *layer, tokens, Dtype(dtype), threads, workspace);
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
  {
    few.prepare(x, x_stride, omp_get_thread_num(), omp_get_num_threads());
#pragma omp barrier
    few.rows(y, y_stride, omp_get_thread_num(), omp_get_num_threads());
  }
#else
  few.prepare(x, x_stride, 0, 1);
  few.rows(y, y_stride, 0, 1);
#endif
}

}  // extern "C"

size_t few_workspace(const Isa& isa, const Layer& layer, int64_t tokens, Dtype dtype, int threads) {
  return Few(isa, layer, tokens, dtype, threads, nullptr).bytes;
}

Few::Few(const Isa& isa_, const Layer& layer_, int64_t tokens_, Dtype dtype_, int threads,
         void* workspace)
    : isa(isa_), layer(layer_), tokens(tokens_), dtype(dtype_) {
  planes = dtype == kFloat32 ? 3 : 2;
  prepared_stride = (isa.prepared_bytes(layer.in_features, planes) + 63) & ~size_t(63);
  table_stride = size_t(num_subvectors(layer) * layer.codewords_k + 15) & ~size_t(15);
  size_t row_bytes =
      layer.packing == kBase3 ? ((size_t(layer.in_features) / 4 + 64 + 63) & ~size_t(63)) : 0;
  Arena arena(workspace);
  prepared = arena.take<char>(prepared_stride * size_t(tokens));
  table = arena.take<float>(table_stride * size_t(tokens));
  pointers = arena.take<const void*>(size_t(tokens));
  values_stride = (size_t(layer.in_features) + 15) & ~size_t(15);
  values = arena.take<float>(values_stride * size_t(tokens));
  sums_stride = size_t(kRows) * size_t(tokens);
  sums = arena.take<float>(sums_stride * size_t(threads));
  codes_stride = row_bytes;
  codes = arena.take<uint8_t>(row_bytes * kRows * size_t(threads));
  bytes = arena.bytes();
  for (int64_t m = 0; workspace && m < tokens; ++m) {
    pointers[m] = static_cast<char*>(prepared) + size_t(m) * prepared_stride;
  }
}

void Few::prepare(const void* x, int64_t x_stride, int thread, int threads) {
  // with several tokens whole rows are shared out, with one the parts of its row
  const bool is_split = tokens < threads;
  for (int64_t m = 0; m < tokens; ++m) {
    if (!is_split && m % threads != thread) continue;
    const char* source = static_cast<const char*>(x) + size_t(m * x_stride) * size_of(dtype);
    float* row = values + size_t(m) * values_stride;
    const int part = is_split ? thread : 0, parts = is_split ? threads : 1;
    int64_t begin, end;
    columns_of(part, parts, &begin, &end);
    for (int64_t j = begin; j < end; ++j) row[j] = load_as_float(dtype, source, j);
    prepare_part(row, m, part, parts);
  }
}

// Whole chunks of columns, so that no two threads write to one chunk's digits or read what the
// other converts.
void Few::columns_of(int part, int parts, int64_t* begin, int64_t* end) const {
  const int64_t chunks = ceil_div(layer.in_features, kChunk);
  *begin = chunks * part / parts * kChunk;
  *end = chunks * (part + 1) / parts * kChunk;
  if (*end > layer.in_features) *end = layer.in_features;
}

void Few::prepare_part(const float* row, int64_t m, int part, int parts) {
  int64_t begin, end;
  columns_of(part, parts, &begin, &end);
  if (begin >= end) return;
  prepare_digits(row, m, begin, end);
  prepare_table(row, m, begin, end);
}

void Few::prepare_digits(const float* row, int64_t m, int64_t begin, int64_t end) {
  char* mine = static_cast<char*>(prepared) + size_t(m) * prepared_stride;
  isa.prepare(row + begin, end - begin, planes, mine + isa.prepared_bytes(begin, planes));
}

void Few::prepare_table(const float* row, int64_t m, int64_t begin, int64_t end) {
  if (!layer.codes) return;
  float* products = table + size_t(m) * table_stride;
  const int64_t dim = layer.codewords_dim;
  for (int64_t s = begin / dim; s * dim < end; ++s) {
    int64_t length = layer.in_features - s * dim < dim ? layer.in_features - s * dim : dim;
    isa.products(row + s * dim, codeword(layer, s, 0), dim, layer.codewords_k, length,
                 products + s * layer.codewords_k);
  }
}

void Few::rows(void* y, int64_t y_stride, int thread, int threads) {
  // contiguous rows per thread, in whole blocks
  const int64_t blocks = ceil_div(layer.out_features, kRows);
  const int64_t begin = blocks * thread / threads;
  const int64_t end = blocks * (thread + 1) / threads;
  float* mine = sums + size_t(thread) * sums_stride;
  for (int64_t block = begin; block < end; ++block) {
    int64_t row = block * kRows;
    int count = layer.out_features - row < kRows ? int(layer.out_features - row) : kRows;
    block_rows(row, count, thread, mine);
    for (int r = 0; r < count; ++r) {
      for (int64_t m = 0; m < tokens; ++m) {
        store_as(dtype, y, m * y_stride + row + r, mine[size_t(r) * size_t(tokens) + size_t(m)]);
      }
    }
  }
}

void Few::block_rows(int64_t row, int count, int thread, float* out) {
  const uint8_t* bytes[kRows];
  const uint16_t* scale[kRows];
  for (int r = 0; r < count; ++r) {
    bytes[r] = layer.ternary + (row + r) * layer.ternary_stride;
    if (layer.packing == kBase3) {
      uint8_t* mine = codes + (size_t(thread) * kRows + size_t(r)) * codes_stride;
      base3_to_two_bit(bytes[r], 0, layer.in_features, mine);
      bytes[r] = mine;
    }
    scale[r] = scales_of(layer, row + r, 0);
  }
  const int64_t subvectors = num_subvectors(layer);
  const int64_t k = layer.codewords_k;
  if (layer.codes && isa.dot4 && k == 4) {
    const uint8_t* row_codes[kRows];
    for (int r = 0; r < count; ++r) row_codes[r] = layer.codes + (row + r) * layer.codes_stride;
    isa.dot4(bytes, scale, scale_step(layer), count, layer.in_features, planes, pointers,
             int(tokens), out, tokens, row_codes, subvectors, table, int64_t(table_stride));
    return;
  }
  isa.dot(bytes, scale, scale_step(layer), count, layer.in_features, planes, pointers, int(tokens),
          out, tokens);
  if (!layer.codes) return;
  for (int r = 0; r < count; ++r) {
    const uint8_t* row_codes = layer.codes + (row + r) * layer.codes_stride;
    for (int64_t m = 0; m < tokens; ++m) {
      const float* products = table + size_t(m) * table_stride;
      float sum = 0.0f;
      int64_t s = 0;
      if (layer.code_bits == 2 && k == 4) {
        // four sub-vectors are one byte; four sums hide the additions' latency
        float lanes[4] = {};
        for (; s + 4 <= subvectors; s += 4) {
          unsigned byte = row_codes[s / 4];
          const float* four = products + 4 * s;
          lanes[0] += four[byte & 3];
          lanes[1] += four[4 + ((byte >> 2) & 3)];
          lanes[2] += four[8 + ((byte >> 4) & 3)];
          lanes[3] += four[12 + (byte >> 6)];
        }
        sum = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
      }
      for (; s < subvectors; ++s) {
        sum += products[s * k + code_of(row_codes, s, layer.code_bits)];
      }
      out[size_t(r) * size_t(tokens) + size_t(m)] += sum;
    }
  }
}
