/* How threads divide work. A stage is work on items 0 .. count-1 that any thread does in any order; a thread goes on when
 * all of it is done. No thread is counted: one that wakes up late finds finished stages, and goes through them. */

struct stage {
    long next, done;
    long unused[6]; /* stages share no line of a cache */
};

typedef void each(const void *what, long first, long end);
typedef void parallel(void (*)(void *), void *, unsigned, unsigned);

/* Looks, some 40 ns each, before a thread sleeps: the thread that it waits for has lost its core to other work. */
#define SPINS 4000

static void wait_for_others(const struct stage *s, long count)
{
    const struct timespec nap = {0, 50000};
    for (long spin = 0; __atomic_load_n(&s->done, __ATOMIC_ACQUIRE) < count; spin++)
        if (spin < SPINS)
            _mm_pause();
        else
            nanosleep(&nap, 0);
}

/* Takes a share of what is left at a time, so that threads end together; `least` items at least. */
static void take_part(struct stage *s, each *each, const void *what, long count, long least, long threads)
{
    long first = __atomic_load_n(&s->next, __ATOMIC_RELAXED);
    while (first < count) {
        long some = (count - first) / (2 * threads) + 1, end = first + (some + least - 1) / least * least;
        if (end > count)
            end = count;
        if (!__atomic_compare_exchange_n(&s->next, &first, end, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            continue;
        each(what, first, end);
        __atomic_fetch_add(&s->done, end - first, __ATOMIC_RELEASE);
        first = __atomic_load_n(&s->next, __ATOMIC_RELAXED);
    }
    wait_for_others(s, count);
}

/* As take_part, an item at a time; `each` is given what the thread does next, too (from `count` on: nothing). */
static void take_in_turn(struct stage *s, each *each, const void *what, long count)
{
    long next;
    for (long item = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED); item < count; item = next) {
        next = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED);
        each(what, item, next);
        __atomic_fetch_add(&s->done, 1, __ATOMIC_RELEASE);
    }
    wait_for_others(s, count);
}

struct division {
    struct stage stage;
    each *each;
    const void *what;
    long count, least, threads;
};

static void take_part_in(void *argument)
{
    struct division *d = argument;
    take_part(&d->stage, d->each, d->what, d->count, d->least, d->threads);
}

/* One stage by `threads` threads that have to be woken up. */
static void divide(each *each, const void *what, long count, long least, unsigned threads, parallel *run)
{
    struct division d = {{0}, each, what, count, least, threads};
    if (threads > 1 && count > least)
        run(take_part_in, &d, threads, 0);
    else
        each(what, 0, count);
}
