// An ordinary HIP program: kernels and variables embedded in the executable, `<<<>>>`, templates, math functions of the
// device library, a static destructor that frees. Built against HIP 5.2's headers.

#include <hip/hip_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define CHECK(call)                                                                   \
    do {                                                                              \
        hipError_t status = (call);                                                   \
        if (status != hipSuccess) {                                                   \
            std::printf("line %d: %s: %s\n", __LINE__, #call, hipGetErrorName(status)); \
            std::exit(1);                                                             \
        }                                                                             \
    } while (0)
#define REQUIRE(condition)                                            \
    do {                                                              \
        if (!(condition)) {                                           \
            std::printf("line %d: not so: %s\n", __LINE__, #condition); \
            std::exit(1);                                             \
        }                                                             \
    } while (0)

__device__ int counter = 5;
__constant__ float weights[4];

template <typename T>
__global__ void axpy(T* y, const T* x, T a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}

__global__ void functions(float* out, const float* in, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float x = in[i];
    float* o = out + 8 * i;
    o[0] = sinf(x);
    o[1] = expf(x);
    o[2] = logf(fabsf(x) + 1.0f);
    o[3] = erff(x);
    o[4] = powf(fabsf(x), 1.5f);
    o[5] = tgammaf(1.0f + fabsf(x) / 8.0f);
    o[6] = (float)(sin((double)x) * cosh((double)x / 4.0));
    o[7] = cbrtf(x);
}

// Sum of a block: in a wave by shuffles, then in dynamic LDS.
__global__ void sum(unsigned long long* total, const int* in, int n) {
    extern __shared__ long long parts[];
    long long v = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) v += in[i];
    for (int s = warpSize / 2; s > 0; s /= 2) {
        int low = __shfl_down((int)v, s), high = __shfl_down((int)(v >> 32), s);
        v += (long long)high << 32 | (unsigned)low;
    }
    if (threadIdx.x % warpSize == 0) parts[threadIdx.x / warpSize] = v;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (unsigned w = 1; w < (blockDim.x + warpSize - 1) / warpSize; ++w) v += parts[w];
        atomicAdd(total, (unsigned long long)v);
        atomicAdd(&counter, 1);
    }
}

__global__ void weigh(float* out, const float* in) {
    int i = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * blockIdx.z);
    unsigned long long odd = __ballot(i & 1);
    out[i] = in[i] * weights[i % 4] + __popcll(odd);
}

// Freed after main has returned.
struct Owner {
    void* memory = nullptr;
    ~Owner() {
        if (hipFree(memory) != hipSuccess) std::abort();
    }
} owner;

template <typename T>
static T* upload(const std::vector<T>& v) {
    T* d = nullptr;
    CHECK(hipMalloc(&d, v.size() * sizeof(T)));
    CHECK(hipMemcpy(d, v.data(), v.size() * sizeof(T), hipMemcpyHostToDevice));
    return d;
}

template <typename T>
static std::vector<T> download(const T* d, size_t n) {
    std::vector<T> v(n);
    CHECK(hipMemcpy(v.data(), d, n * sizeof(T), hipMemcpyDeviceToHost));
    return v;
}

template <typename T>
static void test_axpy(T a) {
    const int n = 10007;
    std::vector<T> x(n), y(n);
    for (int i = 0; i < n; ++i) x[i] = T(i % 100), y[i] = T(i);
    T *dx = upload(x), *dy = upload(y);
    axpy<T><<<(n + 255) / 256, 256>>>(dy, dx, a, n);
    CHECK(hipGetLastError());
    std::vector<T> found = download(dy, n);
    for (int i = 0; i < n; ++i) REQUIRE(found[i] == a * x[i] + y[i]);
    CHECK(hipFree(dx));
    CHECK(hipFree(dy));
}

static void test_functions() {
    const int n = 1000;
    std::vector<float> x(n);
    for (int i = 0; i < n; ++i) x[i] = (i - n / 2) * 0.017f;
    float *dx = upload(x), *dy = nullptr;
    CHECK(hipMalloc(&dy, 8 * n * sizeof(float)));
    functions<<<dim3((n + 63) / 64), dim3(64)>>>(dy, dx, n);
    std::vector<float> found = download(dy, 8 * n);
    // In units of the last place of float; OpenCL allows these functions 2 to 16.
    double worst[8] = {};
    for (int i = 0; i < n; ++i) {
        double v = x[i];
        double expected[8] = {std::sin(v), std::exp(v), std::log((double)(std::fabs(x[i]) + 1)), std::erf(v),
                              std::pow(std::fabs(v), 1.5), std::tgamma((double)(1 + std::fabs(x[i]) / 8)),
                              std::sin(v) * std::cosh(v / 4), std::cbrt(v)};
        for (int j = 0; j < 8; ++j) {
            float nearest = std::fabs((float)expected[j]);
            double place = std::nextafter(nearest, INFINITY) - nearest;
            worst[j] = std::fmax(worst[j], std::fabs(found[8 * i + j] - expected[j]) / place);
        }
    }
    const char* names[8] = {"sinf", "expf", "logf", "erff", "powf", "tgammaf", "sin * cosh", "cbrtf"};
    const double allowed[8] = {4, 3, 3, 16, 16, 16, 1, 2};
    for (int j = 0; j < 8; ++j) {
        std::printf("  %-10s within %.1f units in the last place\n", names[j], worst[j]);
        REQUIRE(worst[j] <= allowed[j]);
    }
    CHECK(hipFree(dx));
    CHECK(hipFree(dy));
}

static void test_sum() {
    const int n = 100000, blocks = 7, block = 320;
    std::vector<int> x(n);
    long long expected = 0;
    for (int i = 0; i < n; ++i) expected += x[i] = i * 7919 - 300000000;
    int* dx = upload(x);
    unsigned long long* total = upload(std::vector<unsigned long long>(1));
    hipStream_t stream;
    CHECK(hipStreamCreate(&stream));
    sum<<<blocks, block, block / 64 * sizeof(long long), stream>>>(total, dx, n);
    CHECK(hipStreamSynchronize(stream));
    REQUIRE((long long)download(total, 1)[0] == expected);
    int count = 0;
    CHECK(hipMemcpyFromSymbol(&count, HIP_SYMBOL(counter), sizeof count));
    REQUIRE(count == 5 + blocks);
    CHECK(hipStreamDestroy(stream));
    CHECK(hipFree(dx));
    CHECK(hipFree(total));
}

static void test_symbols() {
    const float w[4] = {1, -2, 0.5f, 3};
    CHECK(hipMemcpyToSymbol(HIP_SYMBOL(weights), w, sizeof w));
    void* address = nullptr;
    size_t size = 0;
    CHECK(hipGetSymbolAddress(&address, HIP_SYMBOL(weights)));
    CHECK(hipGetSymbolSize(&size, HIP_SYMBOL(weights)));
    REQUIRE(address != nullptr && size == sizeof w);
    REQUIRE(hipMemcpyToSymbol(HIP_SYMBOL(weights), w, sizeof w, 4) == hipErrorInvalidValue);
    std::vector<float> x(16 * 8 * 3);
    for (size_t i = 0; i < x.size(); ++i) x[i] = float(i);
    float *dx = upload(x), *dy = upload(x);
    weigh<<<dim3(1, 1, 3), dim3(16, 8)>>>(dy, dx);
    std::vector<float> found = download(dy, x.size());
    for (size_t i = 0; i < x.size(); ++i) REQUIRE(found[i] == x[i] * w[i % 4] + 32);
    CHECK(hipFree(dx));
    CHECK(hipFree(dy));
}

int main() {
    hipDeviceProp_t p;
    std::memset(&p, 0xff, sizeof p);
    CHECK(hipGetDeviceProperties(&p, 0));
    REQUIRE(std::strncmp(p.gcnArchName, "gfx942", 6) == 0);
    REQUIRE(p.multiProcessorCount == 304 && p.warpSize == 64 && p.sharedMemPerBlock == 65536);
    REQUIRE(p.maxSharedMemoryPerMultiProcessor == 65536 && p.isLargeBar == 1 && p.managedMemory == 0);
    std::printf("  %s, %d compute units\n", p.name, p.multiProcessorCount);

    hipFuncAttributes attributes;
    CHECK(hipFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&sum)));
    REQUIRE(attributes.numRegs > 0 && attributes.maxThreadsPerBlock == 1024);
    int blocks = 0, block = 0;
    CHECK(hipOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, reinterpret_cast<const void*>(&sum), 256, 32768));
    REQUIRE(blocks == 2);
    CHECK(hipOccupancyMaxPotentialBlockSize(&blocks, &block, reinterpret_cast<const void*>(&sum), 0, 0));
    REQUIRE(block >= 64 && blocks >= 304);

    test_axpy(3.0f);
    test_axpy(-2.5);
    test_axpy(7);
    test_functions();
    test_sum();
    test_symbols();

    // The error of a refused launch is the last error.
    axpy<float><<<1, 2048>>>(nullptr, nullptr, 0.0f, 0);
    REQUIRE(hipGetLastError() == hipErrorInvalidConfiguration);
    CHECK(hipGetLastError());

    // A reset forgets the code; the next launch loads it again.
    CHECK(hipDeviceReset());
    test_axpy(2.0f);
    int count = 0;
    CHECK(hipMemcpyFromSymbol(&count, HIP_SYMBOL(counter), sizeof count));
    REQUIRE(count == 5);
    CHECK(hipMalloc(&owner.memory, 100));
    std::printf("  launches, symbols, occupancy, reset: right\n");
    return 0;
}
