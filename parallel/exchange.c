/* One exchange between the ranks of a host through shared memory: as `Exchange` in exchange.py, which see, in C.
 *
 * Each rank's segment: a word, at 16 a token, at 32 what the exchange of each half is of, at DATA the two halves. What
 * a rank wrote before it set its word is there for whoever has read the word: release and acquire say so to the CPU.
 */

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SIGNS 32
#define DATA 64
#define LOOKS 20  /* between two offers of the core to others */
#define DONE (-1) /* else the number of the rank that is late */

/* segments: of all ranks, in order. count: exchanges so far. spin, tick: nanoseconds of looking, and of sleeping. */
typedef struct {
    char *const *segments;
    int64_t rank, size, half_bytes, spin, tick;
    uint64_t count;
} Group;

static uint32_t *word_of(const Group *group, long rank) { return (uint32_t *)group->segments[rank]; }
static char *half_of(const Group *group, long rank) {
    return group->segments[rank] + DATA + group->count % 2 * group->half_bytes;
}
static uint64_t *sign_of(const Group *group, long rank) {
    return (uint64_t *)(group->segments[rank] + SIGNS) + group->count % 2;
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

/* Whether the rank has come to this exchange; it may be one ahead, and behind by one alone. */
static int has_come(const Group *group, long rank) {
    return __atomic_load_n(word_of(group, rank), __ATOMIC_ACQUIRE) != (uint32_t)(group->count - 1);
}

/* Look for a while, then sleep until the word changes, at most a tick. */
static int wait_for(const Group *group, long rank) {
    const int64_t until = now() + group->spin;
    do {
        for (int look = 0; look < LOOKS; look++) {
            if (has_come(group, rank)) return 1;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        sched_yield(); /* where ranks outnumber cores the one that is waited for may want this one */
    } while (now() < until);
    const struct timespec limit = {group->tick / 1000000000, group->tick % 1000000000};
    syscall(SYS_futex, word_of(group, rank), FUTEX_WAIT, (uint32_t)(group->count - 1), &limit, 0, 0);
    return has_come(group, rank);
}

/* Hand `bytes` of data to the others. sign: what this exchange is of. */
void give(Group *group, const void *data, int64_t bytes, uint64_t sign) {
    group->count++;
    memcpy(half_of(group, group->rank), data, bytes);
    *sign_of(group, group->rank) = sign;
    __atomic_store_n(word_of(group, group->rank), (uint32_t)group->count, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, word_of(group, group->rank), FUTEX_WAKE, INT_MAX, 0, 0, 0);
}

/* Wait for the others, about a tick: DONE, or who has not come. To be called again until it is DONE. */
int64_t take(const Group *group) {
    for (long rank = 0; rank < group->size; rank++)
        if (rank != group->rank && !has_come(group, rank) && !wait_for(group, rank)) return rank;
    return DONE;
}

/* Who is at another exchange than this rank, DONE = none. */
int64_t out_of_step(const Group *group) {
    for (long rank = 0; rank < group->size; rank++)
        if (*sign_of(group, rank) != *sign_of(group, group->rank)) return rank;
    return DONE;
}

/* sums [count] = what all ranks gave, added up in their order. */
void add_floats(const Group *group, float *sums, int64_t count) {
    const float *first = (const float *)half_of(group, 0);
    for (long rank = 1; rank < group->size; rank++) {
        const float *next = (const float *)half_of(group, rank);
        for (long i = 0; i < count; i++) sums[i] = first[i] + next[i];
        first = sums;
    }
}

static float widened(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* To the nearest, ties to even; a NaN stays one. */
static uint16_t rounded(float wide) {
    uint32_t bits;
    memcpy(&bits, &wide, sizeof bits);
    const uint16_t nearest = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    return wide == wide ? nearest : (uint16_t)(bits >> 16 | 64);
}

/* The same in bfloat16, rounded after each rank as torch does. */
void add_halves(const Group *group, uint16_t *sums, int64_t count) {
    const uint16_t *first = (const uint16_t *)half_of(group, 0);
    for (long rank = 1; rank < group->size; rank++) {
        const uint16_t *next = (const uint16_t *)half_of(group, rank);
        for (long i = 0; i < count; i++) sums[i] = rounded(widened(first[i]) + widened(next[i]));
        first = sums;
    }
}
