/* One step through all layers: five meetings of the team a layer.
 *
 *     q, k, v products            then, by rows: rope, k and v into the pages
 *     attention, by tasks         then, by rows: merge, quantize
 *     o product, added            then, by rows: norm, quantize
 *     gate and up products, silu(gate) * up, quantize (modes whose scales are wider than 32 columns: by rows)
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
  long layer, least; /* fewest panels a range */
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

/* ---- what is done by rows ---------------------------------------------------------------------------------------- */

/* Quantize the rows of x. MODE_TENSOR scales by the largest magnitude of the whole step, so each call looks at all of
 * it: it is there to be measured, not to be fast. */
static void quantize_rows(const Shared *s, const float *x, long cols, const Act *act, long place, long first,
                          long end) {
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

static void work_seal(void *context, long first, long end) {
  Walk *w = context;
  attention_seal(&w->shared->workspace->attention, w->layer, first, end);
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

static void work_gated(void *context, long first, long end) {
  Walk *w = context;
  const Shared *s = w->shared;
  if (s->model->mode != MODE_TENSOR)
    quantize_rows(s, s->gate, s->model->intermediate, &s->wide_act, 4 * w->layer + PLACE_DOWN, first, end);
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
  if (s->model->mode == MODE_TENSOR)
    quantize_rows(s, whole->x, whole->cols, whole->act, whole->place, 0, s->step->rows);
  if (s->model->peaks) {
    float peak = peak_of(whole->x, s->step->rows * whole->cols);
    if (!(peak <= s->model->peaks[whole->place])) s->model->peaks[whole->place] = peak;
  }
}

static void whole(Team *team, Walk *w, const float *x, long cols, long place, const Act *act) {
  const Model *m = w->shared->model;
  Whole context = {w, x, cols, 4 * w->layer + place, act};
  if (m->mode == MODE_TENSOR || m->peaks) team_phase(team, &w->cursor, 1, 1, work_whole, 0, NULL, NULL, &context);
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* The panels first ... end - 1 of several matrices in a row. */
static void panels(const Shared *s, const Matrix *const *matrices, float *const *outs, int count, const Act *act,
                   int add, long first, long end) {
  for (int i = 0; i < count && first < end; i++) {
    long n = panels_of(matrices[i]), here = end < n ? end : n;
    if (first < n) product_range(matrices[i], act, s->model->mode, s->step->rows, outs[i], n * LANES, add, first, here);
    first = first > n ? first - n : 0;
    end -= n;
  }
}

static long qkv_panels(const Layer *l) { return panels_of(&l->q) + panels_of(&l->k) + panels_of(&l->v); }

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

/* Items are pairs of panels: 32 columns of what comes out, which share a scale in most modes. */
static void work_gate_up(void *context, long first, long end) {
  Walk *w = context;
  const Shared *s = w->shared;
  const Layer *l = w->weights;
  const long n = s->model->intermediate, rows = s->step->rows, mode = s->model->mode;
  product_range(&l->gate, &s->act, mode, rows, s->gate, n, 0, 2 * first, 2 * end);
  product_range(&l->up, &s->act, mode, rows, s->up, n, 0, 2 * first, 2 * end);
  for (long r = 0; r < rows; r++) {
    float *gate = s->gate + r * n;
    silu_gate_row(gate + 32 * first, s->up + r * n + 32 * first, 32 * (end - first), gate + 32 * first);
    if (mode <= MODE_A8G16) quantize_part(gate, n, 32 * first, 32 * end, mode, 0, &s->wide_act, r);
  }
}

static void work_down(void *context, long first, long end) {
  Walk *w = context;
  const Matrix *matrices[] = {&w->weights->down};
  panels(w->shared, matrices, &w->shared->hidden, 1, &w->shared->wide_act, 1, first, end);
}

/* ---- what is fetched while a thread waits ------------------------------------------------------------------------ */

static void fetch_qkv(const Team *team, const Walk *w, const Layer *l) {
  const Matrix *matrices[] = {&l->q, &l->k, &l->v};
  long panel = team_share(team, qkv_panels(l), w->least), i = 0;
  while (i < 2 && panel >= panels_of(matrices[i])) panel -= panels_of(matrices[i++]);
  product_fetch(matrices[i], panel);
}

static void soon_first(const Team *team, void *context) {
  const Walk *w = context;
  fetch_qkv(team, w, w->weights);
}

static void soon_next(const Team *team, void *context) {
  const Walk *w = context;
  const Matrix *head = &w->shared->model->head;
  if (w->layer + 1 < w->shared->model->layers)
    fetch_qkv(team, w, w->weights + 1);
  else
    product_fetch(head, team_share(team, panels_of(head), w->least));
}

static void soon_attention(const Team *team, void *context) {
  const Walk *w = context;
  const Attention *a = &w->shared->workspace->attention;
  attention_fetch(a, w->layer, team_share(team, a->tasks, 1));
}

static void soon_o(const Team *team, void *context) {
  const Walk *w = context;
  product_fetch(&w->weights->o, team_share(team, panels_of(&w->weights->o), w->least));
}

static void soon_gate_up(const Team *team, void *context) {
  const Walk *w = context;
  const long panel = 2 * team_share(team, w->shared->model->intermediate / 32, 1);
  product_fetch(&w->weights->gate, panel);
  product_fetch(&w->weights->up, panel);
}

static void soon_down(const Team *team, void *context) {
  const Walk *w = context;
  product_fetch(&w->weights->down, team_share(team, panels_of(&w->weights->down), w->least));
}

static void walk(Team *team, void *argument) {
  const Shared *s = argument;
  const Model *m = s->model;
  const Attention *a = &s->workspace->attention;
  const long rows = s->step->rows, least = rows > 8 ? 2 : 1;
  Walk w = {s, m->layer, 0, least, {0}};
  const long by_rows = m->mode > MODE_A8G16 ? rows : 0;
  /* few writes, but each of many rows (int4 pages): not for one thread alone */
  const int apart = a->writes > 1 && a->writes <= TEAM_SERIAL && rows > TEAM_SERIAL;
  team_phase(team, &w.cursor, rows, 1, work_embed, 0, NULL, soon_first, &w);
  for (; w.layer < m->layers; w.layer++, w.weights++) {
    const Layer *l = w.weights;
    whole(team, &w, s->normed, m->hidden, PLACE_ATTENTION, &s->act);
    team_phase(team, &w.cursor, qkv_panels(l), least, work_qkv, apart ? 0 : a->writes, work_write,
               apart ? NULL : soon_attention, &w);
    if (apart) team_phase(team, &w.cursor, a->writes, 1, work_write, 0, NULL, soon_attention, &w);
    if (s->step->fulls)
      team_phase(team, &w.cursor, s->step->fulls * m->kv_heads, 1, work_seal, 0, NULL, soon_attention, &w);
    team_phase(team, &w.cursor, a->tasks, 1, work_attention, rows, work_merge, soon_o, &w);
    whole(team, &w, a->out, m->heads * m->head_dim, PLACE_OUTPUT, &s->act);
    team_phase(team, &w.cursor, panels_of(&l->o), least, work_o, rows, work_ffn_norm, soon_gate_up, &w);
    whole(team, &w, s->normed, m->hidden, PLACE_FFN, &s->act);
    team_phase(team, &w.cursor, m->intermediate / 32, 1, work_gate_up, by_rows, work_gated, soon_down, &w);
    whole(team, &w, s->gate, m->intermediate, PLACE_DOWN, &s->wide_act);
    team_phase(team, &w.cursor, panels_of(&l->down), least, work_down, rows, work_next_norm, soon_next, &w);
  }
}

int nk_forward(Team *team, Workspace *workspace, const Model *m, const Step *step, float *out) {
  const long rows = step->rows, query = m->heads * m->head_dim, key = m->kv_heads * m->head_dim;
  const long inner = query > m->hidden ? query : m->hidden;
  if (rows == 0) return NK_OK;
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
