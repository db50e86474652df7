// The integer product of neon.cpp, which includes this file once for every way to `multiply`.
// Needs `multiply` and `finish` of the including namespace.

template <int kPlanes>
void dot_planes(const uint8_t* const* bytes, const uint16_t* const* scale, int64_t scale_step,
                int rows, int64_t columns, const void* const* prepared, int tokens, float* y,
                int64_t y_stride) {
  constexpr int kMaxTokens = 16;
  const uint8x16_t three = vdupq_n_u8(3);
  const int64_t row_bytes = (columns + 3) / 4;
  const int64_t groups = ceil_div(columns, kGroup);
  for (int r = 0; r < rows; ++r) {
    for (int first = 0; first < tokens; first += kMaxTokens) {
      const int count = tokens - first < kMaxTokens ? tokens - first : kMaxTokens;
      float32x4_t total[kMaxTokens];
      for (int m = 0; m < count; ++m) total[m] = vdupq_n_f32(0.0f);
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t offset = g * (kGroup / 4);
        uint8_t tail[kGroup / 4] = {};
        const uint8_t* packed = bytes[r] + offset;
        if (row_bytes - offset < kGroup / 4) {
          std::memcpy(tail, packed, size_t(row_bytes - offset));
          packed = tail;
        }
        int8x16_t codes[8];
        for (int half = 0; half < 2; ++half) {
          const uint8x16_t here = vld1q_u8(packed + 16 * half);
          codes[half] = vreinterpretq_s8_u8(vandq_u8(here, three));
          codes[2 + half] = vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(here, 2), three));
          codes[4 + half] = vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(here, 4), three));
          codes[6 + half] = vreinterpretq_s8_u8(vshrq_n_u8(here, 6));
        }
        const float of_group = f16_to_float(scale[r][scale_step * g]);
        for (int m = 0; m < count; ++m) {
          const int8_t* x =
              static_cast<const int8_t*>(prepared[first + m]) + size_t(g) * group_bytes(kPlanes);
          const int32_t* sums = reinterpret_cast<const int32_t*>(x + 4 * kPlanes * 32);
          const float* step = reinterpret_cast<const float*>(sums + 4);
          int32x4_t sum = vdupq_n_s32(0);
          for (int p = kPlanes - 1; p >= 0; --p) {
            Part part = {};
            for (int i = 0; i < 4; ++i) {
              const int8_t* digits = x + (i * kPlanes + p) * 32;
              multiply(part, codes[2 * i], vld1q_s8(digits));
              multiply(part, codes[2 * i + 1], vld1q_s8(digits + 16));
            }
            sum = finish(part, vshlq_n_s32(sum, 8));
          }
          sum = vaddq_s32(sum, vld1q_s32(sums));
          total[m] = vfmaq_f32(total[m], vcvtq_f32_s32(sum),
                               vmulq_n_f32(vld1q_f32(step), of_group));
        }
      }
      for (int m = 0; m < count; ++m) y[r * y_stride + first + m] = vaddvq_f32(total[m]);
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
