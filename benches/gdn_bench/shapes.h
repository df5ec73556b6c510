// The shapes that are measured: sets that others publish figures of, and what the command line asks for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bench {

// A packed batch of sequences.
struct Shape {
    std::string set;
    std::string lengths_text; // as people write it: 8192, 4096x8, 28672+4096
    int key_heads;
    int value_heads;
    int key_dim = 128;
    int value_dim = 128;
    std::vector<int64_t> lengths; // tokens of each sequence

    int64_t tokens() const;
    int64_t sequences() const { return static_cast<int64_t>(lengths.size()); }
    // cu_seqlens: sequence n has rows [n] to [n + 1].
    std::vector<int32_t> offsets() const;
    // "16,32,8192": what --shape takes.
    std::string name() const;
};

struct Set {
    const char *name;
    const char *what;
    std::vector<Shape> (*shapes)();
};

// All sets, in the order in which they are listed.
const std::vector<Set> &sets();
// The set of a name; Failure names those that there are.
const Set &set_named(const std::string &name);
// "HK,HV,LENGTHS", LENGTHS being runs COUNT or COUNTxTIMES joined by +.
Shape parse_shape(const std::string &text);

} // namespace bench
