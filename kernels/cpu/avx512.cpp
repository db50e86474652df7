// The kernels for processors with AVX-512 VNNI and VBMI (Ice Lake, Zen 4 and later).
//
//   unpack   vpmultishiftqb brings the code of every weight into its own lane, and vpermw / vpermps
//            looks it up in a table of {-s, 0, s, 0}: two instructions for 32 weights of 16 bits
//   dot      y = sum_g scale_g * dx_g * (sum_j code_j * q_j - sum_j q_j) in integers: x of a group is
//            rounded to q = round(x / dx), written as two signed bytes (three for float32), so that
//            vpdpbusd takes 64 products at once. The rounding, 2^-15 of the group's largest value
//            (2^-23 for float32), vanishes in sums over the group unless one value towers over it.
//
// Prepared x, per 256 columns: int8 [4][planes][64], byte b of part i belonging to column 4 b + i,
// as the codes lie; int32 [16] minus the lanes' sums of q; float [16] dx of each lane's group.
// Called through linear.cpp; tested by tests/test_cpu_kernels.py with BONSAI_CPU_ISA=avx512.
#include <cmath>
#include <cstring>

#include "ternary.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
// after the headers: their inline functions must not be compiled for one processor alone
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,f16c,fma"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,f16c,fma,bmi2")
#endif

#include <immintrin.h>

#include "numbers.h"

namespace {

constexpr int64_t kChunk = 256;
// Bytes by which weights are fetched before they are needed, at least.
constexpr int64_t kAhead = 4096;

inline uint64_t load_tail(const uint8_t* bytes, int64_t count) {
  uint64_t value = 0;
  std::memcpy(&value, bytes, size_t(count < 8 ? count : 8));
  return value;
}

inline float scale_of(uint16_t half) { return _cvtsh_ss(half); }

// {-s, 0, s, 0} repeated; zero where the sign is zero
inline __m512i table16(uint16_t s) {
  __m512i value = _mm512_maskz_set1_epi16(0x55555555u, short(s));
  return _mm512_xor_si512(value, _mm512_maskz_set1_epi16(0x11111111u, short(0x8000)));
}

inline __m512 table32(float s) {
  __m512 value = _mm512_maskz_mov_ps(0x5555, _mm512_set1_ps(s));
  return _mm512_castsi512_ps(_mm512_xor_si512(
      _mm512_castps_si512(value), _mm512_maskz_set1_epi32(0x1111, int(0x80000000u))));
}

inline __m512i shifts16() {
  alignas(64) uint8_t control[64];
  for (int i = 0; i < 64; ++i) control[i] = uint8_t(2 * (i / 2));
  return _mm512_load_si512(control);
}

void unpack16(const uint8_t* bytes, const uint16_t* scale, int64_t scale_step, int64_t columns,
              bool is_bf16, uint16_t* dst) {
  const __m512i shifts = shifts16();
  for (int64_t begin = 0; begin < columns; begin += kGroup) {
    uint16_t half = scale[scale_step * (begin / kGroup)];
    const __m512i table = table16(is_bf16 ? float_to_bf16(scale_of(half)) : half);
    int64_t end = begin + kGroup < columns ? begin + kGroup : columns;
    int64_t j = begin;
    for (; j + 32 <= end; j += 32) {
      int64_t codes;
      std::memcpy(&codes, bytes + j / 4, 8);
      __m512i lanes = _mm512_multishift_epi64_epi8(shifts, _mm512_set1_epi64(codes));
      _mm512_storeu_si512(dst + j, _mm512_permutexvar_epi16(lanes, table));
    }
    if (j < end) {
      int64_t codes = int64_t(load_tail(bytes + j / 4, (end - j + 3) / 4));
      __m512i lanes = _mm512_multishift_epi64_epi8(shifts, _mm512_set1_epi64(codes));
      _mm512_mask_storeu_epi16(dst + j, (__mmask32(1) << (end - j)) - 1,
                               _mm512_permutexvar_epi16(lanes, table));
    }
  }
}

void unpack32(const uint8_t* bytes, const uint16_t* scale, int64_t scale_step, int64_t columns,
              float* dst) {
  const __m512i shifts =
      _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  for (int64_t begin = 0; begin < columns; begin += kGroup) {
    const __m512 table = table32(scale_of(scale[scale_step * (begin / kGroup)]));
    int64_t end = begin + kGroup < columns ? begin + kGroup : columns;
    int64_t j = begin;
    for (; j + 16 <= end; j += 16) {
      int32_t codes;
      std::memcpy(&codes, bytes + j / 4, 4);
      __m512i lanes = _mm512_srlv_epi32(_mm512_set1_epi32(codes), shifts);
      _mm512_storeu_ps(dst + j, _mm512_permutexvar_ps(lanes, table));
    }
    if (j < end) {
      int32_t codes = int32_t(load_tail(bytes + j / 4, (end - j + 3) / 4));
      __m512i lanes = _mm512_srlv_epi32(_mm512_set1_epi32(codes), shifts);
      _mm512_mask_storeu_ps(dst + j, __mmask16((1u << (end - j)) - 1),
                            _mm512_permutexvar_ps(lanes, table));
    }
  }
}

void unpack(const uint8_t* bytes, const uint16_t* scale, int64_t scale_step, int64_t columns,
            Dtype dtype, void* dst) {
  if (dtype == kFloat32) {
    unpack32(bytes, scale, scale_step, columns, static_cast<float*>(dst));
  } else {
    unpack16(bytes, scale, scale_step, columns, dtype == kBFloat16, static_cast<uint16_t*>(dst));
  }
}

inline size_t chunk_bytes(int planes) { return size_t(4 * planes * 64 + 64 + 64); }

size_t prepared_bytes(int64_t columns, int planes) {
  return size_t(ceil_div(columns, kChunk)) * chunk_bytes(planes);
}

// One chunk: q of up to 256 columns as signed bytes, in the order of the codes.
template <int kPlanes>
void prepare_chunk(const float* x, int64_t columns, int8_t* out) {
  const float largest = kPlanes == 3 ? 8323072.0f : 32512.0f;  // 127 * 2^16, 127 * 2^8
  float* steps = reinterpret_cast<float*>(out + 4 * kPlanes * 64 + 64);
  for (int half = 0; half < 2; ++half) {
    const int64_t left = columns - half * kGroup;
    __m512 values[8];
    __m512i top = _mm512_setzero_si512();
    for (int v = 0; v < 8; ++v) {
      int64_t here = left - 16 * v;
      __mmask16 mask = here >= 16 ? __mmask16(0xffff)
                                  : here > 0 ? __mmask16((1u << here) - 1) : __mmask16(0);
      values[v] = _mm512_maskz_loadu_ps(mask, x + (here > 0 ? half * kGroup + 16 * v : 0));
      top = _mm512_max_epu32(
          top, _mm512_and_si512(_mm512_castps_si512(values[v]), _mm512_set1_epi32(0x7fffffff)));
    }
    uint32_t bits = _mm512_reduce_max_epu32(top);
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    // an infinity or a NaN must not be lost in the integers: the step carries it into y
    bool is_finite = bits < 0x7f800000u;
    // below it the reciprocal overflows; such a group adds nothing a float32 sum would keep
    bool is_zero = magnitude < 1e-30f;
    float step = is_finite ? (is_zero ? 0.0f : magnitude / largest) : NAN;
    _mm256_storeu_ps(steps + 8 * half, _mm256_set1_ps(step));
    const __m512 inverse = _mm512_set1_ps(is_finite && !is_zero ? largest / magnitude : 0.0f);
    for (int quarter = 0; quarter < 2; ++quarter) {
      __m512i q[4];
      for (int v = 0; v < 4; ++v) {
        q[v] = _mm512_cvtps_epi32(_mm512_mul_ps(values[4 * quarter + v], inverse));
        if (!is_finite) q[v] = _mm512_setzero_si512();
      }
      for (int p = 0; p < kPlanes; ++p) {
        // the low byte as a signed digit, then the rest
        __m128i natural[4];
        for (int v = 0; v < 4; ++v) {
          __m512i digit = _mm512_srai_epi32(_mm512_slli_epi32(q[v], 24), 24);
          q[v] = _mm512_srai_epi32(_mm512_sub_epi32(q[v], digit), 8);
          natural[v] = _mm512_cvtepi32_epi8(digit);
        }
        __m512i bytes = _mm512_castsi128_si512(natural[0]);
        bytes = _mm512_inserti32x4(bytes, natural[1], 1);
        bytes = _mm512_inserti32x4(bytes, natural[2], 2);
        bytes = _mm512_inserti32x4(bytes, natural[3], 3);
        // 64 columns: byte i of every four goes to part i
        int8_t* to = out + p * 64 + 32 * half + 16 * quarter;
        for (int i = 0; i < 4; ++i) {
          _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * kPlanes * 64),
                           _mm512_cvtepi32_epi8(_mm512_srli_epi32(bytes, unsigned(8 * i))));
        }
      }
    }
  }
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i sum = _mm512_setzero_si512();
  for (int p = kPlanes - 1; p >= 0; --p) {
    sum = _mm512_slli_epi32(sum, 8);
    for (int i = 0; i < 4; ++i) {
      sum = _mm512_dpbusd_epi32(sum, ones, _mm512_loadu_si512(out + (i * kPlanes + p) * 64));
    }
  }
  _mm512_storeu_si512(out + 4 * kPlanes * 64, _mm512_sub_epi32(_mm512_setzero_si512(), sum));
}

void prepare(const float* x, int64_t columns, int planes, void* prepared) {
  int8_t* out = static_cast<int8_t*>(prepared);
  for (int64_t begin = 0; begin < columns; begin += kChunk) {
    if (planes == 3) {
      prepare_chunk<3>(x + begin, columns - begin, out);
    } else {
      prepare_chunk<2>(x + begin, columns - begin, out);
    }
    out += chunk_bytes(planes);
  }
}

// The scales of 16 groups as floats, without a read beyond the row's last.
inline __m512 scales16(const uint16_t* scale, int64_t scale_step, int64_t group, int64_t groups) {
  if (scale_step == 0) return _mm512_set1_ps(scale_of(scale[0]));
  int64_t left = groups - group;
  __mmask16 mask = left >= 16 ? __mmask16(0xffff) : __mmask16((1u << left) - 1);
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, scale + group));
}

// four 2-bit codes -> a mask with one bit of every four set
struct OneHotTable {
  uint16_t mask[256];
  constexpr OneHotTable() : mask() {
    for (unsigned byte = 0; byte < 256; ++byte) {
      mask[byte] = uint16_t((1u << (byte & 3)) | (16u << ((byte >> 2) & 3)) |
                            (256u << ((byte >> 4) & 3)) | (4096u << (byte >> 6)));
    }
  }
};

constexpr OneHotTable one_hot;

template <int kPlanes>
void dot_planes(const uint8_t* const* bytes, const uint16_t* const* scale, int64_t scale_step,
                int rows, int64_t columns, const void* const* prepared, int tokens, float* y,
                int64_t y_stride, const uint8_t* const* codes4 = nullptr, int64_t subvectors = 0,
                const float* table = nullptr, int64_t table_stride = 0) {
  constexpr int kMaxTokens = 16;
  const __m512i three = _mm512_set1_epi8(3);
  const int64_t row_bytes = (columns + 3) / 4;
  const int64_t groups = ceil_div(columns, kGroup);
  const int64_t ahead = kRows * row_bytes > kAhead ? kRows * row_bytes : kAhead;
  const uint8_t* row[kRows];
  const uint16_t* row_scale[kRows];
  for (int r = 0; r < kRows; ++r) {
    row[r] = bytes[r < rows ? r : 0];
    row_scale[r] = scale[r < rows ? r : 0];
  }
  for (int first = 0; first < tokens; first += kMaxTokens) {
    int count = tokens - first < kMaxTokens ? tokens - first : kMaxTokens;
    __m512 total[kMaxTokens][kRows];
    for (int m = 0; m < count; ++m) {
      for (int r = 0; r < kRows; ++r) total[m][r] = _mm512_setzero_ps();
    }
    for (int64_t group = 0; group < groups; group += 16) {
      __m512 scales[kRows];
      for (int r = 0; r < kRows; ++r) {
        scales[r] = scales16(row_scale[r], scale_step, group, groups);
      }
      int64_t last = group + 16 < groups ? group + 16 : groups;
      __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
      for (int64_t g = group; g < last; g += 2) {
        const int64_t offset = g * (kGroup / 4);
        const int64_t left = row_bytes - offset;
        const __mmask64 mask = left >= 64 ? ~__mmask64(0) : (__mmask64(1) << left) - 1;
        __m512i codes[kRows][4];
        __m512 of_chunk[kRows];
        for (int r = 0; r < kRows; ++r) {
          __m512i packed = _mm512_maskz_loadu_epi8(mask, row[r] + offset);
          // rows follow each other in memory; masked loads alone do not wake the prefetcher
          _mm_prefetch(reinterpret_cast<const char*>(row[r] + offset) + ahead, _MM_HINT_T0);
          codes[r][0] = _mm512_and_si512(packed, three);
          codes[r][1] = _mm512_and_si512(_mm512_srli_epi16(packed, 2), three);
          codes[r][2] = _mm512_and_si512(_mm512_srli_epi16(packed, 4), three);
          codes[r][3] = _mm512_and_si512(_mm512_srli_epi16(packed, 6), three);
          of_chunk[r] = _mm512_permutexvar_ps(spread, scales[r]);
        }
        spread = _mm512_add_epi32(spread, _mm512_set1_epi32(2));
        for (int m = 0; m < count; ++m) {
          const int8_t* x =
              static_cast<const int8_t*>(prepared[first + m]) + (g / 2) * chunk_bytes(kPlanes);
          const int32_t* sums = reinterpret_cast<const int32_t*>(x + 4 * kPlanes * 64);
          const __m512i minus_sum = _mm512_loadu_si512(sums);
          const __m512 step = _mm512_loadu_ps(reinterpret_cast<const float*>(sums + 16));
          __m512i part[kRows][kPlanes];
          for (int r = 0; r < kRows; ++r) {
            part[r][0] = minus_sum;
            for (int p = 1; p < kPlanes; ++p) part[r][p] = _mm512_setzero_si512();
          }
          for (int i = 0; i < 4; ++i) {
            for (int p = 0; p < kPlanes; ++p) {
              const __m512i q = _mm512_loadu_si512(x + (i * kPlanes + p) * 64);
              for (int r = 0; r < kRows; ++r) {
                part[r][p] = _mm512_dpbusd_epi32(part[r][p], codes[r][i], q);
              }
            }
          }
          for (int r = 0; r < kRows; ++r) {
            __m512i sum = part[r][kPlanes - 1];
            for (int p = kPlanes - 2; p >= 0; --p) {
              sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 8), part[r][p]);
            }
            total[m][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum),
                                          _mm512_mul_ps(of_chunk[r], step), total[m][r]);
          }
        }
      }
    }
    if (codes4) {
      // a byte holds the codes of four sub-vectors: the mask takes one of each four products
      for (int64_t s = 0; s < subvectors; s += 4) {
        const int64_t left = 4 * (subvectors - s);
        const unsigned there = left >= 16 ? 0xffffu : (1u << left) - 1;
        __mmask16 chosen[kRows];
        for (int r = 0; r < kRows; ++r) {
          chosen[r] = __mmask16(one_hot.mask[codes4[r < rows ? r : 0][s / 4]] & there);
        }
        for (int m = 0; m < count; ++m) {
          const __m512 products =
              _mm512_maskz_loadu_ps(__mmask16(there), table + (first + m) * table_stride + 4 * s);
          for (int r = 0; r < kRows; ++r) {
            total[m][r] = _mm512_mask_add_ps(total[m][r], chosen[r], total[m][r], products);
          }
        }
      }
    }
    for (int m = 0; m < count; ++m) {
      for (int r = 0; r < rows; ++r) {
        y[r * y_stride + first + m] = _mm512_reduce_add_ps(total[m][r]);
      }
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

void dot4(const uint8_t* const* bytes, const uint16_t* const* scale, int64_t scale_step, int rows,
          int64_t columns, int planes, const void* const* prepared, int tokens, float* y,
          int64_t y_stride, const uint8_t* const* codes, int64_t subvectors, const float* table,
          int64_t table_stride) {
  if (planes == 3) {
    dot_planes<3>(bytes, scale, scale_step, rows, columns, prepared, tokens, y, y_stride, codes,
                  subvectors, table, table_stride);
  } else {
    dot_planes<2>(bytes, scale, scale_step, rows, columns, prepared, tokens, y, y_stride, codes,
                  subvectors, table, table_stride);
  }
}

void products(const float* a, const float* b, int64_t stride, int count, int64_t length,
              float* out) {
  for (int i = 0; i < count; ++i) {
    const float* row = b + i * stride;
    __m512 sum = _mm512_setzero_ps();
    int64_t j = 0;
    for (; j + 16 <= length; j += 16) {
      sum = _mm512_fmadd_ps(_mm512_loadu_ps(a + j), _mm512_loadu_ps(row + j), sum);
    }
    if (j < length) {
      __mmask16 mask = __mmask16((1u << (length - j)) - 1);
      sum = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, a + j),
                            _mm512_maskz_loadu_ps(mask, row + j), sum);
    }
    out[i] = _mm512_reduce_add_ps(sum);
  }
}

}  // namespace

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC reset_options
#endif

extern "C" const Isa* bonsai_isa_avx512() {
  static const Isa isa = {"avx512", unpack, prepared_bytes, prepare, dot, products, dot4};
  __builtin_cpu_init();
  bool is_there = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
  return is_there ? &isa : nullptr;
}

#else

extern "C" const Isa* bonsai_isa_avx512() { return nullptr; }

#endif
