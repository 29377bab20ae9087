/* Threads for one short job at a time. Included by nested.c.

   A decode step hands over some two hundred jobs of a few microseconds. OpenMP's join waits for every thread to arrive:
   when another process has one of the cores, each of those jobs can wait for a whole time slice. Here the caller works
   too, closes the job when nothing is left to take, and waits only for threads that did enter it. */

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>

#define MAX_WORKERS 255
#define SPIN 2000 /* looks at the state before a thread goes to sleep: tens of microseconds */

#ifdef X86
#define RELAX() _mm_pause()
#else
#define RELAX() atomic_signal_fence(memory_order_seq_cst)
#endif

static struct {
    pthread_mutex_t caller, lock;
    pthread_cond_t wake;
    atomic_ullong state; /* number of the job << 16 | how many threads may still enter it */
    atomic_int left;     /* threads that entered the job and have left it */
    atomic_int sleepers;
    int size, started;
    void (*work)(void *);
    void *arg;
} pool = {.caller = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static int is_new(unsigned long long state, unsigned long long seen) { return state >> 16 != seen && (state & 0xFFFF); }

static void *worker(void *unused) {
    (void)unused;
    unsigned long long seen = 0;
    for (int spins = 0;;) {
        unsigned long long state = atomic_load(&pool.state);
        if (is_new(state, seen)) {
            if (!atomic_compare_exchange_strong(&pool.state, &state, state - 1)) continue;
            seen = state >> 16;
            pool.work(pool.arg); /* the job cannot be replaced before this thread has left it */
            atomic_fetch_add(&pool.left, 1);
            spins = 0;
        } else if (++spins < SPIN) {
            RELAX();
        } else {
            pthread_mutex_lock(&pool.lock);
            atomic_fetch_add(&pool.sleepers, 1);
            while (!is_new(atomic_load(&pool.state), seen)) pthread_cond_wait(&pool.wake, &pool.lock);
            atomic_fetch_sub(&pool.sleepers, 1);
            pthread_mutex_unlock(&pool.lock);
            spins = 0;
        }
    }
    return NULL;
}

/* A forked child has none of the threads. */
static void after_fork(void) {
    pthread_mutex_init(&pool.caller, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    atomic_store(&pool.sleepers, 0);
    pool.size = 0;
}

static void grow(int workers) {
    sigset_t all, before;
    if (!pool.started) pthread_atfork(NULL, NULL, after_fork);
    pool.started = 1;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the caller's threads */
    while (pool.size < workers) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, NULL)) break;
        pthread_detach(thread);
        pool.size++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* OpenMP's entry point for a parallel region, GOMP_parallel, or NULL. Where others run OpenMP between our jobs, its threads
   wait awake on the cores that the pool's would need, and the caller may be bound to one core, which threads inherit. */
static void (*team)(void (*)(void *), void *, unsigned, unsigned);

void qbe_use_team(void *region) { team = (void (*)(void (*)(void *), void *, unsigned, unsigned))region; }

/* Runs work(arg) here and on up to threads - 1 others; returns when all of them have returned from it. */
static void pool_run(void (*work)(void *), void *arg, int threads) {
    const int others = threads - 1 < MAX_WORKERS ? threads - 1 : MAX_WORKERS;
    if (others > 0 && team) {
        team(work, arg, (unsigned)threads, 0);
        return;
    }
    if (others < 1 || pthread_mutex_trylock(&pool.caller)) { /* busy with another caller's job: alone, then */
        work(arg);
        return;
    }
    if (pool.size < others) grow(others);
    pool.work = work, pool.arg = arg;
    atomic_store(&pool.left, 0);
    const unsigned long long number = (atomic_load(&pool.state) >> 16) + 1;
    atomic_store(&pool.state, number << 16 | (unsigned)others);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    work(arg);
    const int entered = others - (int)(atomic_exchange(&pool.state, number << 16) & 0xFFFF);
    for (int spins = 0; atomic_load(&pool.left) < entered;) {
        if (++spins < SPIN) RELAX();
        else sched_yield();
    }
    pthread_mutex_unlock(&pool.caller);
}
