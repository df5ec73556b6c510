// Kernel of the backward of prefill where sequences are cut: what each segment leaves (prefill/backward/segment.h), by
// walks that keep nothing (prefill/backward/walk.h). One workgroup of four waves per (summary, value head, 32 columns
// of one of three matrices):
//   N' [K, V]   gradient of the state before the segment after the summary's, starting from zeros
//   N  [K, V]   state after the summary's segment, starting from zeros
//   M  [K, K]   state after the summary's segment, starting from the identity with v = 0
// The first segment of a sequence starts from the initial state, the last one from the gradient of the final state.
// They need no M. A rank's blocks (prefill/backward/segment.h) leave N' of themselves, and N and M where others need
// them. If the gates forget, M is 0 and is not stored, and walks skip chunks that do not matter.
//
// q, k [T, HK, K], v, d_o [T, HV, V] bf16 or f16; summaries [HV] of N [V, K] f32 and M or, in reverse, its transpose
// [K, K].
#include "../prefill/backward/schedule.h"
#include "../prefill/backward/walk.h"

namespace {

using namespace prefill;
using namespace prefill::backward;

template <class T, int Keys> DEVICE void summarise(const dwk_prefill_backward_args &x) {
    constexpr int columns = own_walk(Keys) ? own_columns : slab; // of a workgroup
    const dwk_prefill_prepare_args &p = x.prepare;
    arch::wait_for_previous_kernel();
    arch::let_next_kernel_begin();
    SHARED static WalkMemory<Keys> memory;
    const int of_n = arch::uniform_value((p.value_dim + columns - 1) / columns);
    const int members = 2 * of_n + arch::uniform_value((p.key_dim + columns - 1) / columns);
    const int unit = arch::uniform_value(arch::workgroup() / members);
    const int rest = arch::workgroup() - unit * members;
    const int summary = arch::uniform_value(unit / p.value_heads);
    const bool reverse = rest < of_n, of_m = rest >= 2 * of_n;
    WalkWork work;
    work.head = unit - summary * p.value_heads;
    work.key_head = key_head_of(p, work.head);
    work.slab = rest - (of_m ? 2 * of_n : reverse ? 0 : of_n);
    work.piece = piece_of(x, summary);
    // The first block of a sequence needs no N', the last one no N, and neither needs M.
    if ((work.piece.first && (of_m || (x.blocks && reverse))) || (!reverse && work.piece.is_last())) {
        return;
    }
    if (reverse && !x.blocks) {
        work.piece = piece_after(x, work.piece);
    }
    work.has_state = has_state(x, work.piece.sequence);
    work.summary = reverse ? mirrored(x, x.blocks ? summary : summary + 1) : summary;
    int needed;
    const bool forgotten = forget(x, work.piece, work.head, reverse, needed);
    if (of_m) {
        if (work.slab == 0 && arch::thread() == 0) {
            x.forgotten[(int64_t)summary * p.value_heads + work.head] = forgotten;
            x.forgotten[(int64_t)mirrored(x, summary) * p.value_heads + work.head] = forgotten;
        }
        if (forgotten) {
            return;
        }
        work.start = from_identity;
    } else {
        const bool outermost = reverse ? work.piece.is_last() : work.piece.first;
        work.start = outermost && !forgotten ? from_given : from_zeros;
        work.piece.first_chunk += reverse ? 0 : work.piece.chunks - needed;
        work.piece.chunks = needed;
    }
    // Read again: otherwise scalar registers hold what both directions read.
    if constexpr (own_walk(Keys)) {
        run_own_summary<T, Keys>(x, work, reverse);
    } else if (reverse) {
        Walk<T, Keys, true, false>(arch::reread(x), work, memory).run();
    } else {
        Walk<T, Keys, false, false>(arch::reread(x), work, memory).run();
    }
}

} // namespace

#define SUMMARISE(name, type, keys)                                                                                    \
    KERNEL((prefill::backward::walk_kernel_threads<keys>()), (prefill::backward::walk_kernel_residency<keys>()))       \
    void dw_prefill_backward_summarise_##name##_k##keys(dwk_prefill_backward_args x) { summarise<type, keys>(x); }

BACKWARD_SUMMARISE_SHARED_BYTES(128)

SUMMARISE(bf16, Bf16, 64)
SUMMARISE(bf16, Bf16, 128)
SUMMARISE(bf16, Bf16, 256)
SUMMARISE(f16, F16, 64)
SUMMARISE(f16, F16, 128)
SUMMARISE(f16, F16, 256)
