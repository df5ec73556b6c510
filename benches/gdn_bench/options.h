// What the command line says.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "measure.h"
#include "report.h"
#include "shapes.h"

namespace bench {

struct Options {
    bool help = false;
    bool list = false;
    bool json = false;
    int device = 0;
    std::string kernels; // a folder
    std::string library; // the C library; empty: the kernels themselves
    int segments = 0;    // of the longest sequence; 0: as the library plans
    std::vector<Shape> shapes;
    std::optional<int> runs;
    std::optional<double> warm_up_ms;
    std::optional<size_t> cache_bytes;
    std::optional<Peak> peak;
};

extern const char *const help;

// Failure where the arguments make no sense. `program` is where this program lies: the kernels are looked for beside
// it.
Options parse(const std::vector<std::string> &arguments, const std::string &program);

} // namespace bench
