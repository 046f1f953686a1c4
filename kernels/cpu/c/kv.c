/* New queries, keys and values: normalized, rotated and, keys and values, stored in their pages (kernels/paged.py). */
#include "nk.h"

/* Pairs (i, i + dim / 2), each operation rounded once: bit for bit `rotate` of kernels/reference.py. */
static void rotate(float *restrict x, const float *restrict cos, const float *restrict sin, long dim) {
  const long half = dim / 2;
  for (long i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

/* 16 numbers at `to`, `stride` apart, in a format of floats */
INLINE void store_floats(vf x, int64_t format, void *to, long stride) {
  if (format == KV_FP32) {
    float *at = to, lane[LANES];
    vf_store(lane, x);
    for (long i = 0; i < LANES; i++) at[i * stride] = lane[i];
  } else {
    uint16_t *at = to, lane[LANES];
    vf_store_half(lane, x);
    for (long i = 0; i < LANES; i++) at[i * stride] = lane[i];
  }
}

/* 16 codes -limit ... limit */
INLINE void codes_of(vf x, float inverse, float limit, int8_t *codes) {
  const vf code = vf_round(vf_mul(x, vf_set(inverse)));
  vi_store_int8(codes, vf_to_int(vf_min(vf_max(code, vf_set(-limit)), vf_set(limit))));
}

/* A nibble of a byte, the other one left as it is. */
INLINE void set_half(uint8_t *byte, int shift, int code) {
  *byte = (uint8_t)((*byte & 0xf0 >> shift) | code << shift);
}

/* One token of one head. keys: of the token's group of 16, lane being its place there; else they are values, of the
 * token. peak: what KV_INT8 and KV_INT4 scale by; scale: where the page keeps it */
static void store_codes(const float *x, long dim, int64_t format, int is_key, void *to, long lane, float peak,
                        float *scale) {
  const float limit = format == KV_INT8 ? 127.0f : 7.0f, inverse = inverse_for(peak, limit);
  const long half = dim / 2;
  uint8_t *bytes = to;
  *scale = scale_for(peak, limit);
  for (long i = 0; i < dim; i += LANES) {
    int8_t code[LANES];
    codes_of(vf_load(x + i), inverse, limit, code);
    for (long j = 0, n = i; j < LANES; j++, n++)
      if (format == KV_INT8)
        bytes[is_key ? n * LANES + lane : n] = (uint8_t)code[j];
      else if (is_key)
        set_half(bytes + n * 8 + lane % 8, lane / 8 * 4, code[j] + 8);
      else
        set_half(bytes + n % half, n / half * 4, code[j] + 8);
  }
}

/* The keys or the values of one token of one head, stored in their page. fixed: the peak to scale by, or NULL for the
 * token's own. One that is not finite stays in the scale, since codes cannot hold it. */
static void store_token(const float *x, long dim, int64_t format, int is_key, char *page, long token,
                        const float *fixed, float *scale) {
  const long lane = token % LANES;
  char *to = page + kv_bytes(format, (is_key ? token - lane : token) * dim);
  if (format == KV_INT8 || format == KV_INT4) {
    float peak = peak_of(x, dim);
    if (fixed && peak < INFINITY) peak = *fixed;
    store_codes(x, dim, format, is_key, to, lane, peak, scale);
    return;
  }
  const long stride = is_key ? LANES : 1;
  if (is_key) to += kv_bytes(format, lane);
  for (long i = 0; i < dim; i += LANES) store_floats(vf_load(x + i), format, to + kv_bytes(format, i * stride), stride);
}

static void write_row(const Attention *a, long layer, long row, int64_t block) {
  const Model *m = a->model;
  const Step *s = a->step;
  const Layer *l = m->layer + layer;
  const int64_t dim = m->head_dim, position = s->positions[row], token = position % BLOCK;
  const float *cos = s->cos + position * (dim / 2), *sin = s->sin + position * (dim / 2);
  for (int64_t h = 0; h < m->heads; h++) {
    float *q = a->q + (row * m->heads + h) * dim;
    if (l->q_norm) rms_norm_row(q, l->q_norm, dim, m->eps, q);
    rotate(q, cos, sin, dim);
  }
  for (int64_t h = 0; h < m->kv_heads; h++) {
    float *k = a->k + (row * m->kv_heads + h) * dim;
    const float *v = a->v + (row * m->kv_heads + h) * dim;
    const int64_t page = block * s->block_bytes + h * kv_bytes(s->kv_format, BLOCK * dim);
    const int64_t at = (block * m->kv_heads + h) * BLOCK + token;
    const float *fixed = s->kv_peaks ? s->kv_peaks + layer * 2 * m->kv_heads + h : NULL;
    const int scaled = s->kv_format == KV_INT8 || s->kv_format == KV_INT4;
    if (l->k_norm) rms_norm_row(k, l->k_norm, dim, m->eps, k);
    rotate(k, cos, sin, dim);
    store_token(k, dim, s->kv_format, 1, (char *)s->keys[layer] + page, token, fixed,
                scaled ? s->key_scales[layer] + at : NULL);
    store_token(v, dim, s->kv_format, 0, (char *)s->values[layer] + page, token, fixed ? fixed + m->kv_heads : NULL,
                scaled ? s->value_scales[layer] + at : NULL);
  }
}

void attention_write_rows(const Attention *a, long layer, long first_row, long end_row) {
  const Step *s = a->step;
  int64_t sequence = 0;
  for (long row = first_row; row < end_row; row++) {
    while (s->first_row[sequence + 1] <= row) sequence++;
    write_row(a, layer, row, s->blocks[s->first_block[sequence] + s->positions[row] / BLOCK]);
  }
}
