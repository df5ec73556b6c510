//! Data of GPUs with gfx942's compute units.

/// A GPU's name, units, clock and bandwidth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gpu {
    /// Name, as `--gpu` takes it.
    pub name: &'static str,
    /// Compute units.
    pub cus: u32,
    /// Accelerator dies, each with an L2. Workgroup `i` runs on die `i % xcds`.
    pub xcds: u32,
    /// Clock of the compute units in GHz.
    pub ghz: f64,
    /// Bandwidth of HBM in bytes per second, from the data sheet.
    pub hbm: f64,
    /// Memory in bytes.
    pub memory: usize,
}

/// MI300X.
pub const MI300X: Gpu = Gpu {
    name: "mi300x",
    cus: 304,
    xcds: 8,
    ghz: 2.1,
    hbm: 5.3e12,
    memory: 192 << 30,
};

/// MI325X: MI300X with faster and more memory.
pub const MI325X: Gpu = Gpu {
    name: "mi325x",
    hbm: 6.0e12,
    memory: 256 << 30,
    ..MI300X
};

/// MI308X. The clock follows from 232 TFLOP/s of bf16: 80 compute units with 2048 operations a clock give 1.42 GHz.
pub const MI308X: Gpu = Gpu {
    name: "mi308x",
    cus: 80,
    xcds: 4,
    ghz: 1.42,
    hbm: 5.3e12,
    memory: 192 << 30,
};

/// SIMDs per compute unit.
pub const SIMDS: u32 = 4;
/// Dense bf16 operations per SIMD and clock.
const BF16_PER_CLOCK: u32 = 512;

impl Gpu {
    /// All GPUs.
    pub const ALL: [Gpu; 3] = [MI300X, MI325X, MI308X];

    /// Finds a GPU by its name.
    pub fn named(name: &str) -> Option<Gpu> {
        Gpu::ALL.into_iter().find(|g| g.name == name)
    }

    /// Dense bf16 operations per second of all matrix units: 1307e12 for an MI300X.
    pub fn bf16(&self) -> f64 {
        f64::from(self.cus * SIMDS * BF16_PER_CLOCK) * self.ghz * 1e9
    }
}
