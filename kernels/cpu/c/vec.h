/* Sixteen fp32 or int32 lanes: the one vector width of all kernels here.
 *
 * Two implementations behind the same names. AVX-512 uses intrinsics. The portable one uses the compiler's vector
 * extension, which GCC and Clang lower to whatever the target has (two AVX2 registers, four NEON ones, scalar code), so
 * that it is right everywhere and not slow. A multiply and an add are one rounding in the first (`fma`) and two in the
 * second; within a variant every kernel does the same operations in the same order, which is what makes a row's result
 * independent of its neighbours.
 */
#ifndef NK_VEC_H
#define NK_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

/* ---- denormals: flushed alike in every thread that computes -------------------------------------------------------*/

#if defined(__SSE2__)
typedef unsigned int FloatMode;
INLINE FloatMode flush_denormals(void) {
  FloatMode old = _mm_getcsr();
  _mm_setcsr(old | 0x8040); /* FTZ | DAZ */
  return old;
}
INLINE void restore_float_mode(FloatMode old) { _mm_setcsr(old); }
#elif defined(__aarch64__)
typedef uint64_t FloatMode;
INLINE FloatMode flush_denormals(void) {
  FloatMode old;
  __asm__ volatile("mrs %0, fpcr" : "=r"(old));
  __asm__ volatile("msr fpcr, %0" ::"r"(old | (1ull << 24)));
  return old;
}
INLINE void restore_float_mode(FloatMode old) { __asm__ volatile("msr fpcr, %0" ::"r"(old)); }
#else
typedef int FloatMode;
INLINE FloatMode flush_denormals(void) { return 0; }
INLINE void restore_float_mode(FloatMode old) { (void)old; }
#endif

INLINE float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff, bits;
  float value;
  if (rest < 0x0400) { /* zero or subnormal: rest * 2^-24, exact, and never a denormal fp32 */
    value = (float)(int32_t)rest * 0x1p-24f;
    memcpy(&bits, &value, 4);
  } else if (rest >= 0x7c00) {
    bits = 0x7f800000u | (rest & 0x3ff) << 13;
  } else {
    bits = (rest << 13) + (112u << 23);
  }
  bits |= sign;
  memcpy(&value, &bits, 4);
  return value;
}

INLINE uint16_t float_to_half(float value) { /* to nearest, ties to even */
  uint32_t bits, sign;
  memcpy(&bits, &value, 4);
  sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (bits < 0x38800000) { /* below 2^-14: count in units of 2^-24 */
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    return (uint16_t)(sign | (uint32_t)(int32_t)rintf(magnitude * 0x1p24f));
  }
  bits += 0x0fff + (bits >> 13 & 1);
  return (uint16_t)(sign | ((bits - (112u << 23)) >> 13));
}

#if defined(NK_AVX512)
/* ---- AVX-512 with VNNI --------------------------------------------------------------------------------------------*/
#define NK_VARIANT "avx512-vnni"

typedef __m512 vf;
typedef __m512i vi;

INLINE vf vf_set(float x) { return _mm512_set1_ps(x); }
INLINE vf vf_zero(void) { return _mm512_setzero_ps(); }
INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE vf vf_load_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void vf_store_half(uint16_t *p, vf x) {
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE vf vf_load_int8(const int8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
/* sixteen numbers of half a byte, less `zero`: the low halves of 8 bytes, then their high ones; one half (shift: 0 or
 * 4) of 16 bytes. A permutation looks at the lowest four bits of its index alone: it masks, widens and subtracts in
 * one. */
INLINE vf vf_of_halves(__m512i index, float zero) {
  const vf codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_permutexvar_ps(index, _mm512_sub_ps(codes, _mm512_set1_ps(zero)));
}
INLINE vf vf_load_pairs(const uint8_t *p, float zero) {
  int64_t eight;
  memcpy(&eight, p, 8);
  const __m512i shift = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4);
  return vf_of_halves(_mm512_srlv_epi32(_mm512_cvtepu8_epi32(_mm_set1_epi64x(eight)), shift), zero);
}
INLINE vf vf_load_halves(const uint8_t *p, int shift, float zero) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  return vf_of_halves(_mm512_srl_epi32(bytes, _mm_cvtsi32_si128(shift)), zero);
}
INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf vf_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE float vf_max_lane(vf a) { return _mm512_reduce_max_ps(a); }
/* the larger magnitude of each lane, compared as bits, so that a NaN wins over everything; and of all lanes */
INLINE vf vf_peak(vf a, vf b) {
  vi magnitude = _mm512_castps_si512(_mm512_abs_ps(b));
  return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), magnitude));
}
INLINE float vf_peak_lane(vf a) {
  int32_t bits = _mm512_reduce_max_epi32(_mm512_castps_si512(a));
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
INLINE vf vf_from_int(vi a) { return _mm512_cvtepi32_ps(a); }
INLINE vi vf_to_int(vf a) { return _mm512_cvtps_epi32(a); } /* to nearest, ties to even */
/* 2^n for whole numbers n in -126 ... 127 given as floats */
INLINE vf vf_exp2_whole(vf n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
/* lanes below count keep x, the others become y */
INLINE vf vf_first(int count, vf x, vf y) {
  __mmask16 keep = count >= 16 ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
  return _mm512_mask_blend_ps(keep, y, x);
}
INLINE vi vi_set(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vi vi_zero(void) { return _mm512_setzero_si512(); }
INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE void vi_store(void *p, vi x) { _mm512_storeu_si512(p, x); }
INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
INLINE vi vi_shift_right(vi a, int n) { return _mm512_srai_epi32(a, (unsigned)n); } /* arithmetic */
INLINE vf vf_of_bits(vi a) { return _mm512_castsi512_ps(a); }
INLINE vi vf_bits(vf a) { return _mm512_castps_si512(a); }
INLINE vf vf_from_unsigned(vi a) { return _mm512_cvtepu32_ps(a); }
/* bit i: whether lane i of a is at least that of b; never for a NaN */
INLINE uint32_t vf_at_least(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
/* lanes in which `test` is 0 take x, the others y */
INLINE vf vf_where_zero(vi test, vf x, vf y) { return _mm512_mask_blend_ps(_mm512_test_epi32_mask(test, test), x, y); }
INLINE vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
/* both halves of the unsigned 64-bit products */
INLINE void vi_multiply_wide(vi a, uint32_t factor, vi *high, vi *low) {
  vi even = _mm512_mul_epu32(a, _mm512_set1_epi32((int32_t)factor));
  vi odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_set1_epi32((int32_t)factor));
  *high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
  *low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
}
/* four vectors as a 4 x 16 matrix: out[k], quarter q, has lane 4 q + k of all four */
INLINE void vi_transpose4(const vi in[4], vi out[4]) {
  vi a = _mm512_unpacklo_epi32(in[0], in[1]), b = _mm512_unpacklo_epi32(in[2], in[3]);
  vi c = _mm512_unpackhi_epi32(in[0], in[1]), d = _mm512_unpackhi_epi32(in[2], in[3]);
  out[0] = _mm512_unpacklo_epi64(a, b);
  out[1] = _mm512_unpackhi_epi64(a, b);
  out[2] = _mm512_unpacklo_epi64(c, d);
  out[3] = _mm512_unpackhi_epi64(c, d);
}
INLINE vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
INLINE vi vi_xor(vi a, vi b) { return _mm512_xor_si512(a, b); }
INLINE vi vi_shift_left(vi a, int n) { return _mm512_slli_epi32(a, (unsigned)n); }
INLINE void vi_store_int8(int8_t *p, vi x) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(x)); }
/* the low or high nibbles of 64 bytes */
INLINE vi nibbles_low(vi x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
INLINE vi nibbles_high(vi x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
/* each byte 0 ... 15 replaced by that entry of a 16-byte table */
INLINE vi table_look_up(const uint8_t *table, vi index) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), index);
}
/* lane i += sum over j of weight byte 4 i + j (unsigned) times activation j (signed; four of them at `four`) */
INLINE vi dot_bytes(vi sum, vi weights, const int8_t *four) {
  int32_t word;
  memcpy(&word, four, 4);
  return _mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(word));
}
#else
/* ---- portable -----------------------------------------------------------------------------------------------------*/
#define NK_VARIANT "portable"

#include "vec_portable.h"
#endif

/* ---- eight doubles: by the compiler's vector extension in both variants ------------------------------------------*/

typedef double vd __attribute__((vector_size(64)));
typedef int64_t vl __attribute__((vector_size(64)));

INLINE vd vd_set(double x) { return (vd){0} + x; }
INLINE vd vd_load_float(const float *p) {
  float x __attribute__((vector_size(32)));
  memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, vd);
}
#if defined(NK_AVX512)
INLINE vd vd_fma(vd a, vd b, vd c) { return (vd)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
#else
INLINE vd vd_fma(vd a, vd b, vd c) { return a * b + c; }
#endif

/* ---- on top of either ---------------------------------------------------------------------------------------------*/

#if defined(NK_AVX512)
/* The sum of sixteen lanes, always in the order of a binary tree: lane i and i + 8, then + 4, + 2, + 1. */
INLINE float vf_sum_lanes(vf x) {
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE int32_t vi_sum_lanes(vi x) { return _mm512_reduce_add_epi32(x); }
#else
INLINE float vf_sum_lanes(vf x) {
  float v[LANES];
  vf_store(v, x);
  for (int width = 8; width >= 1; width /= 2)
    for (int i = 0; i < width; i++) v[i] += v[i + width];
  return v[0];
}

INLINE int32_t vi_sum_lanes(vi x) {
  int32_t v[LANES], sum = 0;
  vi_store(v, x);
  for (int i = 0; i < LANES; i++) sum += v[i];
  return sum;
}
#endif

/* e^x to about 2 ulp: 2^n times a polynomial on [-ln2/2, ln2/2] (Cephes' coefficients). Arguments are clamped to
 * -87.3 ... 88, so that e^-inf is about 1e-38 rather than 0; callers who need the zero multiply by it or mask. */
INLINE vf vf_exp(vf x) {
  x = vf_min(vf_set(88.0f), vf_max(vf_set(-87.3f), x)); /* in this order NaN stays NaN */
  vf n = vf_round(vf_mul(x, vf_set(1.44269504f)));
  vf r = vf_fma(n, vf_set(-0.693359375f), x);
  r = vf_fma(n, vf_set(2.12194440e-4f), r);
  vf p = vf_set(1.9875691500e-4f);
  p = vf_fma(p, r, vf_set(1.3981999507e-3f));
  p = vf_fma(p, r, vf_set(8.3334519073e-3f));
  p = vf_fma(p, r, vf_set(4.1665795894e-2f));
  p = vf_fma(p, r, vf_set(1.6666665459e-1f));
  p = vf_fma(p, r, vf_set(5.0000001201e-1f));
  p = vf_fma(vf_mul(p, r), r, vf_add(r, vf_set(1.0f)));
  return vf_mul(p, vf_exp2_whole(n));
}

#endif
