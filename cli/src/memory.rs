//! The host's memory, which has to hold tensors, their copies on the simulated device, and references.

use crate::failure::Failure;
use crate::table;

/// Fails if `needed` bytes are more than the host has.
pub fn check(needed: u128) -> Result<(), Failure> {
    match available() {
        Some(available) if needed > available => {
            let text = |n: u128| table::bytes(u64::try_from(n).unwrap_or(u64::MAX));
            Err(Failure::Memory {
                needed: text(needed),
                available: text(available),
            })
        }
        _ => Ok(()),
    }
}

/// Bytes of the host's memory, where the system says.
fn available() -> Option<u128> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    let kib: u128 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}
