//! Models with Gated DeltaNet layers, by the shapes of one layer.

/// The Gated DeltaNet layer of a model, all heads on one device.
#[derive(Debug, PartialEq)]
pub struct Model {
    /// Its name, in lower case.
    pub name: &'static str,
    /// Names of models with the same layer shape.
    pub aliases: &'static [&'static str],
    /// `HK`.
    pub key_heads: usize,
    /// `HV`.
    pub value_heads: usize,
    /// `K`.
    pub key_dim: usize,
    /// `V`.
    pub value_dim: usize,
    /// Whether beta goes up to 2.
    pub neg_eigval: bool,
}

/// A model of the Qwen family: 16 key heads, 128 by 128.
const fn qwen(name: &'static str, aliases: &'static [&'static str], value_heads: usize) -> Model {
    Model {
        name,
        aliases,
        key_heads: 16,
        value_heads,
        key_dim: 128,
        value_dim: 128,
        neg_eigval: false,
    }
}

/// Every model, smaller ones first within a family.
pub static MODELS: &[Model] = &[
    qwen("qwen3-next-80b-a3b", &[], 32),
    qwen("qwen3-coder-next", &[], 32),
    qwen("qwen3.5-0.8b", &[], 16),
    qwen("qwen3.5-2b", &[], 16),
    qwen("qwen3.5-4b", &[], 32),
    qwen("qwen3.5-9b", &[], 32),
    qwen("qwen3.5-27b", &["qwen3.6-27b", "qwen3.8-27b"], 48),
    qwen("qwen3.5-35b-a3b", &["qwen3.6-35b-a3b"], 32),
    qwen("qwen3.5-122b-a10b", &[], 64),
    qwen("qwen3.5-397b-a17b", &[], 64),
    qwen("qwen3.8-flash-next", &[], 48),
    qwen("qwen3.8-2.4t-a95b", &[], 128),
    Model {
        name: "olmo-hybrid-7b",
        aliases: &[],
        key_heads: 30,
        value_heads: 30,
        key_dim: 96,
        value_dim: 192,
        neg_eigval: true,
    },
];

impl Model {
    /// The heads `HK, HV` of one of `tp` devices, where they can be shared out evenly.
    pub fn heads_per_rank(&self, tp: usize) -> Option<(usize, usize)> {
        let even =
            tp > 0 && self.key_heads.is_multiple_of(tp) && self.value_heads.is_multiple_of(tp);
        even.then(|| (self.key_heads / tp, self.value_heads / tp))
    }

    /// Every number of devices that the heads can be shared out to evenly.
    pub fn ranks(&self) -> Vec<usize> {
        (1..=self.key_heads)
            .filter(|&tp| self.heads_per_rank(tp).is_some())
            .collect()
    }

    /// Whether this is one of its names, in any case.
    pub fn is_called(&self, name: &str) -> bool {
        self.name.eq_ignore_ascii_case(name)
            || self.aliases.iter().any(|a| a.eq_ignore_ascii_case(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_shared_out_evenly_or_not_at_all() {
        for model in MODELS {
            assert_eq!(model.heads_per_rank(0), None);
            for tp in model.ranks() {
                let (hk, hv) = model.heads_per_rank(tp).unwrap();
                assert!(hk * tp == model.key_heads && hv * tp == model.value_heads);
                assert!(hv.is_multiple_of(hk));
            }
        }
        let ranks = |name| MODELS.iter().find(|m| m.is_called(name)).unwrap().ranks();
        assert_eq!(ranks("Qwen3.6-27B"), [1, 2, 4, 8, 16]);
        assert_eq!(ranks("olmo-hybrid-7b"), [1, 2, 3, 5, 6, 10, 15, 30]);
    }
}
