// Second kernel of the backward of prefill: the walks over chunks (prefill/backward/walk.h). The two directions do not
// depend on each other. One workgroup of four waves per (item, value head, 32 value columns, direction). An item is a
// sequence, or a segment of one.
//
// q, k [T, HK, K], v, d_o, d_v [T, HV, V] bf16 or f16; states [N, HV, K, V] or [N, HV, V, K], f32, bf16 or f16.
#include "../dispatch.h"
#include "../prefill/backward/schedule.h"
#include "../prefill/backward/walk.h"

namespace {

using namespace prefill;
using namespace prefill::backward;

template <class T, int Keys> DEVICE void walk_chunks(const dwk_prefill_backward_args &x) {
    const dwk_prefill_prepare_args &p = x.prepare;
    arch::wait_for_previous_kernel();
    arch::let_next_kernel_begin();
    SHARED static WalkMemory<Keys> memory;
    const int slabs = arch::uniform_value((p.value_dim + slab - 1) / slab);
    const int unit = arch::uniform_value(arch::workgroup() / (2 * slabs));
    const int rest = arch::workgroup() - unit * 2 * slabs;
    const bool reverse = rest % 2 == 0;
    const int item = arch::uniform_value(unit / p.value_heads);
    WalkWork work;
    work.piece = piece_of(x, item);
    work.head = unit - item * p.value_heads;
    work.key_head = key_head_of(p, work.head);
    work.slab = rest / 2;
    work.has_state = has_state(x, work.piece.sequence);
    const bool outermost = reverse ? work.piece.is_last() : work.piece.first;
    work.start = outermost ? from_given : reverse ? mirrored(x, work.piece.summary + 1) : work.piece.summary - 1;
    work.summary = 0;
    // Read again: otherwise scalar registers hold what both directions read.
    if (reverse) {
        Walk<T, Keys, true>(arch::reread(x), work, memory).run();
    } else {
        Walk<T, Keys, false>(arch::reread(x), work, memory).run();
    }
}

} // namespace

#define WALK(name, type, keys)                                                                                         \
    KERNEL((prefill::backward::walk_kernel_threads<keys>()), (prefill::backward::walk_kernel_residency<keys>()))       \
    void dw_prefill_backward_walk_##name##_k##keys(dwk_prefill_backward_args x) {                                      \
        if constexpr (own_walk(keys)) {                                                                                \
            run_own_walk<type, keys>(x);                                                                               \
        } else {                                                                                                       \
            walk_chunks<type, keys>(x);                                                                                \
        }                                                                                                              \
    }

BACKWARD_WALK_SHARED_BYTES(128)

WALK(bf16, Bf16, 64)
WALK(bf16, Bf16, 128)
WALK(bf16, Bf16, 256)
WALK(f16, F16, 64)
WALK(f16, F16, 128)
WALK(f16, F16, 256)
