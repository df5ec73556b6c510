#include "device.h"

#include <algorithm>
#include <fstream>
#include <iterator>

#include "failure.h"

namespace bench {

void check(hipError_t code, const char *call, const std::string &of) {
    if (code != hipSuccess)
        throw Failure(call + (of.empty() ? "" : " of " + of) + ": " + hipGetErrorName(code) + " (" +
                      std::to_string(static_cast<int>(code)) + "): " + hipGetErrorString(code));
}

Device Device::open(int number) {
    int count = 0;
    const hipError_t code = hipGetDeviceCount(&count);
    if (code != hipSuccess || number >= count) {
        const std::string why = code != hipSuccess ? std::string(hipGetErrorName(code)) + ": " + hipGetErrorString(code)
                                                   : "the runtime has " + std::to_string(count) + ", counted from 0";
        throw Failure("there is no device " + std::to_string(number) + ": " + why +
                          "\nwithout a GPU: make dropin, then LD_LIBRARY_PATH=target/dropin runs this program on the "
                          "gfx942 simulator",
                      Status::no_device);
    }
    check(hipSetDevice(number), "hipSetDevice");
    hipDeviceProp_t properties = {};
    check(hipGetDeviceProperties(&properties, number), "hipGetDeviceProperties");
    Device out;
    out.name = properties.name;
    out.arch = properties.gcnArchName;
    out.arch = out.arch.substr(0, out.arch.find(':'));
    out.compute_units = properties.multiProcessorCount;
    out.simulated = out.name.find("simulator") != std::string::npos;
    return out;
}

// As `dies` in src/launch.rs has it.
int Device::dies() const {
    if (arch == "gfx942")
        return std::max(1, compute_units / (compute_units == 80 ? 20 : 38));
    return arch == "gfx950" ? std::max(1, compute_units / 32) : 1;
}

size_t Device::free_bytes() {
    size_t free = 0, total = 0;
    check(hipMemGetInfo(&free, &total), "hipMemGetInfo");
    return free;
}

Buffer::Buffer(size_t bytes) : bytes_(bytes) {
    // The runtime gives no address for no bytes, and the kernels take null for 'not given'.
    check(hipMalloc(&address_, bytes == 0 ? 1 : bytes), "hipMalloc");
}

Buffer::~Buffer() {
    if (address_ != nullptr)
        (void)hipFree(address_);
}

void Buffer::fill(int byte) {
    check(hipMemset(address_, byte, bytes_), "hipMemset");
    // It may return before it is done, and streams that do not block do not wait for the default one.
    check(hipStreamSynchronize(nullptr), "hipStreamSynchronize");
}

void Buffer::upload(const void *from) { check(hipMemcpy(address_, from, bytes_, hipMemcpyHostToDevice), "hipMemcpy"); }

void Buffer::download(void *to) const { check(hipMemcpy(to, address_, bytes_, hipMemcpyDeviceToHost), "hipMemcpy"); }

Stream::Stream() { check(hipStreamCreateWithFlags(&handle_, hipStreamNonBlocking), "hipStreamCreateWithFlags"); }
Stream::~Stream() { (void)hipStreamDestroy(handle_); }
void Stream::synchronize() const { check(hipStreamSynchronize(handle_), "hipStreamSynchronize"); }

Event::Event() { check(hipEventCreateWithFlags(&handle_, hipEventDefault), "hipEventCreateWithFlags"); }
Event::~Event() {
    if (handle_ != nullptr)
        (void)hipEventDestroy(handle_);
}
void Event::record(const Stream &stream) const { check(hipEventRecord(handle_, stream.handle()), "hipEventRecord"); }

double Event::microseconds_since(const Event &earlier) const {
    float milliseconds = 0;
    check(hipEventElapsedTime(&milliseconds, earlier.handle_, handle_), "hipEventElapsedTime");
    return milliseconds * 1e3;
}

Module::Module(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    if (!file)
        throw Failure(path + " cannot be read: deltawave info --save-kernels writes the kernels");
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    check(hipModuleLoadData(&handle_, bytes.data()), "hipModuleLoadData", path);
}

Module::~Module() {
    if (handle_ != nullptr)
        (void)hipModuleUnload(handle_);
}

hipFunction_t Module::function(const std::string &name, uint32_t shared_bytes) const {
    hipFunction_t out = nullptr;
    check(hipModuleGetFunction(&out, handle_, name.c_str()), "hipModuleGetFunction", name);
    if (shared_bytes > 0)
        check(hipFuncSetAttribute(reinterpret_cast<const void *>(out), hipFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared_bytes)),
              "hipFuncSetAttribute", name);
    return out;
}

} // namespace bench
