// The kernels of prefill, loaded as they were compiled, and launches of them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "device.h"
#include "inputs.h"
#include "shapes.h"

namespace bench {

// A kernel, and how it is launched.
struct Kernel {
    std::string name;
    hipFunction_t function = nullptr;
    uint32_t threads = 0;      // of a workgroup
    uint32_t columns = 0;      // value columns of a workgroup; 0: it does not divide them
    uint32_t shared_bytes = 0; // that the launch asks for
};

// The kernels of an architecture, from a folder that `deltawave info --save-kernels` wrote.
class Kernels {
  public:
    Kernels(const std::string &folder, const Device &device);
    const Kernel &named(const std::string &name) const;
    // The scan for the smallest key bucket that holds a key dimension.
    const Kernel &scan_for(int key_dim) const;
    int dies() const { return dies_; }

  private:
    int dies_;
    std::string list_;
    std::vector<Module> modules_;
    std::map<std::string, Kernel> kernels_;
};

// One set of tensors in device memory.
struct Tensors {
    Buffer q, k, v, g, beta, initial_state, o, final_state;

    explicit Tensors(const Inputs &inputs);
    size_t bytes() const;
};

enum class Part { whole, prepare, scan };

// A prefill of a shape: what does not change from launch to launch. It is the unpartitioned form: every sequence is
// walked from its first chunk to its last.
class Prefill {
  public:
    Prefill(const Kernels &kernels, const Shape &shape);
    static size_t workspace_bytes(const Shape &shape);
    // A scan alone takes what a preparation of the same tensors left in the workspace.
    void launch(const Stream &stream, const Tensors &tensors, Part part = Part::whole) const;

  private:
    Shape shape_;
    int dies_;
    const Kernel &prepare_;
    const Kernel &scan_;
    Buffer offsets_;
    Buffer workspace_;
};

} // namespace bench
