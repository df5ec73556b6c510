// First kernel of the second stage of a prefill over ranks: copies the summaries of a sequence's blocks, which all
// ranks gathered, next to each other, in the order of the sequence. prefill_combine then folds them as if one rank had
// made them all: the same numbers in the same order, so that results do not depend on the number of ranks. One
// workgroup per (summary, value head).
//
// gathered, states: summaries as in prefill/segment.h.
#include "../arch/contract.h"
#include "../kernel_args.h"

namespace {

constexpr int threads = 256;
constexpr int at_once = 8; // copies of 16 bytes in flight per thread

DEVICE void collect(const dwk_prefill_collect_args &x) {
    arch::wait_for_previous_kernel();
    arch::let_next_kernel_begin();
    const int entry = arch::uniform_value(arch::workgroup() / x.value_heads);
    const int head = arch::workgroup() - entry * x.value_heads;
    // The caller's memory, which may hold anything.
    const int given = arch::uniform(x.order + entry);
    const int slot = (u32)given < (u32)(x.ranks * x.rank_slots) ? given : 0;
    const int rank = arch::uniform_value(slot / x.rank_slots);
    const int64_t index = (int64_t)(slot - rank * x.rank_slots) * x.value_heads + head;
    const char *const of_rank = (const char *)x.gathered + rank * x.rank_bytes;
    const i32x4 *const from = (const i32x4 *)(of_rank + 4 * index * x.words);
    const int64_t to_index = (int64_t)entry * x.value_heads + head;
    i32x4 *const to = (i32x4 *)(x.states + to_index * x.words);
    const int count = x.words / 4;
    if (arch::thread() == 0) {
        const int64_t summaries = (int64_t)x.rank_slots * x.value_heads;
        x.forgotten[to_index] = ((const int32_t *)(of_rank + 4 * summaries * x.words))[index];
    }
#pragma unroll 1
    for (int first = arch::thread(); first < count; first += at_once * threads) {
        i32x4 words[at_once];
        for (int i = 0; i < at_once; ++i) {
            words[i] = from[min_of(first + i * threads, count - 1)];
        }
        for (int i = 0; i < at_once; ++i) {
            if (first + i * threads < count) {
                to[first + i * threads] = words[i];
            }
        }
    }
}

} // namespace

KERNEL(threads, 4) void dw_prefill_collect(dwk_prefill_collect_args x) { collect(x); }
