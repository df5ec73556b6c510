// Lengths that only the device knows, made safe to index with by one workgroup:
//   checked[i] = i where i <= decodes, else max over j <= i of clamp(cu_seqlens[j], decodes, tokens)
//   rest[i] = checked[decodes + i] - decodes
// The status word is 0, or 1 + the index of the first replaced entry. Replaced are entries out of order, out of range
// or, for i <= decodes, other than i. With a plan, the workgroup also cuts the sequences after the decodes into
// segments, and with a choice it also decides which kernels compute them (plan.h).
#pragma once

#include "plan.h"

namespace lengths {
namespace { // internal linkage, as in conv/convolution.h

// Entries of cu_seqlens from one on, an entry for each lane.
struct Block {
    int index; // of this lane's entry
    bool inside;
    int64_t raw; // 0 past the last entry
    int checked; // at least those of all entries before

    // The entries from `base` on. `longest`: the checked entry before them, or 0.
    DEVICE_MEMBER Block(const dwk_prefill_lengths_args &x, int base, int longest)
        : index(base + arch::lane()), inside(index <= x.sequences), raw(0) {
        if (inside) {
            raw = x.wide ? ((const int64_t *)x.cu_seqlens)[index] : (int64_t)((const int32_t *)x.cu_seqlens)[index];
        }
        const int value = index <= x.decodes ? index : (int)max_of<int64_t>(x.decodes, min_of<int64_t>(raw, x.tokens));
        checked = arch::inclusive_max(max_of(value, longest));
    }
    // The last checked entry.
    DEVICE_MEMBER int longest() const { return arch::read_lane(checked, arch::lanes - 1); }
};

// Writes the checked entries and the status word. For one wave.
DEVICE void check(const dwk_prefill_lengths_args &x) {
    int longest = 0;
    int bad = 0x7fffffff;
    for (int base = 0; base <= x.sequences; base += arch::lanes) {
        const Block block(x, base, longest);
        if (block.inside) {
            x.checked[block.index] = block.checked;
            if (x.rest && block.index >= x.decodes) {
                x.rest[block.index - x.decodes] = block.checked - x.decodes;
            }
        }
        const u64 wrong = arch::ballot(block.inside && block.raw != block.checked);
        if (wrong && bad == 0x7fffffff) {
            bad = base + __builtin_ctzll(wrong);
        }
        longest = block.longest();
    }
    if (arch::lane() == 0) {
        *x.status = bad == 0x7fffffff ? 0 : 1 + bad;
    }
}

// All of it, by a workgroup of so many waves.
template <int Waves> DEVICE void make(const dwk_prefill_lengths_args &x) {
    const int sequences = x.sequences - x.decodes;
    if (!x.plan.items) {
        if (arch::wave() == 0) {
            check(x);
        }
    } else if (plan::Batch::is_small(sequences)) {
        const bool gates_choose = x.choice.samples;
        const bool cuts = x.machine.compute_units == 0 || x.machine.most_summaries > 0 || gates_choose;
        // Every wave checks these lengths for itself, so that the lists wait for neither memory nor another wave.
        if (x.choice.split_items && !cuts) {
            if (arch::wave() == 0) {
                plan::list_whole(x.plan, x.choice, plan::Batch(x));
            } else if (arch::wave() == 1) {
                check(x);
            }
            return;
        }
        const plan::Batch batch(x);
        const plan::Division division = plan::divide<Waves>(x, batch);
        // Segments that the gates may choose are in place of a list of whole sequences.
        const bool chosen = gates_choose && division.cut >= 0, fused = division.items == x.plan.items;
        if (arch::wave() == 0) {
            if (chosen && fused) {
                plan::end_chains(x.plan, 0);
            } else {
                plan::list_small(x.plan, batch, division);
            }
        } else if (arch::wave() == 1) {
            check(x);
        } else if (gates_choose && arch::wave() == 2) {
            if (chosen) {
                plan::list_cut(x.choice, batch, division.cut, !fused, x.plan.items, plan::fused_items(x.choice, batch));
            } else if (arch::lane() == 0) {
                x.choice.samples[0] = 0;
            }
        }
    } else {
        if (arch::wave() == 0) {
            check(x);
        }
        arch::workgroup_sync();
        const plan::Batch batch(x.rest ? x.rest : x.checked, sequences);
        plan::make_lists<Waves>(x.plan, batch, plan::divide<Waves>(x, batch));
    }
}

} // namespace
} // namespace lengths
