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

/* 16 numbers of one token in the page's format, at `to`, `stride` numbers apart. inverse: KV_INT8, 127 / peak */
INLINE void store(vf x, int64_t format, float inverse, void *to, long stride) {
  if (format == KV_FP32) {
    float *at = to, lane[LANES];
    vf_store(lane, x);
    for (long i = 0; i < LANES; i++) at[i * stride] = lane[i];
  } else if (format == KV_FP16) {
    uint16_t *at = to, lane[LANES];
    vf_store_half(lane, x);
    for (long i = 0; i < LANES; i++) at[i * stride] = lane[i];
  } else {
    int8_t *at = to, lane[LANES];
    const vf code = vf_round(vf_mul(x, vf_set(inverse)));
    vi_store_int8(lane, vf_to_int(vf_min(vf_max(code, vf_set(-127.0f)), vf_set(127.0f))));
    for (long i = 0; i < LANES; i++) at[i * stride] = lane[i];
  }
}

/* One token of one head: dimension i at number from + i * stride of the page. scale: where a KV_INT8 page keeps it */
static void store_token(const float *x, long dim, int64_t format, void *page, int64_t from, long stride, float *scale) {
  float inverse = 0.0f;
  if (format == KV_INT8) {
    const float peak = peak_of(x, dim);
    *scale = scale_for(peak, 127.0f);
    inverse = inverse_for(peak, 127.0f);
  }
  const int64_t bytes = format == KV_FP32 ? 4 : format == KV_FP16 ? 2 : 1;
  for (long i = 0; i < dim; i += LANES)
    store(vf_load(x + i), format, inverse, (char *)page + (from + i * stride) * bytes, stride);
}

void attention_write(const Attention *a, long layer, long first_row, long end_row) {
  const Model *m = a->model;
  const Step *s = a->step;
  const Layer *l = m->layer + layer;
  const int64_t dim = m->head_dim;
  int64_t sequence = 0;
  for (long row = first_row; row < end_row; row++) {
    while (s->first_row[sequence + 1] <= row) sequence++;
    const int64_t position = s->positions[row], token = position % BLOCK;
    const int64_t block = s->blocks[s->first_block[sequence] + position / BLOCK];
    const float *cos = s->cos + position * (dim / 2), *sin = s->sin + position * (dim / 2);
    for (int64_t h = 0; h < m->heads; h++) {
      float *q = a->q + (row * m->heads + h) * dim;
      if (l->q_norm) rms_norm_row(q, l->q_norm, dim, m->eps, q);
      rotate(q, cos, sin, dim);
    }
    for (int64_t h = 0; h < m->kv_heads; h++) {
      float *k = a->k + (row * m->kv_heads + h) * dim;
      const float *v = a->v + (row * m->kv_heads + h) * dim;
      const int64_t head = block * m->kv_heads + h, page = head * BLOCK * dim;
      float *const scales[] = {s->kv_format == KV_INT8 ? s->key_scales[layer] + head * BLOCK + token : NULL,
                               s->kv_format == KV_INT8 ? s->value_scales[layer] + head * BLOCK + token : NULL};
      if (l->k_norm) rms_norm_row(k, l->k_norm, dim, m->eps, k);
      rotate(k, cos, sin, dim);
      const int64_t group = page + token / LANES * LANES * dim;
      store_token(k, dim, s->kv_format, s->keys[layer], group + token % LANES, LANES, scales[0]);
      store_token(v, dim, s->kv_format, s->values[layer], page + token * dim, 1, scales[1]);
    }
  }
}
