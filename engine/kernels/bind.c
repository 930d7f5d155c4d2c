// Lets the OpenMP threads of the calling thread run on some CPUs only.

#define _GNU_SOURCE
#include <sched.h>

// cpus: [count], numbers in any order; threads: of the team. Returns how many threads the kernel refused, -1 for want
// of memory. Threads that the team gets later have the CPUs of the calling thread, which is one of it.
int bind_team(const int *cpus, int count, int threads) {
    int highest = 0, refused = 0;
    for (int i = 0; i < count; i++)
        highest = cpus[i] > highest ? cpus[i] : highest;
    cpu_set_t *set = CPU_ALLOC(highest + 1);
    if (!set)
        return -1;
    size_t bytes = CPU_ALLOC_SIZE(highest + 1);
    CPU_ZERO_S(bytes, set);
    for (int i = 0; i < count; i++)
        CPU_SET_S(cpus[i], bytes, set);
#pragma omp parallel num_threads(threads) reduction(+ : refused)
    refused += sched_setaffinity(0, bytes, set) != 0;
    CPU_FREE(set);
    return refused;
}
