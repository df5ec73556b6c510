// The HIP runtime: devices, memory, streams, events, modules. Calls that fail throw Failure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <hip/hip_runtime_api.h>

namespace bench {

// Throws where a call of the runtime failed. `of`: what the call was about.
void check(hipError_t code, const char *call, const std::string &of = "");

struct Device {
    std::string name;
    std::string arch; // without features: gfx942
    int compute_units = 0;
    // Executes kernels on the host: its events say nothing about a GPU.
    bool simulated = false;

    // Makes the device of a number the current one.
    static Device open(int number);
    static size_t free_bytes();
    // To which it deals workgroups in turn: those of MI300 have 38 compute units each, or 20 on MI308X.
    int dies() const;
};

// Device memory.
class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(size_t bytes);
    Buffer(const Buffer &) = delete;
    Buffer(Buffer &&other) noexcept
        : address_(std::exchange(other.address_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Buffer &operator=(Buffer &&other) noexcept {
        std::swap(address_, other.address_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Buffer();

    void *address() const { return address_; }
    size_t bytes() const { return bytes_; }
    void fill(int byte);

    template <typename T> static Buffer of(const std::vector<T> &values) {
        Buffer out(values.size() * sizeof(T));
        out.upload(values.data());
        return out;
    }
    template <typename T> std::vector<T> download() const {
        std::vector<T> out(bytes_ / sizeof(T));
        download(out.data());
        return out;
    }

  private:
    void upload(const void *from);
    void download(void *to) const;

    void *address_ = nullptr;
    size_t bytes_ = 0;
};

class Stream {
  public:
    Stream();
    Stream(const Stream &) = delete;
    ~Stream();
    hipStream_t handle() const { return handle_; }
    void synchronize() const;

  private:
    hipStream_t handle_ = nullptr;
};

class Event {
  public:
    Event();
    Event(const Event &) = delete;
    Event(Event &&other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    ~Event();
    void record(const Stream &stream) const;
    // Both have happened.
    double microseconds_since(const Event &earlier) const;

  private:
    hipEvent_t handle_ = nullptr;
};

// A code object that was loaded.
class Module {
  public:
    explicit Module(const std::string &path);
    Module(const Module &) = delete;
    Module(Module &&other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    ~Module();
    hipFunction_t function(const std::string &name, uint32_t shared_bytes) const;

  private:
    hipModule_t handle_ = nullptr;
};

} // namespace bench
