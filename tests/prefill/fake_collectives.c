/* A library of collectives for ranks that are threads of one process, whose memory is the host's. Like RCCL and NCCL
 * without blocking: calls return 'in progress', and are complete when all ranks have made them. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 4, REMOTE_ERROR = 6, IN_PROGRESS = 7, MOST_RANKS = 16, MOST_WORLDS = 64 };

typedef struct {
    char bytes[128];
} Id;

typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
} Config;

typedef struct World World;

typedef struct {
    World *world;
    int rank, pending;
    const void *send;
    void *receive;
    size_t bytes;
} Comm;

struct World {
    Id id;
    int ranks, arrived, sent, dead;
    Comm *comms[MOST_RANKS];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static World worlds[MOST_WORLDS];
static int ids;

const char *ncclGetErrorString(int code) { return code == REMOTE_ERROR ? "remote process exited" : "invalid argument"; }

int ncclGetUniqueId(Id *id) {
    pthread_mutex_lock(&lock);
    memset(id, 0, sizeof *id);
    ++ids;
    memcpy(id->bytes, &ids, sizeof ids);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int ncclCommInitRankConfig(Comm **comm, int ranks, Id id, int rank, Config *config) {
    int number;
    memcpy(&number, id.bytes, sizeof number);
    if (config->size != sizeof *config || config->magic != 0xcafebeef || config->blocking != 0 || number < 1 ||
        number >= MOST_WORLDS || ranks > MOST_RANKS) {
        return INVALID_ARGUMENT;
    }
    pthread_mutex_lock(&lock);
    World *world = &worlds[number];
    Comm *made = calloc(1, sizeof *made);
    made->world = world;
    made->rank = rank;
    world->ranks = ranks;
    world->comms[rank] = made;
    ++world->arrived;
    *comm = made;
    pthread_mutex_unlock(&lock);
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(Comm *comm, int *error) {
    pthread_mutex_lock(&lock);
    const World *world = comm->world;
    *error = world->dead ? REMOTE_ERROR : world->arrived < world->ranks || comm->pending ? IN_PROGRESS : SUCCESS;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

#ifndef WITHOUT_GATHER
int ncclAllGather(const void *send, void *receive, size_t count, int kind, Comm *comm, void *stream) {
    (void)stream;
    if (kind != 1) {
        return INVALID_ARGUMENT;
    }
    pthread_mutex_lock(&lock);
    World *world = comm->world;
    if (world->dead) {
        pthread_mutex_unlock(&lock);
        return REMOTE_ERROR;
    }
    comm->send = send;
    comm->receive = receive;
    comm->bytes = count;
    comm->pending = 1;
    if (++world->sent == world->ranks) {
        for (int to = 0; to < world->ranks; ++to) {
            for (int from = 0; from < world->ranks; ++from) {
                memcpy((char *)world->comms[to]->receive + from * count, world->comms[from]->send, count);
            }
        }
        for (int rank = 0; rank < world->ranks; ++rank) {
            world->comms[rank]->pending = 0;
        }
        world->sent = 0;
    }
    pthread_mutex_unlock(&lock);
    return IN_PROGRESS;
}
#endif

int ncclCommFinalize(Comm *comm) {
    (void)comm;
    return SUCCESS;
}

int ncclCommDestroy(Comm *comm) {
    pthread_mutex_lock(&lock);
    free(comm);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int ncclCommAbort(Comm *comm) {
    pthread_mutex_lock(&lock);
    comm->world->dead = 1;
    free(comm);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
