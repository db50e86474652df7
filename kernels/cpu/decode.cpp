// One token of each sequence through every block of a decoder, in one parallel region.
//
//   h += Wo attention(rotate(Wq n), cache) ;  h += Wd (act(Wg n) * Wu n)      n = norm(h)
//
// Activations are float32 throughout; weights, embedding, head and cache stay as they are stored.
// Between the phases of a block threads wait for each other; a row of a product, a head of the
// attention and a row of the head belong to one thread, so that the number of threads does not
// change a bit.
// Called by bonsai_ft/ops/cpu_decode.py; tested by tests/test_decode.py against transformers.
#include "decode.h"

#include <cstring>
#include <initializer_list>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "arithmetic.h"
#include "linear.h"
#include "numbers.h"

const Math& bonsai_current_math() {
  const char* name = current_isa().name;
  const Math* math = nullptr;
  if (std::strcmp(name, "avx512") == 0) math = bonsai_math_avx512();
  if (std::strcmp(name, "avx2") == 0) math = bonsai_math_avx2();
  return math ? *math : *bonsai_math_plain();
}

namespace {

inline void barrier() {
#ifdef _OPENMP
#pragma omp barrier
#endif
}

constexpr int kMaxShared = 3;  // layers that read the same input: query, key and value

// Memory of a step, the same for every thread.
struct Memory {
  float *hidden, *queries, *keys, *values, *mixed, *gated;
  float* normed;      // [threads][sequences][hidden]
  float* scores;      // [threads][positions]
  float* pieces;      // [threads][2][kRows * sequences]
  float* low_rank;    // [kMaxShared][sequences][largest rank]
  void* few[kMaxShared];
  int64_t rank = 0;
  size_t bytes = 0;

  Memory(const Isa& isa, const Decoder& d, int threads, void* workspace) {
    Arena arena(workspace);
    const int64_t s = d.sequences;
    hidden = arena.take<float>(s * d.hidden);
    queries = arena.take<float>(s * d.heads * d.head_dim);
    keys = arena.take<float>(s * d.kv_heads * d.head_dim);
    values = arena.take<float>(s * d.kv_heads * d.head_dim);
    mixed = arena.take<float>(s * d.heads * d.head_dim);
    gated = arena.take<float>(s * d.intermediate);
    normed = arena.take<float>(threads * s * d.hidden);
    scores = arena.take<float>(threads * d.positions);
    pieces = arena.take<float>(threads * 2 * kRows * s);
    size_t largest = 0;
    for (int64_t b = 0; b < d.num_blocks; ++b) {
      const Block& block = d.blocks[b];
      for (const Linear* linear : {&block.query, &block.key, &block.value, &block.output,
                                   &block.gate, &block.up, &block.down}) {
        size_t size = few_workspace(isa, linear->layer, s, Dtype(d.dtype), threads);
        largest = size > largest ? size : largest;
        rank = linear->rank > rank ? linear->rank : rank;
      }
    }
    low_rank = arena.take<float>(kMaxShared * s * rank);
    for (int i = 0; i < kMaxShared; ++i) few[i] = arena.take<char>(largest);
    bytes = arena.bytes();
  }
};

// Layers that read one input, as one thread sees them.
struct Products {
  const Decoder& d;
  const Math& math;
  const Memory& memory;
  const Linear* linears[kMaxShared];
  Few fews[kMaxShared];
  int count;
  int thread, threads;

  Products(const Isa& isa, const Decoder& d_, const Math& math_, const Memory& memory_,
           const Linear* a, const Linear* b, const Linear* c, int thread_, int threads_)
      : d(d_),
        math(math_),
        memory(memory_),
        linears{a, b, c},
        fews{few(isa, *a, 0, threads_), few(isa, b ? *b : *a, 1, threads_),
             few(isa, c ? *c : *a, 2, threads_)},
        count(c ? 3 : b ? 2 : 1),
        thread(thread_),
        threads(threads_) {
    // the digits of x are the same for all
    for (int i = 1; i < count; ++i) fews[i].pointers = fews[0].pointers;
  }

  Few few(const Isa& isa, const Linear& linear, int i, int threads_) const {
    return Few(isa, linear.layer, d.sequences, Dtype(d.dtype), threads_, memory.few[i]);
  }

  // x [sequences][x_stride]; every thread does its share, and a barrier follows
  void prepare(const float* x, int64_t x_stride) {
    int64_t begin, end;
    fews[0].columns_of(thread, threads, &begin, &end);
    for (int64_t m = 0; m < d.sequences; ++m) {
      const float* row = x + m * x_stride;
      if (begin < end) fews[0].prepare_digits(row, m, begin, end);
      for (int i = 0; i < count; ++i) {
        if (begin < end) fews[i].prepare_table(row, m, begin, end);
        const int64_t rank = linears[i]->rank;
        const int64_t first = rank * thread / threads, last = rank * (thread + 1) / threads;
        const int64_t width = linears[i]->layer.in_features;
        if (first < last) {
          math.dots(kFloat32, linears[i]->lora_a + first * width, width, last - first, row, width,
                    low_rank(i, m) + first);
        }
      }
    }
    barrier();
  }

  float* low_rank(int i, int64_t m) const {
    return memory.low_rank + (i * d.sequences + m) * memory.rank;
  }

  // out[r * sequences + m] of up to kRows rows
  void rows(int i, int64_t row, int rows_here, float* out) {
    fews[i].block_rows(row, rows_here, thread, out);
    const Linear& linear = *linears[i];
    for (int r = 0; r < rows_here; ++r) {
      for (int64_t m = 0; m < d.sequences; ++m) {
        float& y = out[r * d.sequences + m];
        if (linear.bias) y += linear.bias[row + r];
        if (linear.rank) {
          const float* b = linear.lora_b + (row + r) * linear.rank;
          const float* h = low_rank(i, m);
          float sum = 0.0f;
          for (int64_t k = 0; k < linear.rank; ++k) sum += b[k] * h[k];
          y += sum;
        }
      }
    }
  }
};

// This thread's share of the blocks of kRows rows of a layer.
template <typename Body>
void for_blocks(int64_t rows, int thread, int threads, Body body) {
  const int64_t blocks = ceil_div(rows, kRows);
  for (int64_t b = blocks * thread / threads; b < blocks * (thread + 1) / threads; ++b) {
    int64_t row = b * kRows;
    body(row, rows - row < kRows ? int(rows - row) : kRows);
  }
}

struct Step {
  const Decoder& d;
  const Isa& isa;
  const Math& math;
  const Memory& memory;
  const int64_t* tokens;
  const int64_t* positions;
  float* logits;
  int thread, threads;

  float* piece(int i) const { return memory.pieces + (thread * 2 + i) * kRows * d.sequences; }
  float* normed() const { return memory.normed + thread * d.sequences * d.hidden; }

  char* cache(int64_t block, int which, int64_t m, int64_t head) const {
    int64_t at = ((block * 2 + which) * d.sequences + m) * d.kv_heads + head;
    return static_cast<char*>(d.cache) +
           size_t(at * d.positions * d.head_dim) * size_of(Dtype(d.dtype));
  }

  void norm_all(const float* weight) const {
    for (int64_t m = 0; m < d.sequences; ++m) {
      math.norm(memory.hidden + m * d.hidden, weight, d.eps, d.hidden, normed() + m * d.hidden);
    }
  }

  void embed() const {
    for (int64_t m = thread; m < d.sequences; m += threads) {
      const char* row = static_cast<const char*>(d.embedding) +
                        size_t(tokens[m] * d.hidden) * size_of(Dtype(d.dtype));
      for (int64_t j = 0; j < d.hidden; ++j) {
        memory.hidden[m * d.hidden + j] = load_as_float(Dtype(d.dtype), row, j);
      }
    }
    barrier();
  }

  void project(Products& products, int i, int64_t row_count, float* out, int64_t stride) const {
    for_blocks(row_count, thread, threads, [&](int64_t row, int rows) {
      products.rows(i, row, rows, piece(0));
      for (int r = 0; r < rows; ++r) {
        for (int64_t m = 0; m < d.sequences; ++m) {
          out[m * stride + row + r] = piece(0)[r * d.sequences + m];
        }
      }
    });
  }

  // as project, added to the hidden state
  void add(Products& products) const {
    for_blocks(d.hidden, thread, threads, [&](int64_t row, int rows) {
      products.rows(0, row, rows, piece(0));
      for (int r = 0; r < rows; ++r) {
        for (int64_t m = 0; m < d.sequences; ++m) {
          memory.hidden[m * d.hidden + row + r] += piece(0)[r * d.sequences + m];
        }
      }
    });
    barrier();
  }

  // One key/value head of one sequence: its new key and value, then the query heads that read it.
  void attend(const Block& block, int64_t index, int64_t m, int64_t head) const {
    const int64_t dim = d.head_dim, half = dim / 2, position = positions[m];
    const Dtype dtype = Dtype(d.dtype);
    const float* cosines = d.cosines + position * dim;
    const float* sines = d.sines + position * dim;
    float* key = memory.keys + (m * d.kv_heads + head) * dim;
    if (block.key_norm) math.norm(key, block.key_norm, d.eps, dim, key);
    math.rotate(key, cosines, sines, half);
    const float* value = memory.values + (m * d.kv_heads + head) * dim;
    char* keys = cache(index, 0, m, head);
    char* values = cache(index, 1, m, head);
    for (int64_t j = 0; j < dim; ++j) {
      store_as(dtype, keys, position * dim + j, key[j]);
      store_as(dtype, values, position * dim + j, value[j]);
    }
    float* scores = memory.scores + thread * d.positions;
    const int64_t shared = d.heads / d.kv_heads;
    for (int64_t q = head * shared; q < (head + 1) * shared; ++q) {
      float* query = memory.queries + (m * d.heads + q) * dim;
      if (block.query_norm) math.norm(query, block.query_norm, d.eps, dim, query);
      math.rotate(query, cosines, sines, half);
      math.dots(dtype, keys, dim, position + 1, query, dim, scores);
      math.softmax(scores, position + 1, d.attention_scale);
      math.mix(dtype, values, dim, position + 1, scores, dim,
               memory.mixed + (m * d.heads + q) * dim);
    }
  }

  void attention(const Block& block, int64_t index) const {
    const int64_t dim = d.head_dim, wide = d.heads * dim, narrow = d.kv_heads * dim;
    norm_all(block.input_norm);
    Products inputs(isa, d, math, memory, &block.query, &block.key, &block.value, thread, threads);
    inputs.prepare(normed(), d.hidden);
    project(inputs, 0, wide, memory.queries, wide);
    project(inputs, 1, narrow, memory.keys, narrow);
    project(inputs, 2, narrow, memory.values, narrow);
    barrier();
    const int64_t tasks = d.sequences * d.kv_heads;
    for (int64_t task = tasks * thread / threads; task < tasks * (thread + 1) / threads; ++task) {
      attend(block, index, task / d.kv_heads, task % d.kv_heads);
    }
    barrier();
    Products output(isa, d, math, memory, &block.output, nullptr, nullptr, thread, threads);
    output.prepare(memory.mixed, wide);
    add(output);
  }

  void feed_forward(const Block& block) const {
    norm_all(block.post_norm);
    Products inputs(isa, d, math, memory, &block.gate, &block.up, nullptr, thread, threads);
    inputs.prepare(normed(), d.hidden);
    for_blocks(d.intermediate, thread, threads, [&](int64_t row, int rows) {
      inputs.rows(0, row, rows, piece(0));
      inputs.rows(1, row, rows, piece(1));
      math.gate(d.activation, piece(0), piece(1), rows * d.sequences, piece(0));
      for (int r = 0; r < rows; ++r) {
        for (int64_t m = 0; m < d.sequences; ++m) {
          memory.gated[m * d.intermediate + row + r] = piece(0)[r * d.sequences + m];
        }
      }
    });
    barrier();
    Products output(isa, d, math, memory, &block.down, nullptr, nullptr, thread, threads);
    output.prepare(memory.gated, d.intermediate);
    add(output);
  }

  void run() const {
    embed();
    for (int64_t b = 0; b < d.num_blocks; ++b) {
      attention(d.blocks[b], b);
      feed_forward(d.blocks[b]);
    }
    norm_all(d.final_norm);
    const int64_t begin = d.vocabulary * thread / threads;
    const int64_t end = d.vocabulary * (thread + 1) / threads;
    constexpr int64_t kStripe = 32;  // rows that stay in the cache for all sequences
    for (int64_t row = begin; row < end; row += kStripe) {
      int64_t rows = end - row < kStripe ? end - row : kStripe;
      const char* weights = static_cast<const char*>(d.head) +
                            size_t(row * d.hidden) * size_of(Dtype(d.dtype));
      for (int64_t m = 0; m < d.sequences; ++m) {
        float* out = logits + m * d.vocabulary + row;
        math.dots(Dtype(d.dtype), weights, d.hidden, rows, normed() + m * d.hidden, d.hidden, out);
        for (int64_t i = 0; d.head_bias && i < rows; ++i) out[i] += d.head_bias[row + i];
      }
    }
  }
};

}  // namespace

extern "C" {

int64_t bonsai_decode_workspace(const Decoder* decoder, int32_t threads) {
  return int64_t(Memory(current_isa(), *decoder, threads, nullptr).bytes);
}

// tokens, positions: one per sequence; logits: [sequences, vocabulary]
void bonsai_decode_step(const Decoder* decoder, const int64_t* tokens, const int64_t* positions,
                        float* logits, void* workspace, int32_t threads) {
  const Isa& isa = current_isa();
  const Math& math = bonsai_current_math();
  const Memory memory(isa, *decoder, threads, workspace);
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
  {
    // the runtime may give fewer threads than were asked for
    Step{*decoder, isa,    math, memory, tokens, positions,
         logits,   omp_get_thread_num(), omp_get_num_threads()}
        .run();
  }
#else
  Step{*decoder, isa, math, memory, tokens, positions, logits, 0, 1}.run();
#endif
}

}  // extern "C"
