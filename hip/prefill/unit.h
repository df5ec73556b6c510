// Work of a workgroup of prefill_prepare: one chunk of a key head, for some of the value heads that read it.
#pragma once

#include "../dispatch.h"
#include "batch.h"

namespace prefill {

struct Unit {
    int record; // record of the chunk
    int key_head;
    int first_head, end_head; // index among the value heads that read the key head
    int sequence;
    int begin; // the chunk's first token
    int rows;
};

// Writes zeros to 64 rows of o past the last sequence, which ends at token `end`. `index` counts chunks from there.
DEVICE void clear_rows(const dwk_prefill_prepare_args &x, int end, int index, int key_head) {
    const int group = x.value_heads / x.key_heads;
    const int64_t first = end + (int64_t)index * chunk;
#pragma unroll 1
    for (int row = 0; row < chunk; ++row) {
        const int64_t token = first + row;
        if (token >= x.tokens) {
            return;
        }
        for (int v = 0; v < group; ++v) {
            const int head = key_head * group + v;
            short *o = (short *)x.o + token * x.o_strides.token + head * x.o_strides.head;
            for (int column = own_row(); column < x.value_dim; column += chunk) {
                o[column] = 0;
            }
        }
    }
}

} // namespace prefill
