/* A team under ThreadSanitizer: every item of a phase is done once, what follows reads what was done, calls queue up. */
#include "team.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { ITEMS = 301, PHASES = 40, CALLS = 20, CALLERS = 3 };

typedef struct {
  long n, m, written[ITEMS], total[ITEMS];
} Case;

static void work(void *context, long first, long end) {
  Case *c = context;
  for (long i = first; i < end; i++) c->written[i] += i + 1; /* plain: two threads at one item are a data race */
}

static void then(void *context, long first, long end) {
  Case *c = context;
  for (long j = first; j < end; j++) {
    long sum = 0;
    for (long i = 0; i < c->n; i++) sum += c->written[i];
    c->total[j] = sum;
  }
}

static void entry(Team *team, void *argument) {
  Cursor cursor = {0};
  for (int i = 0; i < PHASES; i++) {
    Case *c = (Case *)argument + i;
    team_phase(team, &cursor, c->n, 1 + i % 5, work, c->m, then, NULL, c);
  }
}

static void *caller(void *argument) {
  Case *cases = calloc(PHASES, sizeof(Case));
  for (int i = 0; i < PHASES; i++) {
    cases[i].n = i % 7 == 6 ? 0 : 1 + i * 37 % ITEMS;
    cases[i].m = i % 5;
  }
  for (int i = 0; i < CALLS; i++) team_run(argument, entry, cases);
  long wrong = 0;
  for (int i = 0; i < PHASES; i++) {
    const Case *c = &cases[i];
    for (long k = 0; k < ITEMS; k++) wrong += c->written[k] != (k < c->n ? CALLS * (k + 1) : 0);
    for (long j = 0; j < ITEMS; j++) wrong += c->total[j] != (j < c->m ? CALLS * c->n * (c->n + 1) / 2 : 0);
  }
  free(cases);
  return (void *)wrong;
}

int main(void) {
  long wrong = 0;
  for (int threads = 1; threads <= 5; threads += 2) {
    Team *team = team_create(threads);
    pthread_t callers[CALLERS];
    for (int i = 0; i < CALLERS; i++) pthread_create(&callers[i], NULL, caller, team);
    for (int i = 0; i < CALLERS; i++) {
      void *found;
      pthread_join(callers[i], &found);
      wrong += (long)found;
    }
    team_destroy(team);
  }
  printf("%ld wrong\n", wrong);
  return wrong != 0;
}
