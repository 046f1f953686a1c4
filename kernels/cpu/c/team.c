/* See team.h. Phases are numbered through the life of a team, and `over` counts those that are finished. A counter
 * word holds the number of its phase and a count, so that nothing has to be set back: a word of an earlier phase counts
 * zero. RING phases share the words in turn, which is enough, since a thread gets to a phase when all before it are
 * over. Sleeping goes through one condition variable, which nobody touches while all are awake. */
#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { RING = 4, COUNT_BITS = 24 };
#define COUNT(word) ((long)((word) & ((1UL << COUNT_BITS) - 1)))
#define PHASE(word) ((long)((word) >> COUNT_BITS))
#define WORD(phase, count) ((unsigned long)(phase) << COUNT_BITS | (unsigned long)(count))

typedef struct {
  _Alignas(64) _Atomic uint64_t word;
} Counter;
_Static_assert(sizeof(long) == 8, "a word holds a phase's number and a count");

typedef struct {
  Team *team;
  int index;
  pthread_t id;
} Worker;

struct Team {
  _Alignas(64) atomic_long call; /* number of the present call, or of the last */
  atomic_long inside;            /* workers in the call, plus GATE_OPEN while they may still enter */
  _Alignas(64) atomic_long over; /* phases finished since the team was made */
  _Alignas(64) atomic_int sleepers;
  atomic_int stop;
  Counter done[RING];
  Entry entry;
  void *argument;
  long first_phase; /* of the present call */
  int threads, workers;
  pthread_mutex_t calls, lock;
  pthread_cond_t wake;
  Worker worker[TEAM_MAX_THREADS];
  Counter taken[]; /* [RING][threads] of the share of each */
};

static _Thread_local int me; /* 0 in the thread that calls, 1 ... in the workers */

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

INLINE int reached(atomic_long *counter, long value) {
  return atomic_load_explicit(counter, memory_order_acquire) >= value;
}

/* Returns once the counter has reached the value (or the team stops). */
static void wait_until(Team *team, atomic_long *counter, long value, int spins) {
  for (int i = 0; i < spins; i++) {
    if (reached(counter, value)) return;
    pause_briefly();
  }
  pthread_mutex_lock(&team->lock);
  atomic_fetch_add(&team->sleepers, 1);
  while (atomic_load(counter) < value && !atomic_load(&team->stop)) pthread_cond_wait(&team->wake, &team->lock);
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
  const Worker *self = argument;
  Team *team = self->team;
  long seen = 0;
  me = self->index;
  flush_denormals();
  for (;;) {
    wait_until(team, &team->call, seen + 1, SPIN_BETWEEN_CALLS);
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
  size_t bytes = sizeof(Team) + RING * (size_t)threads * sizeof(Counter);
  if (posix_memalign(&memory, 64, (bytes + 63) / 64 * 64)) return NULL;
  Team *team = memset(memory, 0, bytes);
  team->threads = threads;
  atomic_store(&team->over, 1); /* phase 0 is that of words never used */
  pthread_mutex_init(&team->calls, NULL);
  pthread_mutex_init(&team->lock, NULL);
  pthread_cond_init(&team->wake, NULL);
  for (; team->workers < threads - 1; team->workers++) {
    int i = team->workers;
    team->worker[i].team = team, team->worker[i].index = i + 1;
    if (pthread_create(&team->worker[i].id, NULL, worker_loop, &team->worker[i])) {
      team_destroy(team);
      return NULL;
    }
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
  for (int i = 0; i < team->workers; i++) pthread_join(team->worker[i].id, NULL);
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
  team->first_phase = atomic_load(&team->over);
  atomic_store(&team->inside, GATE_OPEN);
  atomic_fetch_add(&team->call, 1);
  wake_sleepers(team);
  me = 0;
  entry(team, argument);
  atomic_fetch_sub(&team->inside, GATE_OPEN);
  for (long i = 0; atomic_load_explicit(&team->inside, memory_order_acquire); i++)
    if (i < SPIN_IN_PHASE)
      pause_briefly();
    else
      sched_yield();
  restore_float_mode(mode);
  pthread_mutex_unlock(&team->calls);
}

/* A range of the items first ... end - 1, which are a thread's share, from its front; 0 when none is left. */
static long take(Counter *taken, long phase, long first, long end, long smallest, long *from) {
  uint64_t word = atomic_load_explicit(&taken->word, memory_order_relaxed);
  long next, count;
  do {
    if (PHASE(word) > phase) return 0; /* long over */
    next = first + (PHASE(word) == phase ? COUNT(word) : 0);
    if (next >= end) return 0;
    count = ((end - next + 1) / 2 + smallest - 1) / smallest * smallest;
    if (count > end - next) count = end - next;
  } while (!atomic_compare_exchange_weak_explicit(&taken->word, &word, WORD(phase, next - first + count),
                                                  memory_order_acq_rel, memory_order_relaxed));
  *from = next;
  return count;
}

/* Count items as done; whether they were the last. */
static int all_done(Counter *done, long phase, long count, long n) {
  uint64_t word = atomic_load_explicit(&done->word, memory_order_relaxed);
  long sum;
  do {
    sum = count + (PHASE(word) == phase ? COUNT(word) : 0);
  } while (!atomic_compare_exchange_weak_explicit(&done->word, &word, WORD(phase, sum), memory_order_acq_rel,
                                                  memory_order_relaxed));
  return sum == n;
}

INLINE long share(const Team *team, long owner, long n, long smallest) {
  return owner == team->threads ? n : n * owner / team->threads / smallest * smallest;
}

long team_share(const Team *team, long n, long smallest) { return share(team, me, n, smallest); }

void team_phase(Team *team, Cursor *cursor, long n, long smallest, Work work, long m, Work then, Soon soon,
                void *context) {
  if (n > 0) {
    const long phase = team->first_phase + cursor->phases++, threads = team->threads, slot = phase % RING;
    const int serial = m > 0 && m <= TEAM_SERIAL;
    for (int i = 0; i < threads && !reached(&team->over, phase + 1); i++) {
      const long owner = (me + i) % threads;
      const long first = share(team, owner, n, smallest), end = share(team, owner + 1, n, smallest);
      long from, count;
      while ((count = take(&team->taken[slot * threads + owner], phase, first, end, smallest, &from))) {
        work(context, from, from + count);
        if (all_done(&team->done[slot], phase, count, n)) {
          if (serial) then(context, 0, m);
          atomic_store(&team->over, phase + 1);
          wake_sleepers(team);
        }
      }
    }
    if (soon) soon(team, context);
    if (!reached(&team->over, phase + 1)) wait_until(team, &team->over, phase + 1, SPIN_IN_PHASE);
    if (serial) return;
  }
  if (m > 0) team_phase(team, cursor, m, 1, then, 0, NULL, NULL, context);
}
