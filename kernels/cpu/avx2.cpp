// The kernels for processors with AVX2, FMA and F16C (Haswell, Zen and later).
//
// The same method as avx512.cpp with 32 bytes, one group, at a time: `unpack` looks codes up with
// vpermps, `dot` multiplies codes by the signed bytes of x with vpmaddubsw. Prepared x, per group:
// int8 [4][planes][32], int32 [8] minus the lanes' sums of q, float [8] dx.
// Called through linear.cpp; tested by tests/test_cpu_kernels.py with BONSAI_CPU_ISA=avx2.
#include <cmath>
#include <cstring>

#include "ternary.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <cpuid.h>

// after the headers: their inline functions must not be compiled for one processor alone
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include <immintrin.h>

#include "numbers.h"

namespace {

inline float scale_of(uint16_t half) { return _cvtsh_ss(half); }

inline uint16_t code_at(const uint8_t* bytes, int64_t j) {
  return uint16_t((bytes[j / 4] >> (2 * (j % 4))) & 3);
}

// eight codes -> eight lanes of a table of four 32-bit entries, repeated
inline __m256i look_up(uint16_t codes, __m256i table) {
  const __m256i shifts = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
  return _mm256_permutevar8x32_epi32(table,
                                     _mm256_srlv_epi32(_mm256_set1_epi32(codes), shifts));
}

void unpack(const uint8_t* bytes, const uint16_t* scale, int64_t scale_step, int64_t columns,
            Dtype dtype, void* dst) {
  for (int64_t begin = 0; begin < columns; begin += kGroup) {
    uint16_t half = scale[scale_step * (begin / kGroup)];
    float s = scale_of(half);
    uint32_t entry;
    if (dtype == kFloat32) {
      std::memcpy(&entry, &s, sizeof entry);
    } else {
      entry = dtype == kBFloat16 ? float_to_bf16(s) : half;
    }
    uint32_t minus = entry ^ (dtype == kFloat32 ? 0x80000000u : 0x8000u);
    const __m256i table = _mm256_setr_epi32(int(minus), 0, int(entry), 0, int(minus), 0,
                                            int(entry), 0);
    const uint32_t scalar_table[4] = {minus, 0, entry, 0};
    int64_t end = begin + kGroup < columns ? begin + kGroup : columns;
    int64_t j = begin;
    if (dtype == kFloat32) {
      float* out = static_cast<float*>(dst);
      for (; j + 8 <= end; j += 8) {
        uint16_t codes;
        std::memcpy(&codes, bytes + j / 4, 2);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + j), look_up(codes, table));
      }
      for (; j < end; ++j) std::memcpy(out + j, &scalar_table[code_at(bytes, j)], 4);
    } else {
      uint16_t* out = static_cast<uint16_t*>(dst);
      for (; j + 16 <= end; j += 16) {
        uint32_t codes;
        std::memcpy(&codes, bytes + j / 4, 4);
        __m256i low = look_up(uint16_t(codes), table);
        __m256i high = look_up(uint16_t(codes >> 16), table);
        __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + j), packed);
      }
      for (; j < end; ++j) out[j] = uint16_t(scalar_table[code_at(bytes, j)]);
    }
  }
}

inline size_t group_bytes(int planes) { return size_t(4 * planes * 32 + 32 + 32); }

size_t prepared_bytes(int64_t columns, int planes) {
  return size_t(ceil_div(columns, kGroup)) * group_bytes(planes);
}

void prepare(const float* x, int64_t columns, int planes, void* prepared) {
  const float largest = planes == 3 ? 8323072.0f : 32512.0f;  // 127 * 2^16, 127 * 2^8
  int8_t* out = static_cast<int8_t*>(prepared);
  for (int64_t begin = 0; begin < columns; begin += kGroup, out += group_bytes(planes)) {
    int32_t* sums = reinterpret_cast<int32_t*>(out + 4 * planes * 32);
    float* steps = reinterpret_cast<float*>(sums + 8);
    int64_t count = columns - begin < kGroup ? columns - begin : kGroup;
    uint32_t top = 0;
    for (int64_t j = 0; j < count; ++j) {
      uint32_t bits;
      std::memcpy(&bits, x + begin + j, sizeof bits);
      bits &= 0x7fffffffu;
      top = bits > top ? bits : top;
    }
    float magnitude;
    std::memcpy(&magnitude, &top, sizeof magnitude);
    // an infinity or a NaN must not be lost in the integers: the step carries it into y
    bool is_finite = top < 0x7f800000u;
    bool is_zero = magnitude < 1e-30f;
    float step = is_finite ? (is_zero ? 0.0f : magnitude / largest) : NAN;
    float inverse = is_finite && !is_zero ? largest / magnitude : 0.0f;
    for (int lane = 0; lane < 8; ++lane) {
      sums[lane] = 0;
      steps[lane] = step;
    }
    for (int64_t j = 0; j < kGroup; ++j) {
      bool is_there = j < count && is_finite;
      int32_t q = is_there ? _mm_cvtss_si32(_mm_set_ss(x[begin + j] * inverse)) : 0;
      sums[j / 16] -= q;
      for (int p = 0; p < planes; ++p) {
        int8_t digit = int8_t(uint8_t(q));
        q = (q - digit) >> 8;
        out[((j % 4) * planes + p) * 32 + j / 4] = digit;
      }
    }
  }
}

inline float reduce(__m256 v) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_shuffle_ps(sum, sum, 1)));
}

template <int kPlanes>
void dot_planes(const uint8_t* const* bytes, const uint16_t* const* scale, int64_t scale_step,
                int rows, int64_t columns, const void* const* prepared, int tokens, float* y,
                int64_t y_stride) {
  constexpr int kMaxTokens = 16;
  const __m256i three = _mm256_set1_epi8(3);
  const __m256i ones = _mm256_set1_epi16(1);
  const int64_t row_bytes = (columns + 3) / 4;
  const int64_t groups = ceil_div(columns, kGroup);
  for (int r = 0; r < rows; ++r) {
    for (int first = 0; first < tokens; first += kMaxTokens) {
      int count = tokens - first < kMaxTokens ? tokens - first : kMaxTokens;
      __m256 total[kMaxTokens];
      for (int m = 0; m < count; ++m) total[m] = _mm256_setzero_ps();
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t offset = g * (kGroup / 4);
        __m256i packed;
        if (row_bytes - offset >= 32) {
          packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes[r] + offset));
        } else {
          alignas(32) uint8_t tail[32] = {};
          std::memcpy(tail, bytes[r] + offset, size_t(row_bytes - offset));
          packed = _mm256_load_si256(reinterpret_cast<const __m256i*>(tail));
        }
        const __m256i codes[4] = {
            _mm256_and_si256(packed, three),
            _mm256_and_si256(_mm256_srli_epi16(packed, 2), three),
            _mm256_and_si256(_mm256_srli_epi16(packed, 4), three),
            _mm256_and_si256(_mm256_srli_epi16(packed, 6), three)};
        const __m256 of_group = _mm256_set1_ps(scale_of(scale[r][scale_step * g]));
        for (int m = 0; m < count; ++m) {
          const int8_t* x =
              static_cast<const int8_t*>(prepared[first + m]) + g * group_bytes(kPlanes);
          const int32_t* sums = reinterpret_cast<const int32_t*>(x + 4 * kPlanes * 32);
          __m256i sum = _mm256_setzero_si256();
          for (int p = kPlanes - 1; p >= 0; --p) {
            __m256i part = _mm256_setzero_si256();
            for (int i = 0; i < 4; ++i) {
              const __m256i q = _mm256_loadu_si256(
                  reinterpret_cast<const __m256i*>(x + (i * kPlanes + p) * 32));
              part = _mm256_add_epi16(part, _mm256_maddubs_epi16(codes[i], q));
            }
            sum = _mm256_add_epi32(_mm256_slli_epi32(sum, 8), _mm256_madd_epi16(part, ones));
          }
          sum = _mm256_add_epi32(sum, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums)));
          const __m256 step = _mm256_loadu_ps(reinterpret_cast<const float*>(sums + 8));
          total[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(of_group, step),
                                     total[m]);
        }
      }
      for (int m = 0; m < count; ++m) y[r * y_stride + first + m] = reduce(total[m]);
    }
  }
}

void dot(const uint8_t* const* bytes, const uint16_t* const* scale, int64_t scale_step, int rows,
         int64_t columns, int planes, const void* const* prepared, int tokens, float* y,
         int64_t y_stride) {
  if (planes == 3) {
    dot_planes<3>(bytes, scale, scale_step, rows, columns, prepared, tokens, y, y_stride);
  } else {
    dot_planes<2>(bytes, scale, scale_step, rows, columns, prepared, tokens, y, y_stride);
  }
}

void products(const float* a, const float* b, int64_t stride, int count, int64_t length,
              float* out) {
  for (int i = 0; i < count; ++i) {
    const float* row = b + i * stride;
    __m256 sum = _mm256_setzero_ps();
    int64_t j = 0;
    for (; j + 8 <= length; j += 8) {
      sum = _mm256_fmadd_ps(_mm256_loadu_ps(a + j), _mm256_loadu_ps(row + j), sum);
    }
    float rest = 0.0f;
    for (; j < length; ++j) rest += a[j] * row[j];
    out[i] = reduce(sum) + rest;
  }
}

}  // namespace

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC reset_options
#endif

extern "C" const Isa* bonsai_isa_avx2() {
  static const Isa isa = {"avx2", unpack, prepared_bytes, prepare, dot, products, nullptr};
  __builtin_cpu_init();
  bool is_there = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  // clang's builtin does not know f16c
  unsigned a, b, c, d;
  bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
  return is_there && has_f16c ? &isa : nullptr;
}

#else

extern "C" const Isa* bonsai_isa_avx2() { return nullptr; }

#endif
