//! Launch parameters per architecture: threads, value columns and shared memory of a workgroup, and kernel costs for
//! the planner of segments. Tests compare the code objects with them.

use super::{BACKWARD_BUCKETS, FUSED_BUCKETS, KEY_BUCKETS, Role};
use crate::abi;

/// Launch parameters of an architecture's kernels.
#[derive(Debug, PartialEq)]
pub struct Target {
    /// Threads of `prefill_lengths`: sixteen waves.
    lengths_threads: u32,
    /// Threads of a wave, the workgroup of `prefill_short`.
    wave_threads: u32,
    /// Workgroups of `prefill_prepare`, a wave each on CDNA, per compute unit beyond which more workgroups save no time.
    pub(crate) prepare_room: usize,
    /// Workgroups of `prefill_scan`, for each of [`KEY_BUCKETS`].
    scan: [Walk; KEY_BUCKETS.len()],
    /// Most chunks of a segment with which a wide workgroup of `prefill_scan` walks several, for K from 65 to 128: only as
    /// many are launched as there are compute units. Each loads its next segment while it finishes one. Where the
    /// host knows the lengths, also twice as many chunks as a workgroup has units of work, up to four times this, and
    /// equal sequences up to eight times this. If it is not 0, workgroups of `prefill_summarise` and `prefill_combine`
    /// take several segments, too, where the device makes the list. 0: a workgroup walks one.
    pub(crate) units_chunks: u32,
    /// Most summaries of a batch that `prefill_scan` chains itself, for K up to 128 (`chains_itself` in
    /// `hip/prefill/gfx9/chained.h`): fewer than a wave has lanes. 0: it chains none.
    pub(crate) scan_chains: usize,
    /// Workgroups of `prefill_summarise`, for each of [`KEY_BUCKETS`].
    summarise: [Walk; KEY_BUCKETS.len()],
    /// Workgroups of `prefill_combine`, likewise.
    combine: [Walk; KEY_BUCKETS.len()],
    /// Whether `prefill_scan` and `prefill_summarise` take descriptions of q, k, v and states, with which the copy engine (TMA) reads
    /// them, as a second argument.
    takes_maps: bool,
    /// Workgroups of `prefill_fused`, for each of the first [`FUSED_BUCKETS`] of [`KEY_BUCKETS`].
    fused: [Walk; FUSED_BUCKETS],
    /// Workgroups of `prefill_fused_summarise`, likewise.
    fused_summarise: [Walk; FUSED_BUCKETS],
    /// Most workgroups of `decode` on a compute unit for which `decode_few` is faster.
    pub(crate) decode_few_room: usize,
    /// Most (sequence, value head) for which `decode_norm` is faster than decode and norm one after the other.
    pub(crate) decode_norm_rows: usize,
    /// Most tokens of a thread of `conv`, a power of two. It also reads the `width - 1` tokens before them.
    pub(crate) conv_longest_run: u32,
    /// Tokens of a head that a lane of `norm` computes where there are many, as many as the kernel loads at once, and threads
    /// of its workgroups then.
    pub(crate) norm_run: usize,
    pub(crate) norm_threads: u32,
    /// Value columns of a workgroup of `prefill_short`: one wave.
    pub(crate) short_columns: usize,
    /// Whether `prefill_short` leaves the bits of `prefill_scan`. Only then may `PrefillPath::Auto` choose it: a sequence that
    /// is resumed must have the bits of the whole one.
    pub(crate) short_has_bits_of_scan: bool,
    /// Costs for the planner of segments.
    pub(crate) costs: Costs,
    /// Workgroups of `prefill_backward_walk` and `prefill_backward_summarise`, for each of [`BACKWARD_BUCKETS`]. What a walk
    /// keeps has room for a multiple of their columns.
    backward_walk: [Walk; BACKWARD_BUCKETS.len()],
    /// Workgroups of `prefill_backward_gradients`, likewise.
    backward_gradients: [Gradients; BACKWARD_BUCKETS.len()],
    /// Costs for the planner of the backward's segments, likewise. `scan` is that of `prefill_backward_walk`.
    backward_costs: [Costs; BACKWARD_BUCKETS.len()],
    /// Costs for the planner of fused prefills.
    pub(crate) fused_costs: FusedCosts,
}

/// Modelled kernel costs for the planner of segments, in microseconds at K = V = 128.
#[derive(Debug, PartialEq)]
pub(crate) struct Costs {
    pub(crate) scan: KernelCost,
    pub(crate) summarise: KernelCost,
    /// `prefill_combine`, per segment.
    pub(crate) combine: f64,
    /// Launch of one more kernel.
    pub(crate) launch: f64,
    /// Launch of `prefill_combine`. Where kernels overlap, it costs nothing if gates forget.
    pub(crate) combine_launch: f64,
    /// Start of `prefill_scan`, if workgroups share compute units. A further round takes eight times as long.
    pub(crate) shared_start: f64,
    /// Segment only below this fraction of the unsegmented time, because segments double the work and take memory.
    pub(crate) worthwhile: f64,
    /// Share of the chunks of summarised segments that `prefill_summarise` is expected to walk: gates that forget leave few.
    pub(crate) summarised: f64,
    /// Whether `prefill_scan` needs no summaries for sequences of two segments that start from zeros.
    pub(crate) early_starts: bool,
    /// Whether a segment of `prefill_scan` starts early, without a summary, where few chunks before it forget.
    pub(crate) starts_soon: bool,
    /// Least chunks of a segment that is summarised in two pieces: so many for each segment of the longest sequence, and so
    /// many for each round of workgroups of `prefill_summarise`. Pieces take half the time, and `prefill_combine` chains twice
    /// as many. None: a segment has one summary.
    pub(crate) two_pieces: Option<[f64; 2]>,
    /// Prefer fewer segments up to this multiple of the least time, because they are less work.
    pub(crate) fewer: f64,
    /// Also try the number of segments with which the workgroups of `prefill_scan` fill the device.
    pub(crate) fills: bool,
}

/// Modelled costs of a fused prefill, at K = V = 128. One workgroup at a time is on a compute unit. Integers are in
/// sixteenths of a chunk, because host and device must cut alike.
#[derive(Debug, PartialEq)]
pub(crate) struct FusedCosts {
    /// Whether `PrefillPath::Auto` may choose the fused path.
    pub(crate) automatic: bool,
    /// Microseconds per chunk.
    pub(crate) chunk: f64,
    /// The same where the kernel also normalises rows of q and k and, as in a layer, computes the gates. Read where gates may
    /// choose.
    pub(crate) chunk_with_norms: f64,
    /// Microseconds per chunk of N or of M in `prefill_fused_summarise`, if gates forget nothing.
    pub(crate) summary_chunk: f64,
    /// Start of a workgroup.
    pub(crate) start: i32,
    /// The same, where the gates choose the path and each workgroup finds where it starts.
    pub(crate) start_by_gates: i32,
    /// Chunks that a segment begins early, if gates forget soon.
    pub(crate) warm_up: i32,
    /// Launch of `prefill_fused_summarise`, if gates forget soon.
    pub(crate) summaries: i32,
    /// Cut sequences only below so many sixteenths of the time of whole ones.
    pub(crate) worthwhile: i32,
    /// Least chunks of a segment that the planner chooses.
    pub(crate) least_chunks: i32,
    /// Most chunks that a segment begins early.
    pub(crate) most_warm_up: i32,
    /// Most chunks of the longest sequence with which workgroups walk several units of work; 0: none does.
    pub(crate) units_chunks: u32,
    /// Microseconds of `prefill_prepare` per (chunk, value head) on a compute unit, for the comparison with the split
    /// path.
    pub(crate) prepare: f64,
    /// Multiples of the times of a chunk of `prefill_scan` and `prefill_prepare` where HBM limits them, for the same
    /// comparison.
    pub(crate) scan_from_hbm: f64,
    pub(crate) prepare_from_hbm: f64,
    /// Least microseconds of `prefill_prepare`, for the same comparison.
    pub(crate) prepare_start: f64,
    /// Microseconds of the start of a workgroup of `prefill_scan`, for the same comparison.
    pub(crate) scan_start: f64,
}

/// Modelled time of a kernel that walks chunks, in microseconds per chunk.
#[derive(Debug, PartialEq)]
pub(crate) struct KernelCost {
    /// Time with one workgroup on a compute unit.
    pub(crate) chunk: f64,
    /// Time with `residency` workgroups on a compute unit. A workgroup with twice the columns counts as two.
    pub(crate) chunk_shared: f64,
    /// Most workgroups on a compute unit.
    pub(crate) residency: usize,
}

/// A workgroup that walks the chunks of a segment, or chains summaries.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Walk {
    pub(crate) threads: u32,
    /// Threads of a workgroup with twice the columns; equal to `threads` if there is none.
    pub(crate) wide_threads: u32,
    /// Value columns; for `prefill_summarise` also columns of M.
    pub(crate) columns: usize,
    /// Bytes of dynamic shared memory that the launch requests, without the code object's static memory.
    pub(crate) shared_bytes: u32,
}

/// A workgroup of `prefill_backward_gradients`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Gradients {
    threads: u32,
    /// Bytes of dynamic shared memory that the launch requests.
    shared_bytes: u32,
    /// Whether a workgroup on each compute unit does all the work. Otherwise one does a (chunk, key head).
    pub(crate) persistent: bool,
}

/// CDNA, `hip/prefill/gfx9/layout.h`.
static CDNA: Target = {
    const WALK: Walk = Walk {
        threads: 256,
        wide_threads: 256,
        columns: 32,
        shared_bytes: 0,
    };
    // Half of the waves compute the outputs.
    const SCAN: Walk = Walk {
        threads: 512,
        wide_threads: 512,
        ..WALK
    };
    const GRADIENTS: Gradients = Gradients {
        threads: 512,
        shared_bytes: 0,
        persistent: false,
    };
    // Modelled for an MI300X.
    const BACKWARD: Costs = Costs {
        scan: KernelCost {
            chunk: 2.8,
            chunk_shared: 3.9,
            residency: 2,
        },
        summarise: KernelCost {
            chunk: 2.6,
            chunk_shared: 3.7,
            residency: 2,
        },
        combine: 1.7,
        launch: 9.0,
        combine_launch: 9.0,
        shared_start: 0.0,
        worthwhile: 0.9,
        summarised: 0.5,
        early_starts: false,
        starts_soon: false,
        two_pieces: None,
        fewer: 1.03,
        fills: false,
    };
    // Four waves hold 32 columns each; four compute T and P.
    const FUSED: Walk = Walk {
        columns: 128,
        ..SCAN
    };
    // A wave owns 32 rows of M (hip/prefill/gfx9/chain.h).
    const fn combine(threads: u32) -> Walk {
        Walk {
            threads,
            wide_threads: threads,
            columns: 16,
            shared_bytes: 0,
        }
    }
    Target {
        lengths_threads: 1024,
        wave_threads: 64,
        prepare_room: 8,
        scan: [SCAN; KEY_BUCKETS.len()],
        units_chunks: 0,
        scan_chains: 8,
        summarise: [WALK; KEY_BUCKETS.len()],
        combine: [
            combine(128),
            combine(192),
            combine(256),
            combine(384),
            combine(512),
        ],
        takes_maps: false,
        fused: [FUSED; FUSED_BUCKETS],
        fused_summarise: [FUSED; FUSED_BUCKETS],
        decode_few_room: 2, // modelled for an MI300X with 32 value heads: 3% to 10% less at batch 1
        decode_norm_rows: usize::MAX,
        conv_longest_run: 32, // modelled for an MI300X: with 64, 32768 tokens take 302 us in place of 297
        norm_run: 4,
        norm_threads: 256,
        short_columns: 32,
        short_has_bits_of_scan: true,
        costs: Costs {
            // Modelled for an MI300X.
            scan: KernelCost {
                chunk: 1.0,
                chunk_shared: 1.0,
                residency: 1,
            },
            summarise: KernelCost {
                chunk: 0.95,
                chunk_shared: 2.0,
                residency: 3,
            },
            combine: 1.9,
            launch: 6.2,
            combine_launch: 6.2,
            shared_start: 0.0,
            worthwhile: 0.85,
            summarised: 0.25,
            early_starts: true,
            starts_soon: false,
            two_pieces: None,
            fewer: 1.03,
            fills: true,
        },
        backward_walk: [WALK; BACKWARD_BUCKETS.len()],
        backward_gradients: [GRADIENTS; BACKWARD_BUCKETS.len()],
        backward_costs: [BACKWARD; BACKWARD_BUCKETS.len()],
        // Modelled for an MI300X: 7,760 clocks a chunk.
        fused_costs: FusedCosts {
            automatic: true,
            chunk: 4.61,
            chunk_with_norms: 5.6,
            summary_chunk: 4.4,
            start: 40,
            start_by_gates: 53,
            warm_up: 20,
            summaries: 40,
            worthwhile: 15,
            least_chunks: 8,
            most_warm_up: 8,
            units_chunks: 4,
            prepare: 1.3,
            scan_from_hbm: 1.17,
            prepare_from_hbm: 1.7,
            prepare_start: 8.0,
            scan_start: 5.5,
        },
    }
};

/// NVIDIA, `hip/prefill/sm90/layout.h`.
static SM90: Target = {
    // Four or eight warps multiply, and four warps copy.
    const fn walk(wide_threads: u32, shared_bytes: u32) -> Walk {
        Walk {
            threads: 256,
            wide_threads,
            columns: 64,
            shared_bytes,
        }
    }
    // A warp owns 16 rows of M; one more copies M (hip/prefill/sm90/chain.h).
    const fn combine(threads: u32, shared_bytes: u32) -> Walk {
        Walk {
            threads,
            wide_threads: threads,
            columns: 16,
            shared_bytes,
        }
    }
    // Four warps, for K up to 64 and above 128.
    const BACKWARD_WALK: Walk = Walk {
        threads: 128,
        wide_threads: 128,
        columns: 32,
        shared_bytes: 0,
    };
    const GRADIENTS: Gradients = Gradients {
        threads: 256,
        shared_bytes: 0,
        persistent: false,
    };
    // Twelve warps multiply, two copy, two write gates.
    const PERSISTENT_GRADIENTS: Gradients = Gradients {
        threads: 512,
        shared_bytes: 232_432,
        persistent: true,
    };
    // Those modelled for an MI300X, with a launch of the forward on an H200, and a step of combining as it was there
    // before its matrices came through a ring.
    const BACKWARD: Costs = Costs {
        scan: KernelCost {
            chunk: 2.8,
            chunk_shared: 3.9,
            residency: 2,
        },
        summarise: KernelCost {
            chunk: 2.6,
            chunk_shared: 3.7,
            residency: 2,
        },
        combine: 1.5,
        launch: 6.5,
        combine_launch: 6.5,
        shared_start: 0.0,
        worthwhile: 0.9,
        summarised: 0.5,
        early_starts: false,
        starts_soon: false,
        two_pieces: None,
        fewer: 1.03,
        fills: false,
    };
    // Eight warps hold 16 columns each; four copy, and compute T and P.
    const fn fused(shared_bytes: u32) -> Walk {
        Walk {
            threads: 384,
            wide_threads: 384,
            columns: 128,
            shared_bytes,
        }
    }
    Target {
        lengths_threads: 512,
        wave_threads: 32,
        prepare_room: 0,
        scan: [
            walk(384, 154_624),
            walk(384, 203_776),
            walk(384, 203_776),
            walk(256, 228_352),
            walk(256, 185_344),
        ],
        units_chunks: 4,
        scan_chains: 0,
        summarise: [
            walk(384, 105_472),
            walk(384, 130_048),
            walk(384, 130_048),
            walk(256, 130_048),
            walk(256, 154_624),
        ],
        combine: [
            combine(160, 57_472),
            combine(224, 123_008),
            combine(288, 213_120),
            combine(416, 221_312),
            combine(544, 229_504),
        ],
        takes_maps: true,
        fused: [fused(164_784), fused(230_320), fused(230_320)],
        fused_summarise: [fused(107_440), fused(140_208), fused(140_208)],
        // Measured on an H200 with 32 value heads: 7.3 us in place of 7.5 at batch 1, 10.3 of 10.5 at batch 4 (f32 states);
        // at batch 8 14.8 of 14.2.
        decode_few_room: 4,
        // A workgroup of whole rows has a multiprocessor for itself. Measured on an H200, layers of 32 value heads without
        // initial states: 22.0 us at batch 8; apart, 25.8 at 12 and 38.6 at 32, where an older `decode_norm` took 59.6.
        decode_norm_rows: 256,
        conv_longest_run: 128,
        // Measured on an H200, 32 value heads: 2% less from 1024 to 8192 tokens than four tokens and 256 threads.
        norm_run: 3,
        norm_threads: 64,
        short_columns: 16,
        // On an H200 the last bits of states differ: it multiplies with mma.sync, prefill_scan with wgmma.
        short_has_bits_of_scan: false,
        costs: Costs {
            // Measured on an H200.
            scan: KernelCost {
                chunk: 1.25,
                chunk_shared: 2.3,
                residency: 2,
            },
            summarise: KernelCost {
                chunk: 0.85,
                chunk_shared: 1.25,
                residency: 2,
            },
            // A step takes 1.2 us. Chains end where gates forget, so most are short.
            combine: 0.3,
            launch: 6.5,
            combine_launch: 0.0,
            shared_start: 2.5,
            // Cuts (16,32) x 32768 into four, and leaves one sequence of 48 heads whole at any length: three rounds of
            // workgroups, where gates with a long memory would pay for segments.
            worthwhile: 0.8,
            summarised: 0.15,
            early_starts: false,
            starts_soon: true,
            // Fitted to 13 shapes on an H200: two pieces are faster on average over the gates wherever this chooses them.
            two_pieces: Some([4.5, 8.5]),
            fewer: 1.0,
            fills: true,
        },
        backward_walk: [BACKWARD_WALK, walk(384, 212_016), BACKWARD_WALK],
        backward_gradients: [GRADIENTS, PERSISTENT_GRADIENTS, GRADIENTS],
        backward_costs: [
            BACKWARD,
            Costs {
                // Measured on an H200: walks take 1.96 us a chunk with 32 workgroups, 2.3 us with 128, and 3.3 us with 128
                // columns. Summaries are fitted to whole backwards.
                scan: KernelCost {
                    chunk: 2.2,
                    chunk_shared: 3.3,
                    residency: 2,
                },
                summarise: KernelCost {
                    chunk: 2.0,
                    chunk_shared: 2.0,
                    residency: 1,
                },
                // Both fitted to whole backwards, since gates that remember cost less with fewer segments: (4,8) x 8192
                // `normal` and `mixed` take 191 and 257 us in four, 197 and 280 in eight.
                combine: 5.0,
                fewer: 1.06,
                summarised: 0.25,
                ..BACKWARD
            },
            BACKWARD,
        ],
        // Estimated for an H200.
        fused_costs: FusedCosts {
            // Measured on an H200: slower than prepare and scan.
            automatic: false,
            chunk: 7.0,
            // Not read: gates choose on gfx942 alone.
            chunk_with_norms: 7.0,
            summary_chunk: 6.0,
            start: 33,
            // Not read: gates choose on gfx942 alone.
            start_by_gates: 67,
            warm_up: 48,
            summaries: 43,
            worthwhile: 15,
            least_chunks: 8,
            most_warm_up: 8,
            units_chunks: 0,
            prepare: 1.5,
            scan_from_hbm: 1.0,
            prepare_from_hbm: 1.0,
            prepare_start: 5.0,
            scan_start: 5.0,
        },
    }
};

/// Number of dies of a GPU, to which it deals workgroups in turn. A die has 38 compute units on MI300, 20 on MI308X, 32
/// on MI350.
pub(crate) fn dies(arch: &str, compute_units: u32) -> u32 {
    let each = match (arch, compute_units) {
        ("gfx942", 80) => 20,
        ("gfx942", _) => 38,
        ("gfx950", _) => 32,
        _ => return 1,
    };
    (compute_units / each).max(1)
}

impl Target {
    /// Launch parameters of an architecture.
    pub fn of(arch: &str) -> &'static Target {
        if arch.starts_with("sm_") {
            &SM90
        } else {
            &CDNA
        }
    }

    /// Workgroup of `prefill_scan` for `KEY_BUCKETS[bucket_index]`.
    pub(crate) fn scan(&self, bucket_index: usize) -> &Walk {
        &self.scan[bucket_index]
    }

    /// Workgroup of `prefill_combine` for `KEY_BUCKETS[bucket_index]`.
    pub(crate) fn combine(&self, bucket_index: usize) -> &Walk {
        &self.combine[bucket_index]
    }

    /// Workgroup of `prefill_summarise` for `KEY_BUCKETS[bucket_index]`.
    pub(crate) fn summarise(&self, bucket_index: usize) -> &Walk {
        &self.summarise[bucket_index]
    }

    /// Workgroup of `prefill_fused` for `KEY_BUCKETS[bucket_index]`, below [`FUSED_BUCKETS`].
    pub(crate) fn fused(&self, bucket_index: usize) -> &Walk {
        &self.fused[bucket_index]
    }

    /// Workgroup of `prefill_fused_summarise` for `KEY_BUCKETS[bucket_index]`, below [`FUSED_BUCKETS`].
    pub(crate) fn fused_summarise(&self, bucket_index: usize) -> &Walk {
        &self.fused_summarise[bucket_index]
    }

    /// Workgroup of `prefill_backward_walk` and `prefill_backward_summarise` for `BACKWARD_BUCKETS[index]`.
    pub(crate) fn backward_walk(&self, index: usize) -> &Walk {
        &self.backward_walk[index]
    }

    /// Workgroup of `prefill_backward_gradients` for `BACKWARD_BUCKETS[index]`.
    pub(crate) fn backward_gradients(&self, index: usize) -> &Gradients {
        &self.backward_gradients[index]
    }

    /// Costs of the backward's kernels for `BACKWARD_BUCKETS[index]`.
    pub(crate) fn backward_costs(&self, index: usize) -> &Costs {
        &self.backward_costs[index]
    }

    /// Threads of a workgroup. Kernels that walk chunks may be launched with more ([`Target::most_threads`]), `norm` with fewer.
    pub fn threads(&self, role: Role) -> u32 {
        match role {
            Role::Commit
            | Role::Conv
            | Role::Gate
            | Role::Norm
            | Role::DecodeNorm
            | Role::NormBackward
            | Role::GateBackward
            | Role::GradientSums
            | Role::PrefillCollect => 256,
            Role::ConvBackward | Role::DecodeFew => 128,
            Role::Decode(_) | Role::PrefillPrepare | Role::BackwardPrepare => 64,
            Role::PrefillShort(_) | Role::BackwardSums => self.wave_threads,
            Role::BackwardGradients(bucket) => {
                self.backward_gradients(super::backward_index(bucket))
                    .threads
            }
            Role::PrefillLengths => self.lengths_threads,
            Role::PrefillSummarise(_)
            | Role::PrefillScan(_)
            | Role::PrefillFused(_)
            | Role::PrefillFusedSummarise(_)
            | Role::BackwardSummarise(_)
            | Role::BackwardWalk(_)
            | Role::PrefillCombine(_) => self.walk(role).map_or(0, |walk| walk.threads),
        }
    }

    /// Most threads with which a workgroup is launched.
    pub fn most_threads(&self, role: Role) -> u32 {
        self.walk(role)
            .map_or(self.threads(role), |walk| walk.wide_threads)
    }

    /// Value columns of a workgroup that walks chunks, chains summaries or computes a short sequence; 0 for other kernels.
    pub fn columns(&self, role: Role) -> usize {
        match role {
            Role::PrefillShort(_) => self.short_columns,
            _ => self.walk(role).map_or(0, |walk| walk.columns),
        }
    }

    /// Bytes of shared memory with which a kernel is launched.
    pub fn shared_bytes(&self, role: Role) -> u32 {
        match role {
            Role::BackwardGradients(bucket) => {
                self.backward_gradients(super::backward_index(bucket))
                    .shared_bytes
            }
            _ => self.walk(role).map_or(0, |walk| walk.shared_bytes),
        }
    }

    /// Bytes of a kernel's second argument; 0: it has none. With zeros in all of them a kernel computes the same.
    pub fn second_argument_bytes(&self, role: Role) -> usize {
        match role {
            Role::PrefillScan(_) | Role::PrefillSummarise(_) if self.takes_maps => {
                abi::DWK_MAPS_BYTES as usize
            }
            _ => 0,
        }
    }

    /// Workgroup of a kernel that walks the chunks of a segment, or chains summaries.
    fn walk(&self, role: Role) -> Option<&Walk> {
        let index = super::bucket_index;
        match role {
            Role::PrefillScan(bucket) => Some(self.scan(index(bucket))),
            Role::PrefillSummarise(bucket) => Some(self.summarise(index(bucket))),
            Role::PrefillCombine(bucket) => Some(self.combine(index(bucket))),
            Role::PrefillFused(bucket) => Some(self.fused(index(bucket))),
            Role::PrefillFusedSummarise(bucket) => Some(self.fused_summarise(index(bucket))),
            Role::BackwardSummarise(bucket) | Role::BackwardWalk(bucket) => {
                Some(self.backward_walk(super::backward_index(bucket)))
            }
            _ => None,
        }
    }
}
