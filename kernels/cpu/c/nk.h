/* What the files here share: a packed matrix, quantized activations, a model, one step.
 *
 * Panels. A matrix is cut into panels of 16 output rows, one row a lane. Within a panel weights lie in the order in
 * which the product reads them:
 *
 *     CODES4, TABLE4   [cols / 8][16 rows][4 bytes]   byte j of a row: code of column 8c + j in its low half,
 *                                                     of column 8c + 4 + j in its high half
 *     CODES8           [cols / 4][16 rows][4 bytes]   code + 128 of column 4c + j
 *     PLANES8          two CODES4 regions after each other: the high nibbles of (code + 128), then the low ones
 *     scales, minimums [cols / group][16 rows]        fp16 or fp32
 *
 * A panel is its codes, then its scales, then its minimums, and the next one follows: a product reads memory in order.
 * The last panel is padded with zero rows. Codes are unsigned; `bias` says which number code 0 stands for, and is taken
 * off in whole numbers (sum of code * a - bias * sum of a), so that nothing is lost to rounding.
 */
#ifndef NK_H
#define NK_H

#include "team.h"

enum { CODES4 = 0, TABLE4 = 1, CODES8 = 2, PLANES8 = 3 };
enum { BIAS_0 = 0, BIAS_8 = 1, BIAS_128 = 2 };
enum { MODE_A16 = 0, MODE_A8G32 = 1, MODE_A8G16 = 2, MODE_TOKEN = 3, MODE_TENSOR = 4, MODE_STATIC = 5 };
enum { PLACE_ATTENTION = 0, PLACE_OUTPUT = 1, PLACE_FFN = 2, PLACE_DOWN = 3 }; /* inputs of qkv, o, gate/up, down */
enum { KV_FP32 = 0, KV_FP16 = 1, KV_INT8 = 2, KV_INT4 = 3, KV_KIVI4 = 4 };

typedef struct {
  int64_t rows, cols;      /* outputs, inputs; cols a multiple of 32 */
  int64_t kind, bias;      /* of the enumerations above */
  int64_t group;           /* columns a scale: 16, or a multiple of 32; divides cols */
  int64_t scale16;         /* scales and minimums are fp16, else fp32 */
  double factor;           /* an fp32 number: a scale is fp32(what is stored * factor); 1 beside minimums */
  int64_t code_bytes;      /* codes of one panel */
  int64_t panel_bytes;     /* from one panel to the next, a multiple of 64 */
  const uint8_t *codes;    /* of the first panel, 64-byte aligned, as are its scales and minimums */
  const uint8_t *scales, *minimums; /* of the first panel; minimums may be NULL */
  const float *offset;     /* [panels * 16] added to the product, the layer's own bias, or NULL */
  uint8_t table[16];       /* TABLE4: entries + 128 */
} Matrix;

/* Rows of activations as whole numbers. For every row and 32- or 16-column step: the scale, and what the products need
 * of the sum of its codes. MODE_A16 has two planes, a = scale * (256 * high + low); the others have high only. */
typedef struct {
  int8_t *high, *low;                    /* [rows][cols] */
  float *scale32, *scale16;              /* [rows][cols / 32], [rows][cols / 16] */
  float *sum32, *sum16;                  /* scale * sum of codes */
  int32_t *start32[3], *start16[3];      /* -bias * sum of codes, for BIAS_0, BIAS_8, BIAS_128 */
} Act;

typedef struct {
  Matrix q, k, v, o, gate, up, down;
  const float *attn_norm, *ffn_norm; /* [hidden] */
  const float *q_norm, *k_norm;      /* [head_dim], or NULL */
} Layer;

typedef struct {
  int64_t hidden, intermediate, layers, heads, kv_heads, head_dim, vocab; /* head_dim a multiple of 16 */
  int64_t mode;                                                           /* MODE_... */
  double eps;
  Matrix embedding, head;  /* the same in tied models */
  const float *final_norm;
  const Layer *layer;
  const float *static_peak; /* MODE_STATIC: largest magnitude at each place (4 * layer + PLACE_..., the head's last) */
  float *peaks;             /* where to note it, or NULL */
} Model;

/* One step: `rows` tokens of `sequences` sequences, flattened; nanokit/model/batch.py draws it. The pages of a layer
 * begin at keys[layer] and values[layer] (nanokit/kv/pages.py draws them), its blocks block_bytes after each other.
 * KV_INT8 and KV_INT4 pages have a fp32 scale for each [block][kv head][token]. KV_KIVI4 pages are fp16 while they are
 * written, and full ones, but for the row's own, are read as records [block][kv head] of sealed[layer] (kivi.py). */
typedef struct {
  int64_t rows, sequences;
  const int64_t *tokens, *positions;       /* [rows] */
  const int64_t *first_row, *first_block;  /* [sequences + 1] into rows and into blocks */
  const int64_t *blocks;                   /* block ids of all sequences */
  const float *cos, *sin;                  /* [positions][head_dim / 2] */
  int64_t kv_format;                       /* KV_... */
  void *const *keys, *const *values;       /* [layers] */
  float *const *key_scales, *const *value_scales; /* [layers], of formats with scales */
  const float *kv_peaks;                   /* [layers][2][kv_heads] what keys, values are scaled by; NULL: their own */
  int64_t block_bytes;
  void *const *sealed;                     /* [layers], KV_KIVI4 only */
  int64_t fulls;
  const int64_t *full;                     /* [fulls] blocks that this step fills, to be sealed */
} Step;

/* bytes of n numbers in a page as it is written */
INLINE int64_t kv_bytes(int64_t format, int64_t n) {
  return format == KV_FP32 ? 4 * n : format == KV_INT8 ? n : format == KV_INT4 ? n / 2 : 2 * n;
}

#define BLOCK 64 /* tokens a block, and the fixed chunk over which attention is summed up before it is merged */

/* kivi.c. A record: codes of keys, codes of values; scales and minimums of keys [2][2][dim], of values
 * [groups][2][64] */
#define KIVI_LEVELS 15
#define KIVI_KEY_PARAMS 4 /* fp16 numbers a dimension */
INLINE int64_t kivi_value_group(int64_t dim) { return dim % 32 ? dim : 32; }
INLINE int64_t kivi_value_params(int64_t dim) { return dim / kivi_value_group(dim) * 2 * BLOCK; }
INLINE int64_t kivi_record(int64_t dim) { return BLOCK * dim + 2 * (KIVI_KEY_PARAMS * dim + kivi_value_params(dim)); }

/* attention.c, plan.c. A plan is made once a step, and used in every layer in this order:
 *   attention_write  for all writes of the plan, each of a row or of some rows whose tokens share bytes: q and k
 *                    normalized (where the model has q_norm) and rotated, k and v into their pages;
 *                    q [rows][heads * head_dim] is changed in place; k, v [rows][kv_heads * head_dim]
 *   attention_seal   for [fulls][kv_heads] of the step, when all is written: full KV_KIVI4 pages
 *   attention_task   for all tasks of the plan: what can be computed apart
 *   attention_merge  for all rows: out [rows][heads * head_dim]
 */
typedef struct Attention Attention;
struct Attention {
  const Model *model;
  const Step *step;
  float *q, *k, *v, *out;
  long writes, tasks;
  void *private_plan; /* owned; of plan.h */
};
void attention_write_rows(const Attention *a, long layer, long first_row, long end_row); /* kv.c */
/* 0, or -1 when memory is lacking. threads: how finely to cut; never changes a result. */
int attention_plan(Attention *a, const Model *model, const Step *step, int threads);
void attention_free(Attention *a);
void attention_write(const Attention *a, long layer, long first_write, long end_write);
void attention_seal(const Attention *a, long layer, long first, long end); /* kivi.c */
void attention_fetch(const Attention *a, long layer, long task); /* soon needed: what the task begins with */
void attention_task(const Attention *a, long layer, long first_task, long end_task);
void attention_merge(const Attention *a, long layer, long first_row, long end_row);

/* activation.c. n, cols: multiples of 16, of 32. peak: the largest magnitude that MODE_TENSOR and MODE_STATIC scale by;
 * the other modes find their own. */
void rms_norm_row(const float *x, const float *weight, long n, double eps, float *out);
void silu_gate_row(const float *gate, const float *up, long n, float *out);
void quantize_row(const float *x, long cols, long mode, float peak, const Act *act, long row);
/* of the codes for magnitudes up to peak, most being the largest code; a smaller peak than TINY counts as zero, since
 * its inverse would overflow */
#define TINY 0x1p-100f
INLINE float scale_for(float peak, float most) { return peak < TINY ? 0.0f : peak / most; }
INLINE float inverse_for(float peak, float most) { return peak < TINY ? 0.0f : most / peak; }
/* the columns first ... end - 1 of a row, both multiples of 32; not for MODE_TOKEN, which needs all of them */
void quantize_part(const float *x, long cols, long first, long end, long mode, float peak, const Act *act, long row);
float peak_of(const float *x, long n); /* largest magnitude; NaN if there is one */
long act_bytes(long rows, long cols);
void act_place(Act *act, void *memory, long rows, long cols); /* memory: act_bytes, 64-byte aligned */

/* product.c: out[r][16 p ...] = (add ? out : 0) + W x + offset for all rows and the panels p = first ... end - 1.
 * stride: floats from one row of out to the next, at least 16 * panels. */
void product_range(const Matrix *m, const Act *act, long mode, long rows, float *out, long stride, int add, long first,
                   long end);
void product_fetch(const Matrix *m, long panel); /* soon needed: the weights from this panel on */
/* The 16 outputs of one panel and one row: the same bits. */
void product_row(const Matrix *m, const Act *act, long mode, long row, long panel, float *out);
/* unpack.c: weights of one row, fp32 [cols] */
void unpack_row(const Matrix *m, long row, float *out);
INLINE long panels_of(const Matrix *m) { return (m->rows + LANES - 1) / LANES; }

/* forward.c and head.c: whole steps. A workspace belongs to one bound model and grows as its steps need it. */
enum { NK_OK = 0, NK_NO_MEMORY = -1 };

typedef struct {
  void *memory;
  int64_t bytes;
} Buffer;

typedef struct {
  Buffer rows, act, logits;
  Attention attention;
} Workspace;

int buffer_reserve(Buffer *b, int64_t bytes); /* at least so many, 64-byte aligned, content undefined */
Workspace *nk_workspace_create(void);
void nk_workspace_destroy(Workspace *w);

/* out [rows][hidden]: hidden states after the final norm; keys and values of the step are in its pages afterwards. */
int nk_forward(Team *team, Workspace *w, const Model *model, const Step *step, float *out);
/* logits [rows][stride] of hidden [rows][hidden], stride at least 16 * panels; of ids (below vocab): [rows][count] */
int nk_logits(Team *team, Workspace *w, const Model *model, long rows, const float *hidden, float *logits, long stride);
int nk_logits_of(Team *team, Workspace *w, const Model *model, long rows, const float *hidden, const int64_t *ids,
                 long count, float *logits);
/* select.c: the first place of the largest of n values; -1 when one is NaN or infinite, or all are -inf */
int64_t nk_row_argmax(const float *x, int64_t n);
/* that of the logits of every row */
int nk_argmax(Team *team, Workspace *w, const Model *model, long rows, const float *hidden, int64_t *best);

#endif
