//! How each architecture's kernels divide work: what the host has to know of them besides their names. The tests hold
//! the code objects to it.

/// Threads of a workgroup, columns and shared memory of the kernels of an architecture.
#[derive(Debug, PartialEq)]
pub(crate) struct LaunchShape {
    /// Of `prefill_lengths`.
    pub(crate) lengths_threads: u32,
    /// Of `prefill_prepare`.
    pub(crate) prepare_threads: u32,
    /// Of `prefill_scan` and `prefill_summarise`.
    pub(crate) scan_threads: u32,
    /// Of `prefill_scan`, for each of [`KEY_BUCKETS`].
    scan: [Scan; KEY_BUCKETS.len()],
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
}

/// What a kernel that walks chunks takes for one of them.
#[derive(Debug, PartialEq)]
pub(crate) struct KernelCost {
    /// Where a compute unit has one workgroup.
    pub(crate) chunk: f64,
    /// Where it has as many as it holds.
    pub(crate) chunk_shared: f64,
    /// How many that is.
    pub(crate) residency: usize,
}

/// What a workgroup of `prefill_scan` owns.
#[derive(Debug, PartialEq, Eq)]
struct Scan {
    /// Value columns.
    columns: usize,
    /// Bytes of shared memory that the launch asks for, besides what the code object states.
    shared_bytes: u32,
    /// The same of `prefill_summarise`, whose workgroups own as many columns.
    summarise_shared_bytes: u32,
}

/// Value columns of a workgroup of `prefill_combine`.
pub(crate) const COMBINE_COLUMNS: usize = 16;

/// The key dimensions for which there is a `prefill_scan`.
pub(crate) const KEY_BUCKETS: [usize; 5] = [64, 96, 128, 192, 256];

/// CDNA, `hip/tile/prefill_gfx9.h`.
static CDNA: LaunchShape = {
    const fn scan(columns: usize) -> Scan {
        Scan {
            columns,
            shared_bytes: 0,
            summarise_shared_bytes: 0,
        }
    }
    LaunchShape {
        lengths_threads: 64,
        prepare_threads: 64,
        scan_threads: 256,
        scan: [const { scan(32) }; KEY_BUCKETS.len()],
        costs: Costs {
            // Modelled for an MI300X.
            scan: KernelCost {
                chunk: 1.36,
                chunk_shared: 2.4,
                residency: 2,
            },
            summarise: KernelCost {
                chunk: 1.14,
                chunk_shared: 2.9,
                residency: 3,
            },
            combine: 1.9,
            launch: 6.2,
        },
    }
};

/// NVIDIA, `hip/tile/prefill_sm90.h`.
static SM90: LaunchShape = {
    const fn scan(shared_bytes: u32, summarise_shared_bytes: u32) -> Scan {
        Scan {
            columns: 64,
            shared_bytes,
            summarise_shared_bytes,
        }
    }
    LaunchShape {
        lengths_threads: 32,
        prepare_threads: 64,
        scan_threads: 256,
        scan: [
            scan(130_048, 80_896),
            scan(179_200, 105_472),
            scan(179_200, 105_472),
            scan(228_352, 130_048),
            scan(185_344, 154_624),
        ],
        costs: Costs {
            // Of scan measured on an H200; summarise, as much less as it has fewer products. Shared memory and registers
            // leave room for one workgroup.
            scan: KernelCost {
                chunk: 1.2,
                chunk_shared: 1.2,
                residency: 1,
            },
            summarise: KernelCost {
                chunk: 1.0,
                chunk_shared: 1.0,
                residency: 1,
            },
            combine: 2.8,
            launch: 4.0,
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

    /// Value columns of a workgroup of `prefill_scan` for a key bucket.
    pub(crate) fn scan_columns(&self, bucket: usize) -> usize {
        self.scan_of(|b| b == bucket)
            .map_or(16, |scan| scan.columns)
    }

    /// Threads of a workgroup of a kernel of prefill; none for others.
    pub(crate) fn threads(&self, kernel: &str) -> Option<u32> {
        let part = kernel.strip_prefix("dw_prefill_")?;
        match part.split('_').next()? {
            "lengths" => Some(self.lengths_threads),
            "prepare" => Some(self.prepare_threads),
            "scan" | "summarise" => Some(self.scan_threads),
            "combine" => bucket_of(kernel).map(combine_threads),
            _ => None,
        }
    }

    /// Value columns of a workgroup of a kernel that walks chunks; 0 of others.
    pub(crate) fn columns(&self, kernel: &str) -> usize {
        self.walking(kernel).map_or(0, |scan| scan.columns)
    }

    /// Bytes of shared memory with which a kernel is launched.
    pub(crate) fn shared_bytes(&self, kernel: &str) -> u32 {
        let summarises = kernel.starts_with("dw_prefill_summarise_");
        self.walking(kernel).map_or(0, |scan| match summarises {
            true => scan.summarise_shared_bytes,
            false => scan.shared_bytes,
        })
    }

    /// For kernels that walk the chunks of a segment.
    fn walking(&self, kernel: &str) -> Option<&Scan> {
        let part = kernel.strip_prefix("dw_prefill_")?;
        let bucket = bucket_of(kernel)?;
        (part.starts_with("scan_") || part.starts_with("summarise_"))
            .then(|| self.scan_of(|b| b == bucket))?
    }

    fn scan_of(&self, is: impl Fn(usize) -> bool) -> Option<&Scan> {
        let index = KEY_BUCKETS.iter().position(|&b| is(b))?;
        Some(&self.scan[index])
    }
}

/// Threads of a workgroup of `prefill_combine`: 64 lanes own 32 rows of M, 32 lanes own 16.
pub(crate) fn combine_threads(bucket: usize) -> u32 {
    2 * bucket as u32
}

/// The key bucket in a kernel's name.
fn bucket_of(kernel: &str) -> Option<usize> {
    kernel.rsplit_once("_k")?.1.parse().ok()
}
