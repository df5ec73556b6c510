// Rows of Q, K, V and O of a (sequence, head) on CDNA, as operands, chunk by chunk.
#pragma once

#include "../../tensor/rows.h"
#include "layout.h"

namespace prefill {

using arch::OperandPair;

// Rows of successive chunks. Rows past the end of a chunk read as zeros and are not written.
class TokenRows {
  public:
    DEVICE_MEMBER TokenRows(const void *p, const dwk_token_strides &s, int sequence, int begin, int head, int dim)
        : stride((u32)s.token * 2), row_bytes(2 * dim),
          memory(row_address(p, s, sequence, begin, head), (chunk - 1) * stride + row_bytes) {}

    // Limits access to the chunk's `rows` rows: loads of later rows give 0, stores are dropped.
    DEVICE_MEMBER void limit(int rows) {
        if (rows < chunk) {
            memory.limit(rows > 0 ? (rows - 1) * stride + row_bytes : 0);
        }
    }
    // Limits access to `rows` rows, at most 64 of them, whatever the limit was. Without a branch.
    DEVICE_MEMBER void limit_to(int rows) {
        rows = min_of(arch::opaque_uniform(arch::uniform_value(rows)), chunk);
        memory.limit(rows > 0 ? (rows - 1) * stride + row_bytes : 0);
    }
    DEVICE_MEMBER void advance() { memory.advance((u64)stride * chunk); }
    // Moves to the rows of another (sequence, head) of the same tensor, from token `begin` on. Limits are gone.
    DEVICE_MEMBER void move_to(const void *p, const dwk_token_strides &s, int sequence, int begin, int head) {
        memory = Window(row_address(p, s, sequence, begin, head), (chunk - 1) * stride + row_bytes);
    }

    const u32 stride, row_bytes;
    Window memory;
};

// Strides at which rows are distinct. A single token may have any stride, but masked rows must not overlap it.
DEVICE dwk_token_strides apart(dwk_token_strides s, int dim) {
    s.token = max_of(s.token, (int64_t)dim);
    return s;
}

// Whether this lane's eight of the 32 key elements of a pair are below K.
template <int Keys> DEVICE bool inside_keys(int pair, int key_dim) {
    return 32 * pair + 32 <= smallest_key_dim(bucket_of(Keys)) || 32 * pair + 8 * arch::eighth(arch::lane()) < key_dim;
}

} // namespace prefill
