//! How each architecture's kernels divide work: what the host has to know of them besides their names. The tests hold
//! the code objects to it.

/// Threads of a workgroup, columns and shared memory of the kernels of an architecture.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct LaunchShape {
    /// Of `prefill_lengths`.
    pub(crate) lengths_threads: u32,
    /// Of `prefill_prepare`.
    pub(crate) prepare_threads: u32,
    /// Of `prefill_scan`.
    pub(crate) scan_threads: u32,
    /// Of `prefill_scan`, for each of [`KEY_BUCKETS`].
    scan: [Scan; KEY_BUCKETS.len()],
}

/// What a workgroup of `prefill_scan` owns.
#[derive(Debug, PartialEq, Eq)]
struct Scan {
    /// Value columns.
    columns: usize,
    /// Bytes of shared memory that the launch asks for, besides what the code object states.
    shared_bytes: u32,
}

/// The key dimensions for which there is a `prefill_scan`.
pub(crate) const KEY_BUCKETS: [usize; 5] = [64, 96, 128, 192, 256];

/// CDNA, `hip/tile/prefill_gfx9.h`.
static CDNA: LaunchShape = {
    const fn scan(columns: usize) -> Scan {
        Scan {
            columns,
            shared_bytes: 0,
        }
    }
    LaunchShape {
        lengths_threads: 64,
        prepare_threads: 64,
        scan_threads: 256,
        scan: [const { scan(32) }; KEY_BUCKETS.len()],
    }
};

/// NVIDIA, `hip/tile/prefill_sm90.h`.
static SM90: LaunchShape = {
    const fn scan(shared_bytes: u32) -> Scan {
        Scan {
            columns: 64,
            shared_bytes,
        }
    }
    LaunchShape {
        lengths_threads: 32,
        prepare_threads: 64,
        scan_threads: 256,
        scan: [
            scan(130_048),
            scan(179_200),
            scan(179_200),
            scan(228_352),
            scan(185_344),
        ],
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
            "scan" => Some(self.scan_threads),
            _ => None,
        }
    }

    /// Value columns of a workgroup of a kernel; 0 where it does not divide them.
    pub(crate) fn columns(&self, kernel: &str) -> usize {
        self.scan_named(kernel).map_or(0, |scan| scan.columns)
    }

    /// Bytes of shared memory with which a kernel is launched.
    pub(crate) fn shared_bytes(&self, kernel: &str) -> u32 {
        self.scan_named(kernel).map_or(0, |scan| scan.shared_bytes)
    }

    fn scan_named(&self, kernel: &str) -> Option<&Scan> {
        let rest = kernel.strip_prefix("dw_prefill_scan_")?;
        let (_, keys) = rest.split_once("_k")?;
        let bucket: usize = keys.parse().ok()?;
        self.scan_of(|b| b == bucket)
    }

    fn scan_of(&self, is: impl Fn(usize) -> bool) -> Option<&Scan> {
        let index = KEY_BUCKETS.iter().position(|&b| is(b))?;
        Some(&self.scan[index])
    }
}
