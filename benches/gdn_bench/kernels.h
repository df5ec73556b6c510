// The kernels of prefill, loaded as they were compiled, and launched with arguments that are made here.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "prefill.h"

namespace bench {

// A kernel, and how it is launched.
struct Kernel {
    std::string name;
    hipFunction_t function = nullptr;
    uint32_t threads = 0;      // of a workgroup
    uint32_t columns = 0;      // value columns of a workgroup; 0: it does not divide them
    uint32_t shared_bytes = 0; // that the launch asks for
    size_t argument_bytes = 0;
    size_t second_argument_bytes = 0; // 0: it takes one argument
};

// The kernels of an architecture, from a folder that `deltawave info --save-kernels` wrote.
class Kernels : public Implementation {
  public:
    Kernels(const std::string &folder, const Device &device);
    // The unpartitioned form: every sequence is walked from its first chunk to its last.
    std::unique_ptr<Prefill> prefill(const Shape &shape) const override;
    std::string name() const override { return "kernels"; }

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

} // namespace bench
