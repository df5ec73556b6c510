//! Bytes of a host that the tensors of an operation take, roughly: their bits twice, their values and their copies on a
//! simulated device; and, where results are checked, what the reference keeps in f64. And what this process holds now.

use deltawave::conv::ConvSpec;
use deltawave::decode::DecodeSpec;
use deltawave::layer::LayerSpec;
use deltawave::model::Heads;
use deltawave::prefill::PrefillSpec;

use crate::workload::columns;

/// Elements of a state.
fn state(heads: &Heads) -> u128 {
    heads.value as u128 * (heads.key_dim * heads.value_dim) as u128
}

/// Elements of q, k, v and o of a token.
fn row(heads: &Heads) -> u128 {
    2 * (heads.key * heads.key_dim + heads.value * heads.value_dim) as u128
}

/// Bytes of a prefill and its workspace.
pub fn prefill(s: &PrefillSpec, tokens: usize, sequences: usize, checked: bool) -> u128 {
    let each = if checked { 24 } else { 12 };
    let (h, tokens, ends) = (&s.heads, tokens as u128, sequences as u128 + 1);
    let chunks = tokens / 64;
    let records = (chunks + ends) * h.value as u128;
    // The planner chooses segments of four chunks or more.
    let followed = (s.segments).map_or(chunks / 4, |n| ends * (n as u128 - 1));
    let summary = h.value * (h.value_dim + h.key_dim.max(h.value_dim)) * h.key_dim * 4;
    let summaries = followed.min(chunks) * summary as u128;
    let workspace = records * u128::from(deltawave::abi::DWK_RECORD_BYTES) + summaries;
    each * (tokens * row(h) + ends * state(h)) + workspace
}

/// Bytes of a decode of so many sequences; `verified`: with a state after every token.
pub fn decode(s: &DecodeSpec, batch: usize, verified: bool, checked: bool) -> u128 {
    let each = if checked { 24 } else { 12 };
    let rows = (batch * s.tokens) as u128;
    let after_tokens = if verified { rows } else { 0 };
    let elements = rows * row(&s.heads) + batch as u128 * state(&s.heads);
    each * elements + 8 * after_tokens * state(&s.heads)
}

/// Bytes of a convolution.
pub fn conv(s: &ConvSpec, tokens: usize, sequences: usize, checked: bool) -> u128 {
    let each = if checked { 32 } else { 16 };
    let rows = tokens + (sequences + 1) * s.width;
    each * rows as u128 * columns(s) as u128
}

/// Bytes of a layer.
pub fn layer(s: &LayerSpec, tokens: usize, sequences: usize, checked: bool) -> u128 {
    let each = if checked { 32 } else { 16 };
    let values = (s.heads.value * s.heads.value_dim) as u128;
    let channels = s.conv().total_channels() as u128;
    let states = state(&s.heads) + channels * s.width as u128;
    each * (tokens as u128 * (channels + 2 * values) + sequences as u128 * states)
}

/// Least growth of [`resident`] over four rounds of so many calls, after a first round that does not count. A leak shows
/// in every round; what an allocator cannot give back happens to be more or less.
pub fn least_growth(calls: usize, mut call: impl FnMut()) -> u64 {
    let mut round = || {
        let before = resident();
        (0..calls).for_each(|_| call());
        resident().saturating_sub(before)
    };
    round();
    let rounds = (0..4).map(|_| round());
    rounds.min().expect("rounds")
}

/// Bytes of this process that are in memory, for tests on Linux. glibc keeps 10 to 30 MB of free memory for later allocations,
/// by chance, so this function first lets it give them back.
pub fn resident() -> u64 {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            fn malloc_trim(pad: usize) -> std::ffi::c_int;
        }
        // SAFETY: glibc has the function, and it takes any number.
        unsafe { malloc_trim(0) };
    }
    let status = std::fs::read_to_string("/proc/self/status").expect("a process has a status");
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kilobytes.expect("a number of kilobytes") << 10
}
