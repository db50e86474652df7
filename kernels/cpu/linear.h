// The few-token product as parts that one parallel region can call: prepare, barrier, rows.
// `workspace` may be null to ask for `bytes` alone; threads then write nothing.
#pragma once

#include "ternary.h"

// Columns that x is prepared in at least: a multiple of every instruction set's own unit.
constexpr int64_t kChunk = 256;

// Hands out pieces of a workspace, each at a multiple of 64 bytes; without one it only counts.
struct Arena {
  char* start;
  size_t used = 0;
  explicit Arena(void* workspace) : start(static_cast<char*>(workspace)) {
    if (start) start += -reinterpret_cast<uintptr_t>(start) & 63;
  }
  template <typename T>
  T* take(size_t count) {
    T* here = start ? reinterpret_cast<T*>(start + used) : nullptr;
    used += (count * sizeof(T) + 63) & ~size_t(63);
    return here;
  }
  // what the workspace must hold, wherever it starts
  size_t bytes() const { return used + 64; }
};

const Isa& current_isa();

size_t few_workspace(const Isa& isa, const Layer& layer, int64_t tokens, Dtype dtype, int threads);

// y = x W^T for `tokens` rows of x on `threads` threads; `workspace` holds `bytes` bytes.
struct Few {
  Few(const Isa& isa, const Layer& layer, int64_t tokens, Dtype dtype, int threads,
      void* workspace);

  // this thread's share of what depends on x alone; a barrier must follow
  void prepare(const void* x, int64_t x_stride, int thread, int threads);
  // one part of one token, given in float32
  void prepare_part(const float* row, int64_t m, int part, int parts);
  void prepare_digits(const float* row, int64_t m, int64_t begin, int64_t end);
  void prepare_table(const float* row, int64_t m, int64_t begin, int64_t end);
  void columns_of(int part, int parts, int64_t* begin, int64_t* end) const;
  // this thread's share of the rows
  void rows(void* y, int64_t y_stride, int thread, int threads);
  // out[r * tokens + m] of `count` <= kRows rows
  void block_rows(int64_t row, int count, int thread, float* out);

  const Isa& isa;
  const Layer& layer;
  int64_t tokens;
  Dtype dtype;
  int planes;
  size_t bytes;

  void* prepared;
  const void** pointers;
  float* table;      // P, [tokens][S K]
  float* values;     // x in float32
  float* sums;
  uint8_t* codes;    // base-3 rows as 2-bit codes
  size_t prepared_stride, table_stride, values_stride, sums_stride, codes_stride;
};
