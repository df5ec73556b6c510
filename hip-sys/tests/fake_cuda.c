// A stand-in for the CUDA driver without a GPU. It logs its calls, and fails on request.
//
// Calls are logged as `device:function(arguments)`, with the device of the calling thread's current context. A function
// that needs a context and has none fails, as the driver's do.

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef DEVICES
#define DEVICES 2
#endif

static char text[1 << 16];
static size_t used;
static const char *failing;
static int failure;
static int needed_contexts[8];
static _Thread_local char *current;

// Handles of contexts: addresses in here, by device.
static char contexts[8];

// The log since the last call.
const char *fake_log(void) {
    static char out[1 << 16];
    memcpy(out, text, sizeof(out));
    text[0] = 0;
    used = 0;
    return out;
}

// Makes the next call of a function fail.
void fake_fail(const char *function, int code) {
    failing = function;
    failure = code;
}

// How often a device's primary context is retained.
int fake_retained(int device) { return needed_contexts[device]; }

static void say(const char *function, const char *format, ...) {
    char arguments[512];
    va_list list;
    va_start(list, format);
    vsnprintf(arguments, sizeof(arguments), format, list);
    va_end(list);
    char device[8] = "-";
    if (current)
        snprintf(device, sizeof(device), "%d", (int)(current - contexts));
    used += snprintf(text + used, sizeof(text) - used, "%s:%s(%s)\n", device, function, arguments);
}

static int fails(const char *function) {
    if (!failing || strcmp(failing, function))
        return 0;
    failing = NULL;
    return failure;
}

#define NUMBER(x) ((unsigned long long)(uintptr_t)(x))

// A function that needs no context.
#define ANYWHERE(...)                                                                                                  \
    do {                                                                                                               \
        say(__func__, __VA_ARGS__);                                                                                    \
        int code = fails(__func__);                                                                                    \
        if (code)                                                                                                      \
            return code;                                                                                               \
    } while (0)

// A function that needs one.
#define CALL(...)                                                                                                      \
    do {                                                                                                               \
        ANYWHERE(__VA_ARGS__);                                                                                         \
        if (!current)                                                                                                  \
            return 201;                                                                                                \
    } while (0)

int cuInit(unsigned flags) {
    ANYWHERE("%u", flags);
    return DEVICES ? 0 : 100;
}

int cuDriverGetVersion(int *version) {
    ANYWHERE("");
    *version = 13000;
    return 0;
}

int cuGetErrorName(int code, const char **name) {
    switch (code) {
    case 2:
        *name = "CUDA_ERROR_OUT_OF_MEMORY";
        return 0;
    case 100:
        *name = "CUDA_ERROR_NO_DEVICE";
        return 0;
    case 218:
        *name = "CUDA_ERROR_INVALID_PTX";
        return 0;
    case 222:
        *name = "CUDA_ERROR_UNSUPPORTED_PTX_VERSION";
        return 0;
    case 716:
        *name = "CUDA_ERROR_MISALIGNED_ADDRESS";
        return 0;
    default:
        *name = NULL;
        return 1;
    }
}

int cuGetErrorString(int code, const char **meaning) {
    if (code != 2) {
        *meaning = NULL;
        return 1;
    }
    *meaning = "out of memory";
    return 0;
}

int cuDeviceGetCount(int *count) {
    ANYWHERE("");
    *count = DEVICES;
    return 0;
}

int cuDeviceGet(int *device, int ordinal) {
    ANYWHERE("%d", ordinal);
    if (ordinal < 0 || ordinal >= DEVICES)
        return 101;
    *device = ordinal;
    return 0;
}

int cuDeviceGetName(char *name, int length, int device) {
    ANYWHERE("%d, %d", length, device);
    snprintf(name, (size_t)length, "Fake GPU %d", device);
    return 0;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    ANYWHERE("%d", device);
    *bytes = 85899345920u;
    return 0;
}

int cuDeviceGetAttribute(int *value, unsigned attribute, int device) {
    ANYWHERE("%u, %d", attribute, device);
    // Attributes of the device; others say their own number.
    switch (attribute) {
    case 10:
        *value = 32;
        return 0;
    case 16:
        *value = 132;
        return 0;
    case 75:
        *value = 9;
        return 0;
    case 76:
        *value = 0;
        return 0;
    case 120:
        return 1;
    default:
        *value = (int)attribute;
        return 0;
    }
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    ANYWHERE("%d", device);
    needed_contexts[device]++;
    *context = contexts + device;
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    ANYWHERE("%d", device);
    needed_contexts[device]--;
    return 0;
}

int cuDevicePrimaryCtxReset_v2(int device) {
    ANYWHERE("%d", device);
    return 0;
}

int cuCtxSetCurrent(void *context) {
    int code = fails(__func__);
    if (!code)
        current = context;
    return code;
}

int cuCtxGetDevice(int *device) {
    CALL("");
    *device = (int)(current - contexts);
    return 0;
}

int cuCtxSynchronize(void) {
    CALL("");
    return 0;
}

int cuMemAlloc_v2(uint64_t *address, size_t size) {
    CALL("%zu", size);
    if (size == 0)
        return 1;
    *address = (uint64_t)(uintptr_t)malloc(size);
    return 0;
}

int cuMemFree_v2(uint64_t address) {
    CALL("%s", address ? "address" : "null");
    free((void *)(uintptr_t)address);
    return 0;
}

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    CALL("");
    *free_bytes = 10;
    *total = 20;
    return 0;
}

int cuMemHostAlloc(void **pointer, size_t size, unsigned flags) {
    CALL("%zu, %u", size, flags);
    *pointer = malloc(size);
    return 0;
}

int cuMemFreeHost(void *pointer) {
    CALL("");
    free(pointer);
    return 0;
}

static int copy(uint64_t to, uint64_t from, size_t size) {
    memmove((void *)(uintptr_t)to, (void *)(uintptr_t)from, size);
    return 0;
}

int cuMemcpy(uint64_t to, uint64_t from, size_t size) {
    CALL("%zu", size);
    return copy(to, from, size);
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) {
    CALL("%zu", size);
    return copy(to, (uint64_t)(uintptr_t)from, size);
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
    CALL("%zu", size);
    return copy((uint64_t)(uintptr_t)to, from, size);
}

int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t size) {
    CALL("%zu", size);
    return copy(to, from, size);
}

int cuMemcpyAsync(uint64_t to, uint64_t from, size_t size, void *stream) {
    CALL("%zu, %llx", size, NUMBER(stream));
    return copy(to, from, size);
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, void *stream) {
    CALL("%zu, %llx", size, NUMBER(stream));
    return copy(to, (uint64_t)(uintptr_t)from, size);
}

int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, void *stream) {
    CALL("%zu, %llx", size, NUMBER(stream));
    return copy((uint64_t)(uintptr_t)to, from, size);
}

int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void *stream) {
    CALL("%zu, %llx", size, NUMBER(stream));
    return copy(to, from, size);
}

int cuMemsetD8_v2(uint64_t to, unsigned char value, size_t count) {
    CALL("%u, %zu", value, count);
    memset((void *)(uintptr_t)to, value, count);
    return 0;
}

int cuMemsetD8Async(uint64_t to, unsigned char value, size_t count, void *stream) {
    CALL("%u, %zu, %llx", value, count, NUMBER(stream));
    memset((void *)(uintptr_t)to, value, count);
    return 0;
}

#ifndef OLD
int cuMemsetD32Async(uint64_t to, unsigned value, size_t count, void *stream) {
    CALL("%x, %zu, %llx", value, count, NUMBER(stream));
    for (size_t i = 0; i < count; i++)
        ((unsigned *)(uintptr_t)to)[i] = value;
    return 0;
}

int cuDeviceGetUuid_v2(char *uuid, int device) {
    ANYWHERE("%d", device);
    memcpy(uuid, "0123456789abcdef", 16);
    return 0;
}
#endif

int cuPointerGetAttributes(unsigned count, unsigned *attributes, void **values, uint64_t pointer) {
    char names[64] = "";
    for (unsigned i = 0; i < count; i++)
        snprintf(names + strlen(names), sizeof(names) - strlen(names), "%u ", attributes[i]);
    CALL("%s%llx", names, (unsigned long long)pointer);
    // 0xd..: memory of device 1; 0xe..: of the host; 0xf..: managed; others are unknown.
    unsigned kind = pointer >> 12;
    for (unsigned i = 0; i < count; i++) {
        switch (attributes[i]) {
        case 2:
            *(unsigned *)values[i] = kind == 0xd ? 2 : kind == 0xe ? 1 : kind == 0xf ? 2 : 0;
            break;
        case 3:
            *(uint64_t *)values[i] = kind < 0xd ? 0 : pointer;
            break;
        case 4:
            *(void **)values[i] = kind < 0xe ? NULL : (void *)(uintptr_t)pointer;
            break;
        case 8:
            *(unsigned *)values[i] = kind == 0xf;
            break;
        case 9:
            *(int *)values[i] = kind < 0xd ? -2 : 1;
            break;
        default:
            return 1;
        }
    }
    return 0;
}

int cuStreamCreate(void **stream, unsigned flags) {
    CALL("%u", flags);
    *stream = (void *)0x51;
    return 0;
}

int cuStreamDestroy_v2(void *stream) {
    CALL("%llx", NUMBER(stream));
    return 0;
}

int cuStreamSynchronize(void *stream) {
    CALL("%llx", NUMBER(stream));
    return 0;
}

int cuStreamQuery(void *stream) {
    CALL("%llx", NUMBER(stream));
    return 600;
}

int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    CALL("%llx, %llx, %u", NUMBER(stream), NUMBER(event), flags);
    return 0;
}

int cuStreamGetCtx(void *stream, void **context) {
    CALL("%llx", NUMBER(stream));
    *context = contexts + 1;
    return 0;
}

int cuStreamBeginCapture_v2(void *stream, unsigned mode) {
    CALL("%llx, %u", NUMBER(stream), mode);
    return 0;
}

int cuStreamEndCapture(void *stream, void **graph) {
    CALL("%llx", NUMBER(stream));
    *graph = (void *)0x61;
    return 0;
}

int cuStreamIsCapturing(void *stream, unsigned *status) {
    CALL("%llx", NUMBER(stream));
    *status = 2;
    return 0;
}

int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) {
    CALL("%llx, %llu", NUMBER(graph), flags);
    *executable = (void *)0x62;
    return 0;
}

int cuGraphLaunch(void *executable, void *stream) {
    CALL("%llx, %llx", NUMBER(executable), NUMBER(stream));
    return 0;
}

int cuGraphDestroy(void *graph) {
    CALL("%llx", NUMBER(graph));
    return 0;
}

int cuGraphExecDestroy(void *executable) {
    CALL("%llx", NUMBER(executable));
    return 0;
}

int cuEventCreate(void **event, unsigned flags) {
    CALL("%u", flags);
    *event = (void *)0x71;
    return 0;
}

int cuEventRecord(void *event, void *stream) {
    CALL("%llx, %llx", NUMBER(event), NUMBER(stream));
    return 0;
}

int cuEventSynchronize(void *event) {
    CALL("%llx", NUMBER(event));
    return 0;
}

int cuEventQuery(void *event) {
    CALL("%llx", NUMBER(event));
    return 600;
}

int cuEventElapsedTime(float *milliseconds, void *start, void *stop) {
    CALL("%llx, %llx", NUMBER(start), NUMBER(stop));
    *milliseconds = 1.5f;
    return 0;
}

int cuEventDestroy_v2(void *event) {
    CALL("%llx", NUMBER(event));
    return 0;
}

int cuModuleLoadDataEx(void **module, const void *image, unsigned count, unsigned *options, void **values) {
    char names[64] = "";
    for (unsigned i = 0; i < count; i++)
        snprintf(names + strlen(names), sizeof(names) - strlen(names), " %u", options[i]);
    CALL("%s,%s", (const char *)image, names);
    *module = (void *)0x81;
    if (strstr(image, "broken")) {
        if (count == 2 && options[0] == 5 && options[1] == 6)
            snprintf(values[0], (size_t)(uintptr_t)values[1], "ptxas fatal: line 3 is broken\n");
        return 218;
    }
    return 0;
}

int cuModuleUnload(void *module) {
    CALL("%llx", NUMBER(module));
    return 0;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    CALL("%llx, %s", NUMBER(module), name);
    if (strcmp(name, "kernel"))
        return 500;
    *function = (void *)0x91;
    return 0;
}

int cuModuleGetGlobal_v2(uint64_t *address, size_t *size, void *module, const char *name) {
    CALL("%llx, %s", NUMBER(module), name);
    *address = 0xd008;
    if (size)
        *size = 12;
    return 0;
}

int cuFuncGetAttribute(int *value, unsigned attribute, void *function) {
    CALL("%u, %llx", attribute, NUMBER(function));
    *value = 77;
    return 0;
}

int cuFuncSetAttribute(void *function, unsigned attribute, int value) {
    CALL("%llx, %u, %d", NUMBER(function), attribute, value);
    return 0;
}

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
    CALL("%llx, %u %u %u, %u %u %u, %u, %llx, %s, %s", NUMBER(function), gx, gy, gz, bx, by, bz, shared, NUMBER(stream),
         parameters ? (const char *)parameters[0] : "-",
         extra && extra[0] == (void *)1 && extra[2] == (void *)2 && !extra[4] ? (const char *)extra[1] : "-");
    return 0;
}

struct launch_config {
    unsigned grid[3], block[3], shared;
    void *stream;
    struct {
        unsigned id, padding;
        int value[16];
    } *attributes;
    unsigned count;
};

int cuLaunchKernelEx(const struct launch_config *x, void *function, void **parameters, void **extra) {
    CALL("%llx, %u %u %u, %u %u %u, %u, %llx, %u: %u %d, %s, %s", NUMBER(function), x->grid[0], x->grid[1], x->grid[2],
         x->block[0], x->block[1], x->block[2], x->shared, NUMBER(x->stream), x->count, x->attributes[0].id,
         x->attributes[0].value[0], (const char *)parameters[0], extra ? "extra" : "-");
    return 0;
}

#ifndef OLD
int cuTensorMapEncodeTiled(uint64_t *map, unsigned type, unsigned rank, void *address, const uint64_t *dimensions,
                           const uint64_t *strides, const unsigned *of_box, const unsigned *element_strides,
                           unsigned interleave, unsigned swizzle, unsigned promotion, unsigned fill) {
    char lists[256];
    size_t at = 0;
    for (unsigned i = 0; i < rank; i++)
        at += snprintf(lists + at, sizeof(lists) - at, "%llu/%llu/%u/%u ", (unsigned long long)dimensions[i],
                       (unsigned long long)(i ? strides[i - 1] : 0), of_box[i], element_strides[i]);
    CALL("%u, %llx, %s, %u %u %u %u", type, NUMBER(address), lists, interleave, swizzle, promotion, fill);
    for (unsigned i = 0; i < 16; i++)
        map[i] = i + 1;
    return 0;
}
#endif

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int size, size_t shared) {
    CALL("%llx, %d, %zu", NUMBER(function), size, shared);
    *blocks = 5;
    return 0;
}
