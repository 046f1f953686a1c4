/* See team.h. Counters of a phase live in their own cache line; sleeping goes through one condition variable, which
 * nobody touches while all are awake. */
#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include "team.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

typedef struct {
  _Alignas(64) atomic_long next; /* items handed out */
  atomic_long done;              /* items finished */
  atomic_int over;               /* all of them, and what follows them */
} Phase;

struct Team {
  Phase phase[TEAM_MAX_PHASES];
  _Alignas(64) atomic_long call; /* number of the present call, or of the last */
  atomic_long inside;            /* workers in the call, plus GATE_OPEN while they may still enter */
  atomic_int sleepers, stop;
  Entry entry;
  void *argument;
  int threads, workers;
  pthread_mutex_t calls, lock;
  pthread_cond_t wake;
  pthread_t worker[TEAM_MAX_THREADS];
};

#define GATE_OPEN (1L << 32)
/* Pauses before sleeping: in a phase others are late by microseconds, or the system has put them aside; between calls a
 * decode step's Python takes some hundred microseconds. One pause is 20 to 50 ns on the processors at hand. */
#define SPIN_IN_PHASE 4000
#define SPIN_BETWEEN_CALLS 10000

INLINE void pause_briefly(void) {
#if defined(__SSE2__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* Returns once *word differs from `old` (or the team stops). */
static void wait_for_change(Team *team, atomic_long *call, long old, atomic_int *over, int spins) {
  for (int i = 0; i < spins; i++) {
    if (over ? atomic_load_explicit(over, memory_order_acquire)
             : atomic_load_explicit(call, memory_order_acquire) != old)
      return;
    pause_briefly();
  }
  pthread_mutex_lock(&team->lock);
  atomic_fetch_add(&team->sleepers, 1);
  while (!(over ? atomic_load(over) : atomic_load(call) != old) && !atomic_load(&team->stop))
    pthread_cond_wait(&team->wake, &team->lock);
  atomic_fetch_sub(&team->sleepers, 1);
  pthread_mutex_unlock(&team->lock);
}

static void wake_sleepers(Team *team) {
  if (atomic_load(&team->sleepers) == 0) return;
  pthread_mutex_lock(&team->lock);
  pthread_cond_broadcast(&team->wake);
  pthread_mutex_unlock(&team->lock);
}

static int enter(Team *team) {
  long inside = atomic_load(&team->inside);
  while (inside & GATE_OPEN)
    if (atomic_compare_exchange_weak(&team->inside, &inside, inside + 1)) return 1;
  return 0;
}

static void *worker_loop(void *argument) {
  Team *team = argument;
  long seen = 0;
  flush_denormals();
  for (;;) {
    wait_for_change(team, &team->call, seen, NULL, SPIN_BETWEEN_CALLS);
    if (atomic_load(&team->stop)) return NULL;
    seen = atomic_load(&team->call);
    if (enter(team)) {
      team->entry(team, team->argument);
      atomic_fetch_sub(&team->inside, 1);
    }
  }
}

Team *team_create(int threads) {
  if (threads < 1 || threads > TEAM_MAX_THREADS) return NULL;
  void *memory = NULL;
  if (posix_memalign(&memory, 64, (sizeof(Team) + 63) / 64 * 64)) return NULL;
  Team *team = memset(memory, 0, sizeof(Team));
  team->threads = threads;
  pthread_mutex_init(&team->calls, NULL);
  pthread_mutex_init(&team->lock, NULL);
  pthread_cond_init(&team->wake, NULL);
  for (; team->workers < threads - 1; team->workers++)
    if (pthread_create(&team->worker[team->workers], NULL, worker_loop, team)) {
      team_destroy(team);
      return NULL;
    }
  return team;
}

void team_destroy(Team *team) {
  if (!team) return;
  pthread_mutex_lock(&team->lock);
  atomic_store(&team->stop, 1);
  atomic_fetch_add(&team->call, 1);
  pthread_cond_broadcast(&team->wake);
  pthread_mutex_unlock(&team->lock);
  for (int i = 0; i < team->workers; i++) pthread_join(team->worker[i], NULL);
  pthread_mutex_destroy(&team->calls);
  pthread_mutex_destroy(&team->lock);
  pthread_cond_destroy(&team->wake);
  free(team);
}

int team_threads(const Team *team) { return team->threads; }

void team_run(Team *team, Entry entry, void *argument) {
  pthread_mutex_lock(&team->calls);
  FloatMode mode = flush_denormals();
  team->entry = entry;
  team->argument = argument;
  atomic_store(&team->inside, GATE_OPEN);
  atomic_fetch_add(&team->call, 1);
  wake_sleepers(team);
  entry(team, argument);
  atomic_fetch_sub(&team->inside, GATE_OPEN);
  while (atomic_load_explicit(&team->inside, memory_order_acquire)) pause_briefly();
  for (long i = 0; i < TEAM_MAX_PHASES && atomic_load(&team->phase[i].over); i++) {
    atomic_store_explicit(&team->phase[i].next, 0, memory_order_relaxed);
    atomic_store_explicit(&team->phase[i].done, 0, memory_order_relaxed);
    atomic_store_explicit(&team->phase[i].over, 0, memory_order_relaxed);
  }
  restore_float_mode(mode);
  pthread_mutex_unlock(&team->calls);
}

/* The next range of n items, or 0 when all are handed out: half of an equal share of what is left. */
static long take(Phase *phase, long n, long smallest, int threads, long *first) {
  long next = atomic_load_explicit(&phase->next, memory_order_relaxed), count;
  do {
    if (next >= n) return 0;
    count = threads == 1 ? n : (n - next) / (2 * threads);
    if (count < smallest) count = smallest;
    if (count > n - next) count = n - next;
  } while (!atomic_compare_exchange_weak_explicit(&phase->next, &next, next + count, memory_order_acq_rel,
                                                  memory_order_relaxed));
  *first = next;
  return count;
}

void team_phase(Team *team, Cursor *cursor, long n, long smallest, Work work, long m, Work then, void *context) {
  if (n > 0) {
    Phase *phase = &team->phase[cursor->phase++];
    int serial = m > 0 && m <= TEAM_SERIAL;
    long first, count;
    while ((count = take(phase, n, smallest, team->threads, &first))) {
      work(context, first, first + count);
      if (atomic_fetch_add_explicit(&phase->done, count, memory_order_acq_rel) + count == n) {
        if (serial) then(context, 0, m);
        atomic_store(&phase->over, 1);
        wake_sleepers(team);
      }
    }
    if (!atomic_load_explicit(&phase->over, memory_order_acquire))
      wait_for_change(team, NULL, 0, &phase->over, SPIN_IN_PHASE);
    if (serial) return;
  }
  if (m > 0) team_phase(team, cursor, m, 1, then, 0, NULL, context);
}
