/* A team of threads that works through phases together: spins for a while, then sleeps.
 *
 * `team_run(team, entry, argument)` runs entry(team, argument) in every thread of the team, the caller's included, and
 * returns when all have left it; calls from several threads queue up. Inside, every thread walks the same code and
 * meets the others in `team_phase`:
 *
 *     team_phase(team, cursor, n, smallest, work, m, then, soon, context)
 *
 * hands out the items 0 ... n-1 (fewer than 2^24), and after them the m items of `then`, which may read what any item
 * of `work` wrote. Each thread has a share, the same one in every phase of as many items, and takes ranges from its
 * front: half of what is left, never fewer than `smallest` items while there are as many. With none left it takes
 * from the shares of others alike. So a thread reads memory from one address on, and one that is late is helped.
 * The phase is over for a thread when all of its items are done. Few `then` items (see TEAM_SERIAL) are done by
 * whichever thread finishes `work` last, which saves a meeting.
 *
 * `soon` (may be NULL) is called by every thread that has found nothing more to do, before it waits: the place to fetch
 * from memory what its share of the next phase begins with (team_share).
 *
 * A phase ends when its items are done, not when all threads have arrived: a thread that the system has put aside
 * between two phases holds nobody up, only the end of the call. That is what keeps the speed beside busy neighbours.
 */
#ifndef NK_TEAM_H
#define NK_TEAM_H

#include "vec.h"

typedef struct Team Team;

/* How many phases of the call a thread has been through; each thread has its own, zero at first. */
typedef struct { long phases; } Cursor;

typedef void (*Work)(void *context, long first, long end);
typedef void (*Soon)(const Team *team, void *context);
typedef void (*Entry)(Team *team, void *argument);

#define TEAM_MAX_THREADS 256
#define TEAM_SERIAL 2

Team *team_create(int threads);
void team_destroy(Team *team);
int team_threads(const Team *team);
void team_run(Team *team, Entry entry, void *argument);
void team_phase(Team *team, Cursor *cursor, long n, long smallest, Work work, long m, Work then, Soon soon,
                void *context);
long team_share(const Team *team, long n, long smallest); /* the first item of the calling thread's share */

#endif
