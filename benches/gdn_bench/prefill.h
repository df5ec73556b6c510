// Prefill as it is measured: tensors, and what launches it.
#pragma once

#include <memory>
#include <string>

#include "device.h"
#include "inputs.h"
#include "shapes.h"

namespace bench {

// One set of tensors in device memory.
struct Tensors {
    Buffer q, k, v, g, beta, initial_state, o, final_state;

    explicit Tensors(const Inputs &inputs);
    size_t bytes() const;
};

enum class Part { whole, prepare, scan };

// A prefill of one shape: what does not change from launch to launch.
class Prefill {
  public:
    virtual ~Prefill() = default;
    virtual size_t workspace_bytes() const = 0;
    // Enqueues it. A scan alone takes what a preparation of the same tensors left in the workspace.
    virtual void launch(const Stream &stream, const Tensors &tensors, const Buffer &workspace, Part part) const = 0;
    // Whether parts can be launched alone.
    virtual bool has_parts() const = 0;
};

// What makes prefills: the kernels themselves, or the C library.
class Implementation {
  public:
    virtual ~Implementation() = default;
    virtual std::unique_ptr<Prefill> prefill(const Shape &shape) const = 0;
    // What is launched, for reports.
    virtual std::string name() const = 0;
};

} // namespace bench
