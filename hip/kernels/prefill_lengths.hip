// Checks cu_seqlens [sequences + 1], i32 or i64, on the device and replaces entries that would lead out of bounds:
//   checked[i] = i where i <= decodes, else max over j <= i of clamp(cu_seqlens[j], decodes, tokens)
//   rest[i] = checked[decodes + i] - decodes
// Writes a status word: 0, or 1 + the index of the first replaced entry. Replaced are entries out of order, out of
// range or, for i <= decodes, other than i. With a plan, also cuts the sequences after the decodes into segments,
// and with a choice also decides which kernels compute them (prefill/plan.h).
#include "../prefill/plan.h"

namespace {

DEVICE void check_lengths(const dwk_prefill_lengths_args &x) {
    const int lane = arch::lane();
    int longest = 0; // running maximum of all blocks before
    int bad = 0x7fffffff;
    for (int base = 0; base <= x.sequences; base += arch::lanes) {
        const int i = base + lane;
        const bool inside = i <= x.sequences;
        int64_t raw = 0;
        if (inside) {
            raw = x.wide ? ((const int64_t *)x.cu_seqlens)[i] : (int64_t)((const int32_t *)x.cu_seqlens)[i];
        }
        int value = i <= x.decodes ? i : (int)max_of<int64_t>(x.decodes, min_of<int64_t>(raw, x.tokens));
        value = max_of(value, longest);
        value = arch::inclusive_max(value);
        if (inside) {
            x.checked[i] = value;
            if (x.rest && i >= x.decodes) {
                x.rest[i - x.decodes] = value - x.decodes;
            }
        }
        const u64 wrong = arch::ballot(inside && raw != value);
        if (wrong && bad == 0x7fffffff) {
            bad = base + __builtin_ctzll(wrong);
        }
        longest = arch::read_lane(value, arch::lanes - 1);
    }
    if (lane == 0) {
        *x.status = bad == 0x7fffffff ? 0 : 1 + bad;
    }
}

// Makes the lists of the sequences after the decodes. All threads of the workgroup take part.
DEVICE void make_lists(const dwk_prefill_lengths_args &x, const plan::Batch &batch) {
    dwk_prefill_plan chosen = x.plan;
    if (x.choice.split_items) {
        chosen.items = plan::chosen_items(x.plan, x.choice, batch, x.tokens - x.decodes);
    }
    plan::make_lists(chosen, batch);
}

} // namespace

KERNEL(plan::waves *arch::lanes, 1) void dw_prefill_lengths(dwk_prefill_lengths_args x) {
    const int sequences = x.sequences - x.decodes;
    if (!x.plan.items) {
        if (arch::wave() == 0) {
            check_lengths(x);
        }
    } else if (plan::Batch::is_small(sequences) && x.choice.split_items) {
        if (arch::wave() == 0) {
            plan::list_small(x.plan, x.choice, plan::Batch(x), x.tokens - x.decodes);
        } else if (arch::wave() == 1) {
            check_lengths(x);
        }
    } else if (plan::Batch::is_small(sequences)) {
        // Every wave checks these lengths for itself, so that the lists wait for neither memory nor another wave.
        plan::make_lists(x.plan, plan::Batch(x));
        if (arch::wave() == plan::waves - 1) {
            check_lengths(x);
        }
    } else {
        if (arch::wave() == 0) {
            check_lengths(x);
        }
        arch::workgroup_sync();
        make_lists(x, plan::Batch(x.rest ? x.rest : x.checked, sequences));
    }
}
