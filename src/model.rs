//! Heads and dimensions of a model, part of every operation's spec.

use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind};
use crate::types::HeadMap;

/// Largest head dimension of the recurrence.
pub const MAX_HEAD_DIM: usize = 256;

/// Heads of a Gated DeltaNet layer, or of one tensor-parallel rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Heads {
    /// `HK`, heads of q and k, at least 1.
    pub key: usize,
    /// `HV`, heads of v, o and the state: a multiple of `HK`.
    pub value: usize,
    /// `K`, elements of a row of q and k.
    pub key_dim: usize,
    /// `V`, elements of a row of v and o.
    pub value_dim: usize,
    /// Which key head a value head reads.
    pub map: HeadMap,
}

impl Heads {
    /// Heads with value heads grouped by key head ([`HeadMap::Grouped`]).
    pub const fn new(key: usize, value: usize, key_dim: usize, value_dim: usize) -> Self {
        Heads {
            key,
            value,
            key_dim,
            value_dim,
            map: HeadMap::Grouped,
        }
    }

    /// Channels of a token's q, k and v: `[HK K, HK K, HV V]`.
    pub fn channels(&self) -> [usize; 3] {
        let keys = self.key.saturating_mul(self.key_dim);
        [keys, keys, self.value.saturating_mul(self.value_dim)]
    }

    /// Default factor of the recurrence's output, `K^-0.5`.
    pub fn default_scale(&self) -> f32 {
        (self.key_dim as f32).powf(-0.5)
    }

    /// Checks that the recurrence supports these heads.
    pub(crate) fn check_recurrence(&self) -> Checked<()> {
        let dim = |name: &str, n: usize| {
            check::ensure(n > 0 && n.is_multiple_of(16) && n <= MAX_HEAD_DIM, || {
                let allowed = format!("it must be a multiple of 16 from 16 to {MAX_HEAD_DIM}");
                ArgumentError::new(name, ArgumentKind::Shape, n, allowed)
            })
        };
        dim("key_dim", self.key_dim)?;
        dim("value_dim", self.value_dim)?;
        check::ensure(self.key > 0, || {
            let allowed = "it must be at least 1";
            ArgumentError::new("key_heads", ArgumentKind::Shape, self.key, allowed)
        })?;
        let fits = self.value > 0 && self.value.is_multiple_of(self.key) && self.value < 1 << 20;
        check::ensure(fits, || {
            let allowed = format!(
                "it must be a multiple of the {} key heads, at least 1 and below 2^20",
                self.key
            );
            ArgumentError::new("value_heads", ArgumentKind::Shape, self.value, allowed)
        })
    }
}
