/* A library of collectives for ranks whose memory is the host's: threads of one process, or processes of one host. Like
 * RCCL and NCCL without blocking: calls return 'in progress', and are complete when all ranks have made them. Ranks
 * meet in a file that the id names. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, REMOTE_ERROR = 6, IN_PROGRESS = 7, MOST_RANKS = 16 };

typedef struct {
    char path[128];
} Id;

typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
} Config;

/* The begin of the file. Bytes of rank r follow it, `room` for each rank. */
typedef struct {
    atomic_int arrived, dead;
    atomic_int sent[MOST_RANKS], taken[MOST_RANKS]; /* all-gathers that a rank began, and has the result of */
    size_t bytes[MOST_RANKS];
} World;

typedef struct {
    World *world;
    char path[128];
    int file, rank, ranks, pending;
    void *receive;
    size_t bytes;
} Comm;

enum { HEADER = 4096 };

const char *ncclGetErrorString(int code) {
    return code == REMOTE_ERROR ? "remote process exited" : code == SYSTEM_ERROR ? "system error" : "invalid argument";
}

int ncclGetUniqueId(Id *id) {
    static atomic_int ids;
    const char *folder = getenv("TMPDIR");
    memset(id, 0, sizeof *id);
    const int length = snprintf(id->path, sizeof id->path, "%s/fake-collectives-%d-%d", folder ? folder : "/tmp",
                                (int)getpid(), atomic_fetch_add(&ids, 1));
    if (length >= (int)sizeof id->path) {
        return SYSTEM_ERROR;
    }
    const int file = open(id->path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    const int failed = file < 0 || ftruncate(file, HEADER);
    close(file);
    return failed ? SYSTEM_ERROR : SUCCESS;
}

/* Ends this process if FAKE_COLLECTIVES_DIES is RANK:CALL of this rank and call: 0 for the start, n for all-gather n.
 */
static void die_at(int rank, int call) {
    const char *when = getenv("FAKE_COLLECTIVES_DIES");
    int of_rank, at;
    if (when && sscanf(when, "%d:%d", &of_rank, &at) == 2 && of_rank == rank && at == call) {
        _exit(9);
    }
}

int ncclCommInitRankConfig(Comm **comm, int ranks, Id id, int rank, Config *config) {
    if (config->size != sizeof *config || config->magic != 0xcafebeef || config->blocking != 0 || ranks > MOST_RANKS) {
        return INVALID_ARGUMENT;
    }
    const int file = id.path[0] ? open(id.path, O_RDWR) : -1;
    if (file < 0) {
        return INVALID_ARGUMENT;
    }
    die_at(rank, 0);
    World *world = mmap(0, HEADER, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    Comm *made = calloc(1, sizeof *made);
    if (world == MAP_FAILED || !made) {
        return SYSTEM_ERROR;
    }
    *made = (Comm){.world = world, .file = file, .rank = rank, .ranks = ranks};
    memcpy(made->path, id.path, sizeof made->path);
    atomic_fetch_add(&world->arrived, 1);
    *comm = made;
    return IN_PROGRESS;
}

/* Copies the bytes of all ranks once all have sent. A rank sends again only when all have taken. */
static int progress(Comm *comm) {
    World *world = comm->world;
    const int turn = atomic_load(&world->sent[comm->rank]);
    for (int rank = 0; rank < comm->ranks; ++rank) {
        if (atomic_load(&world->sent[rank]) < turn) {
            return IN_PROGRESS;
        }
    }
    if (atomic_load(&world->taken[comm->rank]) < turn) {
        for (int rank = 0; rank < comm->ranks; ++rank) {
            /* Unequal counts hang, or write past the end, in RCCL and NCCL. */
            if (world->bytes[rank] != comm->bytes) {
                return IN_PROGRESS;
            }
        }
        for (int rank = 0; rank < comm->ranks; ++rank) {
            char *to = (char *)comm->receive + rank * comm->bytes;
            if (pread(comm->file, to, comm->bytes, HEADER + (off_t)rank * (off_t)comm->bytes) != (ssize_t)comm->bytes) {
                return SYSTEM_ERROR;
            }
        }
        atomic_store(&world->taken[comm->rank], turn);
    }
    for (int rank = 0; rank < comm->ranks; ++rank) {
        if (atomic_load(&world->taken[rank]) < turn) {
            return IN_PROGRESS;
        }
    }
    comm->pending = 0;
    return SUCCESS;
}

int ncclCommGetAsyncError(Comm *comm, int *error) {
    const World *world = comm->world;
    if (comm->pending && !atomic_load(&world->dead)) {
        *error = progress(comm);
        return SUCCESS;
    }
    *error = atomic_load(&world->dead)                    ? REMOTE_ERROR
             : atomic_load(&world->arrived) < comm->ranks ? IN_PROGRESS
                                                          : SUCCESS;
    return SUCCESS;
}

#ifndef WITHOUT_GATHER
int ncclAllGather(const void *send, void *receive, size_t count, int kind, Comm *comm, void *stream) {
    (void)stream;
    World *world = comm->world;
    if (kind != 1 || comm->pending) {
        return INVALID_ARGUMENT;
    }
    if (atomic_load(&world->dead)) {
        return REMOTE_ERROR;
    }
    die_at(comm->rank, atomic_load(&world->sent[comm->rank]) + 1);
    if (pwrite(comm->file, send, count, HEADER + comm->rank * (off_t)count) != (ssize_t)count) {
        return SYSTEM_ERROR;
    }
    comm->receive = receive;
    comm->bytes = count;
    comm->pending = 1;
    world->bytes[comm->rank] = count;
    atomic_fetch_add(&world->sent[comm->rank], 1);
    return IN_PROGRESS;
}
#endif

int ncclCommFinalize(Comm *comm) {
    (void)comm;
    return SUCCESS;
}

int ncclCommDestroy(Comm *comm) {
    unlink(comm->path);
    close(comm->file);
    munmap(comm->world, HEADER);
    free(comm);
    return SUCCESS;
}

int ncclCommAbort(Comm *comm) {
    atomic_store(&comm->world->dead, 1);
    return ncclCommDestroy(comm);
}
