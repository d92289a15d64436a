/* MPI's all-reduce, measured as `phalanx bench allreduce` measures its own backends: see rank.rs
 * for what happens in a window and window.rs for the lines of the conversation.
 *
 * Usage: allreduce_mpi SOCKET [PROCESSOR,PROCESSOR,...]
 */
#define _GNU_SOURCE
#include <mpi.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define PERIOD 5

static FILE *to_bench;
static int rank, size;

static void fail(const char *what) {
    if (to_bench) {
        fprintf(to_bench, "fail %s\n", what);
        fflush(to_bench);
    }
    fprintf(stderr, "allreduce_mpi: %s\n", what);
    exit(1);
}

/* The launchers say which process this is before MPI starts its threads. */
static int launched_as(void) {
    const char *names[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        if (value) return atoi(value);
    }
    fail("the launcher does not say which rank this is");
    return -1;
}

static void pin(const char *processors) {
    char *list = strdup(processors), *rest = list, *item = NULL;
    for (int i = launched_as(); i >= 0; i--) item = strsep(&rest, ",");
    if (!item) fail("there are fewer processors than ranks");
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(atoi(item), &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0) fail("cannot pin");
    free(list);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void reduce(float *data, int len) {
    int code = MPI_Allreduce(MPI_IN_PLACE, data, len, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    if (code != MPI_SUCCESS) fail("MPI_Allreduce failed");
}

static float all(int one) { return (float)one * (float)(size * (size + 1) / 2); }

static void window(size_t bytes, int iters, int warmup, int barrier, int batch) {
    int len = (int)(bytes / sizeof(float));
    float *data = NULL;
    if (posix_memalign((void **)&data, 64, bytes) != 0) fail("out of memory");
    int64_t *times = malloc(sizeof *times * (size_t)iters), start = 0;
    long wrong = 0;

    for (int i = 0; i < len; i++) data[i] = (float)((i % PERIOD + 1) * (rank + 1));
    reduce(data, len);
    for (int i = 0; i < len; i++) wrong += data[i] != all(i % PERIOD + 1);

    for (int iter = -warmup; iter < iters; iter++) {
        int one = (iter + warmup) % PERIOD + 1;
        float fresh = (float)(one * (rank + 1));
        for (int i = 0; i < len; i++) data[i] = fresh;
        if (barrier) MPI_Barrier(MPI_COMM_WORLD);
        if ((iter + warmup) % batch == 0) start = now_ns();
        reduce(data, len);
        if (iter >= 0 && (iter + 1) % batch == 0) times[iter / batch] = (now_ns() - start) / batch;
        size_t look[] = {0, (size_t)len / 2, (size_t)len - 1, (size_t)(iter + warmup) * 7919 % (size_t)len};
        for (int i = 0; i < 4; i++) wrong += data[look[i]] != all(one);
    }

    fprintf(to_bench, "done %ld", wrong);
    for (int i = 0; i < iters / batch; i++) fprintf(to_bench, " %lld", (long long)times[i]);
    fprintf(to_bench, "\n");
    fflush(to_bench);
    free(times);
    free(data);
}

int main(int argc, char **argv) {
    if (argc > 2 && *argv[2]) pin(argv[2]);
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);

    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (argc < 2 || strlen(argv[1]) >= sizeof address.sun_path) fail("no socket to talk to");
    strcpy(address.sun_path, argv[1]);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) != 0) fail("cannot connect");
    FILE *from_bench = fdopen(fd, "r");
    to_bench = fdopen(dup(fd), "w");

    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length;
    MPI_Get_library_version(version, &length);
    version[strcspn(version, ",\n")] = 0;
    fprintf(to_bench, "hello %d %s\n", rank, version);
    fflush(to_bench);

    /* Between windows ranks wait here, not in MPI, where they would spin. */
    char line[256], dtype[16], memory[16];
    while (fgets(line, sizeof line, from_bench)) {
        size_t bytes;
        int iters, warmup, barrier, batch;
        if (sscanf(line, "run %zu %15s %15s %d %d %d %d", &bytes, dtype, memory, &iters, &warmup, &barrier,
                   &batch) != 7)
            fail("not a window");
        if (strcmp(dtype, "f32") != 0) fail("only f32");
        window(bytes, iters, warmup, barrier, batch);
    }
    MPI_Finalize();
    return 0;
}
