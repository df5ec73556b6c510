//! Element types, head maps and state layouts, used by every operation.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};

/// The element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// 16 bits: 8 of exponent and 7 of fraction (bfloat16).
    Bf16,
    /// 16 bits: 5 of exponent and 10 of fraction (IEEE 754 binary16).
    F16,
    /// 32 bits (IEEE 754 binary32).
    F32,
}

impl Dtype {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            Dtype::Bf16 | Dtype::F16 => 2,
            Dtype::F32 => 4,
        }
    }

    /// The name that command lines and messages use: `bf16`, `fp16` or `f32`.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "fp16",
            Dtype::F32 => "f32",
        }
    }

    /// `x` rounded to this type, to nearest with ties to even, and widened again.
    #[inline]
    pub fn round(self, x: f32) -> f32 {
        match self {
            Dtype::Bf16 => bf16::from_f32(x).to_f32(),
            Dtype::F16 => f16::from_f32(x).to_f32(),
            Dtype::F32 => x,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Error: a word that names no allowed value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: `{given}` is none of {allowed}")]
pub struct ParseError {
    /// The option or quantity that the word should name.
    pub what: &'static str,
    /// The word.
    pub given: String,
    /// The words that are allowed.
    pub allowed: &'static str,
}

impl FromStr for Dtype {
    type Err = ParseError;

    fn from_str(s: &str) -> Result<Self, ParseError> {
        match s {
            "bf16" => Ok(Dtype::Bf16),
            "fp16" | "f16" => Ok(Dtype::F16),
            "fp32" | "f32" => Ok(Dtype::F32),
            _ => Err(ParseError {
                what: "dtype",
                given: s.to_owned(),
                allowed: "bf16, fp16, f32",
            }),
        }
    }
}

/// Key head that each value head reads, if there are more value heads (`HV`) than key heads (`HK`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum HeadMap {
    /// Value head `h` reads key head `h / (HV / HK)`: adjacent value heads share a key head.
    #[default]
    Grouped,
    /// Value head `h` reads key head `h % HK`: the order of GGUF checkpoints.
    Tiled,
}

impl HeadMap {
    /// The key head that value head `value_head` reads. `value_heads` is a multiple of `key_heads`.
    #[inline]
    pub const fn key_head(self, value_head: usize, key_heads: usize, value_heads: usize) -> usize {
        match self {
            HeadMap::Grouped => value_head / (value_heads / key_heads),
            HeadMap::Tiled => value_head % key_heads,
        }
    }
}

/// Order of the two dimensions of a recurrent state in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StateLayout {
    /// `[N, HV, K, V]`: value columns are adjacent.
    #[default]
    KeyMajor,
    /// `[N, HV, V, K]`: key rows are adjacent.
    ValueMajor,
}

impl StateLayout {
    /// The strides, in elements, of the key and of the value dimension of a dense `key_dim` by `value_dim` state.
    pub const fn strides(self, key_dim: usize, value_dim: usize) -> (usize, usize) {
        match self {
            StateLayout::KeyMajor => (value_dim, 1),
            StateLayout::ValueMajor => (1, key_dim),
        }
    }

    /// Reorders dense states from this layout to `KeyMajor`.
    ///
    /// # Panics
    ///
    /// If the length of `states` is not a multiple of `key_dim * value_dim`.
    pub fn to_key_major<T: Copy>(self, states: &[T], key_dim: usize, value_dim: usize) -> Vec<T> {
        transpose_each(self, states, value_dim, key_dim)
    }

    /// Reorders dense states from `KeyMajor` to this layout.
    ///
    /// # Panics
    ///
    /// If the length of `states` is not a multiple of `key_dim * value_dim`.
    pub fn from_key_major<T: Copy>(self, states: &[T], key_dim: usize, value_dim: usize) -> Vec<T> {
        transpose_each(self, states, key_dim, value_dim)
    }
}

fn transpose_each<T: Copy>(
    layout: StateLayout,
    states: &[T],
    rows: usize,
    columns: usize,
) -> Vec<T> {
    assert!(
        rows * columns != 0 && states.len().is_multiple_of(rows * columns),
        "not a whole number of states"
    );
    if layout == StateLayout::KeyMajor {
        return states.to_vec();
    }
    let mut out = Vec::with_capacity(states.len());
    for state in states.chunks_exact(rows * columns) {
        for c in 0..columns {
            out.extend((0..rows).map(|r| state[r * columns + c]));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_to_nearest_even() {
        assert_eq!(Dtype::Bf16.round(1.0 + 1.0 / 256.0), 1.0);
        assert_eq!(Dtype::Bf16.round(1.0 + 3.0 / 256.0), 1.0 + 4.0 / 256.0);
        assert_eq!(Dtype::F16.round(1.0 + 1.0 / 2048.0), 1.0);
        assert_eq!(Dtype::F16.round(1.0 + 3.0 / 2048.0), 1.0 + 4.0 / 2048.0);
        assert_eq!(Dtype::F16.round(65520.0), f32::INFINITY);
        assert_eq!(Dtype::F32.round(1.1), 1.1);
        assert!(Dtype::Bf16.round(f32::NAN).is_nan());
    }

    #[test]
    fn head_maps() {
        let map = |m: HeadMap| (0..6).map(|h| m.key_head(h, 2, 6)).collect::<Vec<_>>();
        assert_eq!(map(HeadMap::Grouped), [0, 0, 0, 1, 1, 1]);
        assert_eq!(map(HeadMap::Tiled), [0, 1, 0, 1, 0, 1]);
    }

    #[test]
    fn layouts_are_inverse() {
        let states: Vec<u32> = (0..2 * 3 * 5).collect();
        let v = StateLayout::ValueMajor.from_key_major(&states, 3, 5);
        assert_eq!(v[1], states[5]);
        let (sk, sv) = StateLayout::ValueMajor.strides(3, 5);
        assert_eq!(v[15 + 2 * sk + 4 * sv], states[15 + 2 * 5 + 4]);
        assert_eq!(StateLayout::ValueMajor.to_key_major(&v, 3, 5), states);
        assert_eq!(StateLayout::KeyMajor.from_key_major(&states, 3, 5), states);
    }

    #[test]
    fn names_parse() {
        for d in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
            assert_eq!(d.name().parse(), Ok(d));
        }
        assert_eq!(
            "int8".parse::<Dtype>().unwrap_err().to_string(),
            "dtype: `int8` is none of bf16, fp16, f32"
        );
    }
}
