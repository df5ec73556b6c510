// Decode for speculative decoding: the recurrence of decode.hip over the drafts of every sequence. The state after each
// token is stored to a slot of its own. The next launch starts from the slot that the count of accepted tokens chooses.
// Sequences may have different lengths (decode/slots.h). decode_draft_norm: with the gated norm of o, as decode_norm.
#include "../decode/walk.h"

using namespace decode;

KERNEL(threads, draft_residency) void dw_decode_draft_bf16_k128(dwk_decode_draft_args x) {
    recur<arch::Bf16, 128, false, true>(x.decode);
}
KERNEL(threads, 2) void dw_decode_draft_bf16_k256(dwk_decode_draft_args x) {
    recur<arch::Bf16, 256, false, true>(x.decode);
}
KERNEL(threads, draft_residency) void dw_decode_draft_f16_k128(dwk_decode_draft_args x) {
    recur<arch::F16, 128, false, true>(x.decode);
}
KERNEL(threads, 2) void dw_decode_draft_f16_k256(dwk_decode_draft_args x) {
    recur<arch::F16, 256, false, true>(x.decode);
}
KERNEL(row_threads, row_residency) void dw_decode_draft_norm_bf16(dwk_decode_draft_args x) {
    recur<arch::Bf16, 128, true, true>(x.decode);
}
KERNEL(row_threads, row_residency) void dw_decode_draft_norm_f16(dwk_decode_draft_args x) {
    recur<arch::F16, 128, true, true>(x.decode);
}
