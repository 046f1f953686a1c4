/* One step through all layers: five meetings of the team a layer.
 *
 *     q, k, v products            then, by rows: rope, k and v into the pages
 *     attention, by tasks         then, by rows: merge, quantize
 *     o product, added            then, by rows: norm, quantize
 *     gate and up products        then, by rows: silu(gate) * up, quantize
 *     down product, added         then, by rows: the next layer's norm, quantize (at the end the final norm)
 *
 * With one or two rows what follows a product is done by the thread that finishes it last (team.h). Every thread walks
 * this code with its own `Walk`; what they share is in the workspace.
 */
#include "nk.h"

#include <stdlib.h>

typedef struct {
  const Model *model;
  const Step *step;
  Workspace *workspace;
  float *hidden, *normed, *query, *key, *value, *gate, *up, *out;
  Act act;       /* of normed; later of the attention's output */
  Act wide_act;  /* of silu(gate) * up */
} Shared;

typedef struct {
  const Shared *shared;
  const Layer *weights;
  long layer;
  Cursor cursor;
} Walk;

int buffer_reserve(Buffer *b, int64_t bytes) {
  if (bytes <= b->bytes) return NK_OK;
  free(b->memory);
  b->bytes = 0;
  if (posix_memalign(&b->memory, 64, (size_t)(bytes + 63) / 64 * 64)) {
    b->memory = NULL;
    return NK_NO_MEMORY;
  }
  b->bytes = bytes;
  return NK_OK;
}

Workspace *nk_workspace_create(void) { return calloc(1, sizeof(Workspace)); }

void nk_workspace_destroy(Workspace *w) {
  if (!w) return;
  attention_free(&w->attention);
  free(w->rows.memory);
  free(w->act.memory);
  free(w->logits.memory);
  free(w);
}

/* ---- what is done by rows ------------------------------------------------------------------------------------------*/

/* Quantize the rows of x. MODE_TENSOR scales by the largest magnitude of the whole step, so each call looks at all of
 * it: it is there to be measured, not to be fast. */
static void quantize_rows(const Shared *s, const float *x, long cols, const Act *act, long place, long first, long end) {
  const Model *m = s->model;
  float peak = 0;
  if (m->mode == MODE_STATIC) peak = m->static_peak[place];
  if (m->mode == MODE_TENSOR) peak = peak_of(x, s->step->rows * cols);
  for (long r = first; r < end; r++) quantize_row(x + r * cols, cols, m->mode, peak, act, r);
}

static void norm_rows(const Shared *s, const float *weight, long place, long first, long end) {
  long n = s->model->hidden;
  for (long r = first; r < end; r++)
    rms_norm_row(s->hidden + r * n, weight, n, s->model->eps, s->normed + r * n);
  if (s->model->mode != MODE_TENSOR) quantize_rows(s, s->normed, n, &s->act, place, first, end);
}

static void work_embed(void *context, long first, long end) {
  Walk *w = context;
  const Shared *s = w->shared;
  const Model *m = s->model;
  for (long r = first; r < end; r++) unpack_row(&m->embedding, s->step->tokens[r], s->hidden + r * m->hidden);
  norm_rows(s, m->layer[0].attn_norm, PLACE_ATTENTION, first, end);
}

static void work_write(void *context, long first, long end) {
  Walk *w = context;
  attention_write(&w->shared->workspace->attention, w->layer, first, end);
}

static void work_merge(void *context, long first, long end) {
  Walk *w = context;
  const Shared *s = w->shared;
  const Attention *a = &s->workspace->attention;
  attention_merge(a, w->layer, first, end);
  if (s->model->mode != MODE_TENSOR)
    quantize_rows(s, a->out, s->model->heads * s->model->head_dim, &s->act, 4 * w->layer + PLACE_OUTPUT, first, end);
}

static void work_ffn_norm(void *context, long first, long end) {
  Walk *w = context;
  norm_rows(w->shared, w->weights->ffn_norm, 4 * w->layer + PLACE_FFN, first, end);
}

static void work_gate(void *context, long first, long end) {
  Walk *w = context;
  const Shared *s = w->shared;
  long n = s->model->intermediate;
  for (long r = first; r < end; r++) silu_gate_row(s->gate + r * n, s->up + r * n, n, s->gate + r * n);
  if (s->model->mode != MODE_TENSOR) quantize_rows(s, s->gate, n, &s->wide_act, 4 * w->layer + PLACE_DOWN, first, end);
}

static void work_next_norm(void *context, long first, long end) {
  Walk *w = context;
  const Shared *s = w->shared;
  const Model *m = s->model;
  if (w->layer + 1 < m->layers) {
    norm_rows(s, w->weights[1].attn_norm, 4 * (w->layer + 1) + PLACE_ATTENTION, first, end);
    return;
  }
  for (long r = first; r < end; r++)
    rms_norm_row(s->hidden + r * m->hidden, m->final_norm, m->hidden, m->eps, s->out + r * m->hidden);
}

/* MODE_TENSOR and the noting of peaks need all rows at once: an item of their own, between two meetings. */
typedef struct {
  Walk *walk;
  const float *x;
  long cols, place;
  const Act *act;
} Whole;

static void work_whole(void *context, long first, long end) {
  Whole *whole = context;
  const Shared *s = whole->walk->shared;
  (void)first, (void)end;
  if (s->model->mode == MODE_TENSOR) quantize_rows(s, whole->x, whole->cols, whole->act, whole->place, 0, s->step->rows);
  if (s->model->peaks) {
    float peak = peak_of(whole->x, s->step->rows * whole->cols);
    if (!(peak <= s->model->peaks[whole->place])) s->model->peaks[whole->place] = peak;
  }
}

static void whole(Team *team, Walk *w, const float *x, long cols, long place, const Act *act) {
  const Model *m = w->shared->model;
  Whole context = {w, x, cols, 4 * w->layer + place, act};
  if (m->mode == MODE_TENSOR || m->peaks) team_phase(team, &w->cursor, 1, 1, work_whole, 0, NULL, &context);
}

/* ---- products ------------------------------------------------------------------------------------------------------*/

/* The panels first ... end - 1 of several matrices in a row. */
static void panels(const Shared *s, const Matrix *const *matrices, float *const *outs, int count, const Act *act, int add,
                   long first, long end) {
  for (int i = 0; i < count && first < end; i++) {
    long n = panels_of(matrices[i]), here = end < n ? end : n;
    if (first < n) product_range(matrices[i], act, s->model->mode, s->step->rows, outs[i], n * LANES, add, first, here);
    first = first > n ? first - n : 0;
    end -= n;
  }
}

static void work_qkv(void *context, long first, long end) {
  Walk *w = context;
  const Shared *s = w->shared;
  const Matrix *matrices[] = {&w->weights->q, &w->weights->k, &w->weights->v};
  float *outs[] = {s->query, s->key, s->value};
  panels(s, matrices, outs, 3, &s->act, 0, first, end);
}

static void work_attention(void *context, long first, long end) {
  Walk *w = context;
  attention_task(&w->shared->workspace->attention, w->layer, first, end);
}

static void work_o(void *context, long first, long end) {
  Walk *w = context;
  const Matrix *matrices[] = {&w->weights->o};
  panels(w->shared, matrices, &w->shared->hidden, 1, &w->shared->act, 1, first, end);
}

static void work_gate_up(void *context, long first, long end) {
  Walk *w = context;
  const Shared *s = w->shared;
  const Matrix *matrices[] = {&w->weights->gate, &w->weights->up};
  float *outs[] = {s->gate, s->up};
  panels(s, matrices, outs, 2, &s->act, 0, first, end);
}

static void work_down(void *context, long first, long end) {
  Walk *w = context;
  const Matrix *matrices[] = {&w->weights->down};
  panels(w->shared, matrices, &w->shared->hidden, 1, &w->shared->wide_act, 1, first, end);
}

static void walk(Team *team, void *argument) {
  const Shared *s = argument;
  const Model *m = s->model;
  const Attention *a = &s->workspace->attention;
  const long rows = s->step->rows, least = rows > 8 ? 2 : 1;
  Walk w = {s, m->layer, 0, {0}};
  team_phase(team, &w.cursor, rows, 1, work_embed, 0, NULL, &w);
  for (; w.layer < m->layers; w.layer++, w.weights++) {
    const Layer *l = w.weights;
    whole(team, &w, s->normed, m->hidden, PLACE_ATTENTION, &s->act);
    team_phase(team, &w.cursor, panels_of(&l->q) + panels_of(&l->k) + panels_of(&l->v), least, work_qkv, rows, work_write,
               &w);
    team_phase(team, &w.cursor, a->tasks, 1, work_attention, rows, work_merge, &w);
    whole(team, &w, a->out, m->heads * m->head_dim, PLACE_OUTPUT, &s->act);
    team_phase(team, &w.cursor, panels_of(&l->o), least, work_o, rows, work_ffn_norm, &w);
    whole(team, &w, s->normed, m->hidden, PLACE_FFN, &s->act);
    team_phase(team, &w.cursor, panels_of(&l->gate) + panels_of(&l->up), least, work_gate_up, rows, work_gate, &w);
    whole(team, &w, s->gate, m->intermediate, PLACE_DOWN, &s->wide_act);
    team_phase(team, &w.cursor, panels_of(&l->down), least, work_down, rows, work_next_norm, &w);
  }
}

int nk_forward(Team *team, Workspace *workspace, const Model *m, const Step *step, float *out) {
  const long rows = step->rows, query = m->heads * m->head_dim, key = m->kv_heads * m->head_dim;
  const long inner = query > m->hidden ? query : m->hidden;
  if (rows == 0) return NK_OK;
  /* a layer takes at most 10 phases and 4 more in the modes that look at whole tensors */
  if (14 * m->layers + 2 > TEAM_MAX_PHASES) return NK_TOO_DEEP;
  int64_t floats = rows * (2 * m->hidden + 2 * query + 2 * key + 2 * m->intermediate);
  if (buffer_reserve(&workspace->rows, floats * 4) ||
      buffer_reserve(&workspace->act, act_bytes(rows, inner) + act_bytes(rows, m->intermediate) + 64))
    return NK_NO_MEMORY;
  Shared s = {.model = m, .step = step, .workspace = workspace, .out = out};
  float *at = workspace->rows.memory;
  float **places[] = {&s.hidden, &s.normed, &s.query, &workspace->attention.out, &s.key, &s.value, &s.gate, &s.up};
  const long sizes[] = {m->hidden, m->hidden, query, query, key, key, m->intermediate, m->intermediate};
  for (int i = 0; i < 8; i++) *places[i] = at, at += rows * sizes[i];
  long first_act = (act_bytes(rows, inner) + 63) / 64 * 64;
  act_place(&s.act, workspace->act.memory, rows, inner);
  act_place(&s.wide_act, (char *)workspace->act.memory + first_act, rows, m->intermediate);
  workspace->attention.q = s.query, workspace->attention.k = s.key, workspace->attention.v = s.value;
  if (attention_plan(&workspace->attention, m, step, team_threads(team))) return NK_NO_MEMORY;
  team_run(team, walk, &s);
  return NK_OK;
}
