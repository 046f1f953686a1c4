/* Rows of activations: RMS norm, the gate, and quantization to whole numbers (contract: kernels/activations.py).
 *
 * Every operation rounds once, so that codes and scales are those of the reference bit for bit; only the order of a
 * norm's sum is this file's own. A NaN or infinity in a row makes its scale NaN or infinite and so comes out at the
 * other end.
 */
#include "nk.h"

void rms_norm_row(const float *x, const float *weight, long n, double eps, float *out) {
  vf squares = vf_zero();
  for (long i = 0; i < n; i += LANES) squares = vf_fma(vf_load(x + i), vf_load(x + i), squares);
  vf scale = vf_set(1.0f / sqrtf(vf_sum_lanes(squares) / (float)n + (float)eps));
  for (long i = 0; i < n; i += LANES) vf_store(out + i, vf_mul(vf_mul(vf_load(x + i), scale), vf_load(weight + i)));
}

void silu_gate_row(const float *gate, const float *up, long n, float *out) {
  for (long i = 0; i < n; i += LANES) {
    vf g = vf_load(gate + i);
    vf silu = vf_div(g, vf_add(vf_set(1.0f), vf_exp(vf_sub(vf_zero(), g))));
    vf_store(out + i, vf_mul(silu, vf_load(up + i)));
  }
}

float peak_of(const float *x, long n) {
  vf peak = vf_zero();
  for (long i = 0; i < n; i += LANES) peak = vf_peak(peak, vf_load(x + i));
  return vf_peak_lane(peak);
}

#define ACT_PLANES 2
#define ACT_WORDS 5 /* scale, sum and three starts, fp32 or int32: once for each 32 columns and once for each 16 */

long act_bytes(long rows, long cols) {
  return rows * (ACT_PLANES * cols + (cols / 32 + cols / 16) * ACT_WORDS * 4) + 64;
}

void act_place(Act *act, void *memory, long rows, long cols) {
  char *at = memory;
  act->high = (int8_t *)at, at += rows * cols;
  act->low = (int8_t *)at, at += rows * cols;
  act->scale32 = (float *)at, at += rows * cols / 32 * 4;
  act->sum32 = (float *)at, at += rows * cols / 32 * 4;
  act->scale16 = (float *)at, at += rows * cols / 16 * 4;
  act->sum16 = (float *)at, at += rows * cols / 16 * 4;
  for (int bias = 0; bias < 3; bias++) {
    act->start32[bias] = (int32_t *)at, at += rows * cols / 32 * 4;
    act->start16[bias] = (int32_t *)at, at += rows * cols / 16 * 4;
  }
}

INLINE void note(float *scales, float *sums, int32_t *const starts[3], long at, float scale, int32_t sum) {
  scales[at] = scale;
  sums[at] = scale * (float)sum;
  starts[BIAS_0][at] = 0;
  starts[BIAS_8][at] = -8 * sum;
  starts[BIAS_128][at] = -128 * sum;
}

/* 16 columns: codes written, their sum returned */
INLINE int32_t encode(vf x, float inverse_scale, float most, int planes, int8_t *high, int8_t *low) {
  vf code = vf_round(vf_mul(x, vf_set(inverse_scale)));
  vi q = vf_to_int(vf_min(vf_max(code, vf_set(-most)), vf_set(most)));
  if (planes == 2) {
    vi upper = vi_shift_right(vi_add(q, vi_set(128)), 8);
    vi_store_int8(high, upper);
    vi_store_int8(low, vi_sub(q, vi_shift_left(upper, 8)));
  } else {
    vi_store_int8(high, q);
  }
  return vi_sum_lanes(q);
}

void quantize_row(const float *x, long cols, long mode, float peak, const Act *act, long row) {
  if (mode == MODE_TOKEN) peak = peak_of(x, cols);
  quantize_part(x, cols, 0, cols, mode, peak, act, row);
}

void quantize_part(const float *x, long cols, long first, long end, long mode, float peak, const Act *act, long row) {
  int planes = mode == MODE_A16 ? 2 : 1;
  float most = planes == 2 ? 32512.0f : 127.0f;
  for (long c = first; c < end; c += 32) {
    vf half[2] = {vf_load(x + c), vf_load(x + c + 16)};
    float peaks[2] = {peak, peak};
    if (mode == MODE_A8G16)
      for (int i = 0; i < 2; i++) peaks[i] = vf_peak_lane(vf_peak(vf_zero(), half[i]));
    else if (mode == MODE_A8G32 || mode == MODE_A16)
      peaks[0] = peaks[1] = vf_peak_lane(vf_peak(vf_peak(vf_zero(), half[0]), half[1]));
    int32_t sum = 0;
    for (int i = 0; i < 2; i++) {
      long at = row * cols + c + 16 * i;
      int32_t part = encode(half[i], inverse_for(peaks[i], most), most, planes, act->high + at, act->low + at);
      note(act->scale16, act->sum16, act->start16, at / 16, scale_for(peaks[i], most), part);
      sum += part;
    }
    note(act->scale32, act->sum32, act->start32, (row * cols + c) / 32, scale_for(peaks[0], most), sum);
  }
}
