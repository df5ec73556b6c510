//! How each architecture's kernels divide work: what the host has to know of them besides their names. The tests hold
//! the code objects to it.

/// Threads of a workgroup, columns and shared memory of the kernels of an architecture.
#[derive(Debug, PartialEq)]
pub(crate) struct LaunchShape {
    /// Of `prefill_lengths`.
    pub(crate) lengths_threads: u32,
    /// Of `prefill_prepare`.
    pub(crate) prepare_threads: u32,
    /// Workgroups of `prefill_prepare` for a compute unit, up to which more of them save time.
    pub(crate) prepare_room: usize,
    /// `prefill_scan`, for each of [`KEY_BUCKETS`].
    scan: [Walk; KEY_BUCKETS.len()],
    /// `prefill_summarise`, likewise.
    summarise: [Walk; KEY_BUCKETS.len()],
    /// For the planner of segments.
    pub(crate) costs: Costs,
}

/// What the planner of segments takes kernels to cost, in microseconds, at K = V = 128.
#[derive(Debug, PartialEq)]
pub(crate) struct Costs {
    pub(crate) scan: KernelCost,
    pub(crate) summarise: KernelCost,
    /// A segment of `prefill_combine`.
    pub(crate) combine: f64,
    /// Another kernel.
    pub(crate) launch: f64,
    /// What segments may cost of a walk without them: they take twice the work and more memory.
    pub(crate) worthwhile: f64,
    /// What fewer segments may cost of the number that takes least time: they are less work.
    pub(crate) fewer: f64,
}

/// What a kernel that walks chunks takes for one of them.
#[derive(Debug, PartialEq)]
pub(crate) struct KernelCost {
    /// Where a compute unit has one workgroup.
    pub(crate) chunk: f64,
    /// Where it has as many as it holds; one with twice the columns counts as two.
    pub(crate) chunk_shared: f64,
    /// How many that is.
    pub(crate) residency: usize,
}

/// A workgroup that walks the chunks of a segment.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Walk {
    pub(crate) threads: u32,
    /// Threads with which it has twice as many columns; as many if it cannot.
    pub(crate) wide_threads: u32,
    /// Value columns; of `prefill_summarise`, those of M too.
    pub(crate) columns: usize,
    /// Bytes of shared memory that the launch asks for, besides what the code object states.
    shared_bytes: u32,
}

/// Value columns of a workgroup of `prefill_combine`.
pub(crate) const COMBINE_COLUMNS: usize = 16;

/// The key dimensions for which there is a `prefill_scan`.
pub(crate) const KEY_BUCKETS: [usize; 5] = [64, 96, 128, 192, 256];

/// CDNA, `hip/prefill/gfx9/layout.h`.
static CDNA: LaunchShape = {
    const WALK: Walk = Walk {
        threads: 256,
        wide_threads: 256,
        columns: 32,
        shared_bytes: 0,
    };
    // Half of the waves make the outputs.
    const SCAN: Walk = Walk {
        threads: 512,
        wide_threads: 512,
        ..WALK
    };
    LaunchShape {
        lengths_threads: 64,
        prepare_threads: 64,
        prepare_room: 4,
        scan: [SCAN; KEY_BUCKETS.len()],
        summarise: [WALK; KEY_BUCKETS.len()],
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
            worthwhile: 0.85,
            fewer: 1.03,
        },
    }
};

/// NVIDIA, `hip/prefill/sm90/layout.h`.
static SM90: LaunchShape = {
    // Four warps multiply, or twice four; as many copy.
    const fn walk(wide_threads: u32, shared_bytes: u32) -> Walk {
        Walk {
            threads: 256,
            wide_threads,
            columns: 64,
            shared_bytes,
        }
    }
    LaunchShape {
        lengths_threads: 32,
        prepare_threads: 64,
        prepare_room: 0,
        scan: [
            walk(384, 154_624),
            walk(384, 203_776),
            walk(384, 203_776),
            walk(256, 228_352),
            walk(256, 185_344),
        ],
        summarise: [
            walk(384, 105_472),
            walk(384, 130_048),
            walk(384, 130_048),
            walk(256, 130_048),
            walk(256, 154_624),
        ],
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
            combine: 1.5,
            launch: 6.5,
            worthwhile: 0.97,
            fewer: 1.0,
        },
    }
};

/// Dies of a GPU, to which it deals workgroups in turn: those of MI300 have 38 compute units each, or 20 on MI308X; those
/// of MI350 have 32.
pub(crate) fn dies(arch: &str, compute_units: u32) -> u32 {
    let each = match (arch, compute_units) {
        ("gfx942", 80) => 20,
        ("gfx942", _) => 38,
        ("gfx950", _) => 32,
        _ => return 1,
    };
    (compute_units / each).max(1)
}

impl LaunchShape {
    /// The shape of an architecture's kernels.
    pub(crate) fn of(arch: &str) -> &'static LaunchShape {
        if arch.starts_with("sm_") {
            &SM90
        } else {
            &CDNA
        }
    }

    /// A workgroup of `prefill_scan` for a key bucket.
    pub(crate) fn scan(&self, bucket: usize) -> &Walk {
        of_bucket(&self.scan, bucket)
    }

    /// A workgroup of `prefill_summarise` for a key bucket.
    pub(crate) fn summarise(&self, bucket: usize) -> &Walk {
        of_bucket(&self.summarise, bucket)
    }

    /// Threads of a workgroup of a kernel of prefill; none for others.
    pub(crate) fn threads(&self, kernel: &str) -> Option<u32> {
        let part = kernel.strip_prefix("dw_prefill_")?;
        match part.split('_').next()? {
            "lengths" => Some(self.lengths_threads),
            "prepare" => Some(self.prepare_threads),
            "scan" | "summarise" => self.walking(kernel).map(|walk| walk.threads),
            "combine" => bucket_of(kernel).map(combine_threads),
            _ => None,
        }
    }

    /// Threads of a workgroup of a kernel of prefill, at most; none for others.
    #[allow(dead_code, reason = "for the tests of the kernels")]
    pub(crate) fn most_threads(&self, kernel: &str) -> Option<u32> {
        (self.walking(kernel).map(|walk| walk.wide_threads)).or_else(|| self.threads(kernel))
    }

    /// Value columns of a workgroup of a kernel that walks chunks; 0 of others.
    pub(crate) fn columns(&self, kernel: &str) -> usize {
        self.walking(kernel).map_or(0, |walk| walk.columns)
    }

    /// Bytes of shared memory with which a kernel is launched.
    pub(crate) fn shared_bytes(&self, kernel: &str) -> u32 {
        self.walking(kernel).map_or(0, |walk| walk.shared_bytes)
    }

    /// For kernels that walk the chunks of a segment.
    fn walking(&self, kernel: &str) -> Option<&Walk> {
        let part = kernel.strip_prefix("dw_prefill_")?;
        let bucket = bucket_of(kernel)?;
        match part.split('_').next()? {
            "scan" => Some(self.scan(bucket)),
            "summarise" => Some(self.summarise(bucket)),
            _ => None,
        }
    }
}

/// What there is for a key bucket.
fn of_bucket(walks: &[Walk; KEY_BUCKETS.len()], bucket: usize) -> &Walk {
    let larger = KEY_BUCKETS.iter().filter(|&&b| b > bucket).count();
    &walks[(KEY_BUCKETS.len() - 1).saturating_sub(larger)]
}

/// Threads of a workgroup of `prefill_combine`: 64 lanes own 32 rows of M, 32 lanes own 16.
pub(crate) fn combine_threads(bucket: usize) -> u32 {
    2 * bucket as u32
}

/// The key bucket in a kernel's name.
fn bucket_of(kernel: &str) -> Option<usize> {
    kernel.rsplit_once("_k")?.1.parse().ok()
}
