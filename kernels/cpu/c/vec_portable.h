/* The lanes of vec.h by the compiler's vector extension, for any target. Included by vec.h only. */
#ifndef NK_VEC_PORTABLE_H
#define NK_VEC_PORTABLE_H

/* Sixteen lanes are as many vectors as the target's own size makes of them: GCC puts a vector that is larger than the
 * target's into memory, which costs a factor of ten, and minutes of compilation. */
#if defined(__AVX__)
#define NATIVE 8
#define ALL(v) {v, v, v, v, v, v, v, v}
#else
#define NATIVE 4
#define ALL(v) {v, v, v, v}
#endif
#define PARTS (LANES / NATIVE)

typedef float nf __attribute__((vector_size(4 * NATIVE)));
typedef int32_t ni __attribute__((vector_size(4 * NATIVE)));
typedef uint32_t nu __attribute__((vector_size(4 * NATIVE)));
typedef struct { nf part[PARTS]; } vf;
typedef struct { ni part[PARTS]; } vi;
#define EACH _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++)
#define PART _Pragma("GCC unroll 4") for (int p = 0; p < PARTS; p++)
#define LANE(x) x.part[i / NATIVE][i % NATIVE]
#define OF_PARTS(type, value) type x; PART x.part[p] = (value); return x
#define A a.part[p]
#define B b.part[p]

INLINE nf n_choose(ni yes, nf x, nf y) { return (nf)((yes & (ni)x) | (~yes & (ni)y)); }

INLINE vf vf_set(float v) { OF_PARTS(vf, (nf)ALL(v)); }
INLINE vf vf_zero(void) { OF_PARTS(vf, (nf){0}); }
INLINE vf vf_load(const float *from) { vf x; PART memcpy(&x.part[p], from + p * NATIVE, 4 * NATIVE); return x; }
INLINE void vf_store(float *to, vf x) { PART memcpy(to + p * NATIVE, &x.part[p], 4 * NATIVE); }
#if defined(__F16C__)
INLINE vf vf_load_half(const uint16_t *from) {
  OF_PARTS(vf, (nf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + p * NATIVE))));
}
INLINE void vf_store_half(uint16_t *to, vf x) {
  PART _mm_storeu_si128((__m128i *)(to + p * NATIVE),
                        _mm256_cvtps_ph((__m256)x.part[p], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
INLINE vf vf_load_half(const uint16_t *from) { /* as half_to_float */
  vf x;
  PART {
    ni h = {0}, rest;
    _Pragma("GCC unroll 8") for (int i = 0; i < NATIVE; i++) h[i] = from[p * NATIVE + i];
    rest = h & 0x7fff;
    ni bits = (rest << 13) + (112 << 23) + ((rest >= 0x7c00) & (112 << 23));
    nf small = __builtin_convertvector(rest, nf) * 0x1p-24f;
    x.part[p] = (nf)((ni)n_choose(rest < 0x0400, small, (nf)bits) | (h & 0x8000) << 16);
  }
  return x;
}
INLINE void vf_store_half(uint16_t *to, vf x) { EACH to[i] = float_to_half(LANE(x)); }
#endif
INLINE vf vf_load_int8(const int8_t *from) {
  vf x;
  PART {
    ni code = {0};
    _Pragma("GCC unroll 8") for (int i = 0; i < NATIVE; i++) code[i] = from[p * NATIVE + i];
    x.part[p] = __builtin_convertvector(code, nf);
  }
  return x;
}
INLINE vf vf_add(vf a, vf b) { OF_PARTS(vf, A + B); }
INLINE vf vf_sub(vf a, vf b) { OF_PARTS(vf, A - B); }
INLINE vf vf_mul(vf a, vf b) { OF_PARTS(vf, A * B); }
INLINE vf vf_div(vf a, vf b) { OF_PARTS(vf, A / B); }
INLINE vf vf_fma(vf a, vf b, vf c) { OF_PARTS(vf, A * B + c.part[p]); } /* two roundings: -ffp-contract=off */
INLINE vf vf_max(vf a, vf b) { OF_PARTS(vf, n_choose(A > B, A, B)); } /* as x86: the second where unordered */
INLINE vf vf_min(vf a, vf b) { OF_PARTS(vf, n_choose(A < B, A, B)); }
INLINE vf vf_round(vf a) { /* beyond 2^23 every float is whole; the sum's own rounding does the rest */
  vf x;
  PART {
    ni sign = (ni)A & ~0x7fffffff;
    nf whole = (nf)((ni)((nf){0} + 0x1p23f) | sign), size = (nf)((ni)A & 0x7fffffff);
    nf near = (nf)((ni)((A + whole) - whole) | sign);
    x.part[p] = n_choose(size < 0x1p23f, near, A);
  }
  return x;
}
INLINE float vf_max_lane(vf a) {
  float most = a.part[0][0];
  EACH most = LANE(a) > most ? LANE(a) : most;
  return most;
}
INLINE vf vf_of_bits(vi a) { OF_PARTS(vf, (nf)A); }
INLINE vi vf_bits(vf a) { OF_PARTS(vi, (ni)A); }
INLINE vf vf_peak(vf a, vf b) {
  OF_PARTS(vf, n_choose((ni)A > ((ni)B & 0x7fffffff), A, (nf)((ni)B & 0x7fffffff)));
}
INLINE float vf_peak_lane(vf a) {
  vi bits = vf_bits(a);
  int32_t most = bits.part[0][0];
  float value;
  EACH most = LANE(bits) > most ? LANE(bits) : most;
  memcpy(&value, &most, 4);
  return value;
}
INLINE vf vf_from_int(vi a) { OF_PARTS(vf, __builtin_convertvector(A, nf)); }
INLINE vi vf_to_int(vf a) { a = vf_round(a); OF_PARTS(vi, __builtin_convertvector(A, ni)); }
INLINE vf vf_exp2_whole(vf a) { OF_PARTS(vf, (nf)((__builtin_convertvector(A, ni) + 127) << 23)); }
INLINE vf vf_first(int count, vf a, vf b) {
  vf x;
  PART {
    ni index = {0};
    _Pragma("GCC unroll 8") for (int i = 0; i < NATIVE; i++) index[i] = p * NATIVE + i;
    x.part[p] = n_choose(index < count, A, B);
  }
  return x;
}
INLINE vi vi_set(int32_t v) { OF_PARTS(vi, (ni)ALL(v)); }
INLINE vi vi_zero(void) { OF_PARTS(vi, (ni){0}); }
INLINE vi vi_load(const void *from) {
  vi x;
  PART memcpy(&x.part[p], (const char *)from + p * 4 * NATIVE, 4 * NATIVE);
  return x;
}
INLINE void vi_store(void *to, vi x) { PART memcpy((char *)to + p * 4 * NATIVE, &x.part[p], 4 * NATIVE); }
INLINE vi vi_add(vi a, vi b) { OF_PARTS(vi, A + B); }
INLINE vi vi_sub(vi a, vi b) { OF_PARTS(vi, A - B); }
INLINE vi vi_shift_right(vi a, int n) { OF_PARTS(vi, A >> n); }
INLINE vf vf_from_unsigned(vi a) { OF_PARTS(vf, __builtin_convertvector((nu)A, nf)); }
INLINE uint32_t vf_at_least(vf a, vf b) {
  uint32_t mask = 0;
  EACH mask |= (uint32_t)(LANE(a) >= LANE(b)) << i;
  return mask;
}
INLINE vf vf_where_zero(vi test, vf a, vf b) { OF_PARTS(vf, n_choose(test.part[p] == 0, A, B)); }
INLINE vi vi_and(vi a, vi b) { OF_PARTS(vi, A & B); }
INLINE void vi_multiply_wide(vi a, uint32_t factor, vi *high, vi *low) {
  EACH {
    uint64_t product = (uint64_t)(uint32_t)LANE(a) * factor;
    LANE((*high)) = (int32_t)(product >> 32);
    LANE((*low)) = (int32_t)product;
  }
}
INLINE void vi_transpose4(const vi in[4], vi out[4]) {
  int32_t from[4][LANES], to[4][LANES];
  for (int k = 0; k < 4; k++) vi_store(from[k], in[k]);
  for (int k = 0; k < 4; k++)
    for (int i = 0; i < LANES; i++) to[k][i] = from[i % 4][i / 4 * 4 + k];
  for (int k = 0; k < 4; k++) out[k] = vi_load(to[k]);
}
INLINE vi vi_or(vi a, vi b) { OF_PARTS(vi, A | B); }
INLINE vi vi_xor(vi a, vi b) { OF_PARTS(vi, A ^ B); }
INLINE vi vi_shift_left(vi a, int n) { OF_PARTS(vi, A << n); }
INLINE void vi_store_int8(int8_t *to, vi x) { EACH to[i] = (int8_t)LANE(x); }
#if defined(__AVX2__)
INLINE vf vf_load_pairs(const uint8_t *from, float zero) {
  const __m128i x = _mm_loadl_epi64((const __m128i *)from), low = _mm_set1_epi8(15);
  const vi codes = {{(ni)_mm256_cvtepu8_epi32(_mm_and_si128(x, low)),
                     (ni)_mm256_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16(x, 4), low))}};
  return vf_sub(vf_from_int(codes), vf_set(zero));
}
INLINE vf vf_load_halves(const uint8_t *from, int shift, float zero) {
  __m128i x = _mm_srl_epi16(_mm_loadu_si128((const __m128i *)from), _mm_cvtsi32_si128(shift));
  x = _mm_and_si128(x, _mm_set1_epi8(15));
  const vi codes = {{(ni)_mm256_cvtepu8_epi32(x), (ni)_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))}};
  return vf_sub(vf_from_int(codes), vf_set(zero));
}
#else
INLINE vf vf_load_pairs(const uint8_t *from, float zero) {
  float codes[LANES];
  for (int i = 0; i < LANES; i++) codes[i] = (float)(from[i % 8] >> i / 8 * 4 & 15) - zero;
  return vf_load(codes);
}
INLINE vf vf_load_halves(const uint8_t *from, int shift, float zero) {
  float codes[LANES];
  for (int i = 0; i < LANES; i++) codes[i] = (float)(from[i] >> shift & 15) - zero;
  return vf_load(codes);
}
#endif
INLINE vi nibbles_low(vi a) { OF_PARTS(vi, A & 0x0f0f0f0f); }
INLINE vi nibbles_high(vi a) { OF_PARTS(vi, (A >> 4) & 0x0f0f0f0f); }
INLINE vi table_look_up(const uint8_t *table, vi index) {
  uint8_t bytes[64];
  vi_store(bytes, index);
  for (int i = 0; i < 64; i++) bytes[i] = table[bytes[i]];
  return vi_load(bytes);
}
/* the even and the odd bytes of each lane as two 16-bit numbers, times two of the activations: no sum can overflow */
#if defined(__AVX2__)
#define PAIRS(x, y) (ni)_mm256_madd_epi16((__m256i)(x), (__m256i)(y))
#elif defined(__SSE2__) && !defined(__AVX__)
#define PAIRS(x, y) (ni)_mm_madd_epi16((__m128i)(x), (__m128i)(y))
#else
#define PAIRS(x, y) (((x) & 0xffff) * ((y) << 16 >> 16) + ((x) >> 16) * ((y) >> 16))
#endif
INLINE vi dot_bytes(vi sum, vi a, const int8_t *four) {
  const ni even = vi_set((int32_t)((uint16_t)four[0] | (uint32_t)(uint16_t)four[2] << 16)).part[0];
  const ni odd = vi_set((int32_t)((uint16_t)four[1] | (uint32_t)(uint16_t)four[3] << 16)).part[0];
  OF_PARTS(vi, sum.part[p] + PAIRS(A & 0x00ff00ff, even) + PAIRS(A >> 8 & 0x00ff00ff, odd));
}
#undef PAIRS
#undef A
#undef B
#undef PART
#undef LANE
#undef OF_PARTS
#undef EACH

#endif
