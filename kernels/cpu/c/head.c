/* The output head: all logits, those of given ids, or the best id alone.
 *
 * A logit is the same bits whoever asks: given ids are computed in their panels by the same product. The argmax never
 * leaves here; its logits are scratch.
 */
#include "nk.h"

typedef struct {
  const Model *model;
  long rows, stride, count;
  const float *hidden;
  float *logits;
  const int64_t *ids;
  int64_t *best;
  Act act;
} Question;

static void work_quantize(void *context, long first, long end) {
  Question *q = context;
  const Model *m = q->model;
  float peak = 0;
  if (m->mode == MODE_STATIC) peak = m->static_peak[4 * m->layers];
  if (m->mode == MODE_TENSOR) peak = peak_of(q->hidden, q->rows * m->hidden);
  for (long r = first; r < end; r++) quantize_row(q->hidden + r * m->hidden, m->hidden, m->mode, peak, &q->act, r);
}

static void work_logits(void *context, long first, long end) {
  Question *q = context;
  product_range(&q->model->head, &q->act, q->model->mode, q->rows, q->logits, q->stride, 0, first, end);
}

static void work_logits_of(void *context, long first, long end) {
  Question *q = context;
  const Matrix *head = &q->model->head;
  for (long i = first; i < end; i++) {
    long panel = q->ids[i] / LANES;
    for (long r = 0; r < q->rows; r++) {
      float sixteen[LANES];
      product_row(head, &q->act, q->model->mode, r, panel, sixteen);
      q->logits[r * q->count + i] = sixteen[q->ids[i] % LANES];
    }
  }
}

static void work_argmax(void *context, long first, long end) {
  Question *q = context;
  for (long r = first; r < end; r++) q->best[r] = nk_row_argmax(q->logits + r * q->stride, q->model->vocab);
}

static void ask(Team *team, void *argument) {
  Question *q = argument;
  Cursor cursor = {0};
  long panels = panels_of(&q->model->head);
  team_phase(team, &cursor, q->rows, 1, work_quantize, 0, NULL, NULL, q);
  if (q->ids)
    team_phase(team, &cursor, q->count, 1, work_logits_of, 0, NULL, NULL, q);
  else
    team_phase(team, &cursor, panels, q->rows > 8 ? 2 : 1, work_logits, q->best ? q->rows : 0, work_argmax, NULL, q);
}

static int run_question(Team *team, Workspace *w, Question *q) {
  if (q->rows == 0) return NK_OK;
  if (buffer_reserve(&w->act, act_bytes(q->rows, q->model->hidden))) return NK_NO_MEMORY;
  act_place(&q->act, w->act.memory, q->rows, q->model->hidden);
  team_run(team, ask, q);
  return NK_OK;
}

int nk_logits(Team *team, Workspace *w, const Model *model, long rows, const float *hidden, float *logits,
              long stride) {
  Question q = {.model = model, .rows = rows, .hidden = hidden, .logits = logits, .stride = stride};
  return run_question(team, w, &q);
}

int nk_logits_of(Team *team, Workspace *w, const Model *model, long rows, const float *hidden, const int64_t *ids,
                 long count, float *logits) {
  if (count == 0) return NK_OK; /* an empty array may be no address at all, which elsewhere means all ids */
  Question q = {.model = model, .rows = rows, .hidden = hidden, .logits = logits, .ids = ids, .count = count};
  return run_question(team, w, &q);
}

int nk_argmax(Team *team, Workspace *w, const Model *model, long rows, const float *hidden, int64_t *best) {
  long stride = panels_of(&model->head) * LANES;
  if (buffer_reserve(&w->logits, rows * stride * 4)) return NK_NO_MEMORY;
  Question q = {
      .model = model, .rows = rows, .hidden = hidden, .logits = w->logits.memory, .stride = stride, .best = best};
  return run_question(team, w, &q);
}
