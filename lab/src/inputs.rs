//! Standard test inputs: seeded random problems with the distributions on which accuracy figures are quoted.
//!
//! Element `i` of a tensor depends only on the seed, the tensor's name and `i`. It is the same on every platform and
//! for any number of threads.

use half::{bf16, f16};
use rayon::prelude::*;

use crate::oracle::gates::{sigmoid, softplus};
use crate::oracle::{Beta, Gate, Problem};
use deltawave::types::{Dtype, HeadMap, ParseError};

/// The distribution of the log gates `g`. `N(0, 1)` is the standard normal distribution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Gates {
    /// `logsigmoid(N(0, 1))`: the state keeps a memory of a few tokens.
    #[default]
    Normal,
    /// A sixteenth of `Normal`, and exactly 0 on every fourth head: a long memory.
    Mixed,
    /// `g = 0`: no decay.
    Zero,
    /// `-16 softplus(N(0, 1) / 2 + 1)`: about -22 per token. One chunk decays far below the range of f32.
    Strong,
    /// `-A softplus(N(0, 1) + dt_bias)`, with the `A` and `dt_bias` of each head that [`GateInputs`] draws: models start
    /// from these. A few heads forget within tens of tokens, others remember thousands.
    Model,
}

/// The distribution of the rows of q and k, before they are normalised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Keys {
    /// `N(0, 1)`: nearly orthogonal rows.
    #[default]
    Normal,
    /// `silu(N(0, 1))`: positively correlated rows, like the output of a convolution with SiLU.
    Silu,
}

impl std::str::FromStr for Gates {
    type Err = ParseError;

    fn from_str(s: &str) -> Result<Self, ParseError> {
        match s {
            "normal" => Ok(Gates::Normal),
            "mixed" => Ok(Gates::Mixed),
            "zero" => Ok(Gates::Zero),
            "strong" => Ok(Gates::Strong),
            "model" => Ok(Gates::Model),
            _ => Err(ParseError {
                what: "gates",
                given: s.to_owned(),
                allowed: "normal, mixed, zero, strong, model",
            }),
        }
    }
}

impl std::str::FromStr for Keys {
    type Err = ParseError;

    fn from_str(s: &str) -> Result<Self, ParseError> {
        match s {
            "normal" => Ok(Keys::Normal),
            "silu" => Ok(Keys::Silu),
            _ => Err(ParseError {
                what: "keys",
                given: s.to_owned(),
                allowed: "normal, silu",
            }),
        }
    }
}

/// A tensor of rounded values: the bits that a device reads, and the same numbers in f32.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// The element type.
    pub dtype: Dtype,
    /// The elements, little-endian, `dtype.size()` bytes each.
    pub bytes: Vec<u8>,
    /// The same elements as f32, exactly.
    pub values: Vec<f32>,
}

impl Tensor {
    /// Rounds `values` to `dtype`: to nearest, ties to even.
    pub fn new(dtype: Dtype, mut values: Vec<f32>) -> Self {
        let mut bytes = vec![0; values.len() * dtype.size()];
        let each = values
            .par_iter_mut()
            .zip(bytes.par_chunks_exact_mut(dtype.size()))
            .with_min_len(1 << 14);
        each.for_each(|(x, b)| match dtype {
            Dtype::Bf16 => {
                let y = bf16::from_f32(*x);
                *x = y.to_f32();
                b.copy_from_slice(&y.to_le_bytes());
            }
            Dtype::F16 => {
                let y = f16::from_f32(*x);
                *x = y.to_f32();
                b.copy_from_slice(&y.to_le_bytes());
            }
            Dtype::F32 => b.copy_from_slice(&x.to_le_bytes()),
        });
        Tensor {
            dtype,
            bytes,
            values,
        }
    }

    /// Reads little-endian elements of `dtype` from `bytes`. Trailing bytes that are no whole element are dropped.
    pub fn from_bytes(dtype: Dtype, bytes: Vec<u8>) -> Self {
        let values = match dtype {
            Dtype::Bf16 => bytes
                .chunks_exact(2)
                .map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect(),
            Dtype::F16 => bytes
                .chunks_exact(2)
                .map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect(),
            Dtype::F32 => bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
        };
        Tensor {
            dtype,
            bytes,
            values,
        }
    }
}

/// The parameters of a random prefill problem.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InputSpec {
    /// The type of q, k and v. Gate inputs are rounded to it too.
    pub dtype: Dtype,
    /// Tokens, `T`.
    pub tokens: usize,
    /// Key heads, `HK`.
    pub key_heads: usize,
    /// Value heads, `HV`.
    pub value_heads: usize,
    /// Width of a row of q and k, `K`.
    pub key_dim: usize,
    /// Width of a row of v, `V`.
    pub value_dim: usize,
    /// The distribution of the log gates.
    pub gates: Gates,
    /// The distribution of the rows of q and k.
    pub keys: Keys,
    /// Whether the rows of q and k are l2-normalised. If not, the operation has to normalise them.
    pub unit_rows: bool,
    /// The seed. Different seeds give independent inputs.
    pub seed: u64,
}

impl Default for InputSpec {
    /// 1024 tokens, 8 heads with `K = V = 128`, bf16, normal gates and keys.
    fn default() -> Self {
        InputSpec {
            dtype: Dtype::Bf16,
            tokens: 1024,
            key_heads: 8,
            value_heads: 8,
            key_dim: 128,
            value_dim: 128,
            gates: Gates::Normal,
            keys: Keys::Normal,
            unit_rows: true,
            seed: 0,
        }
    }
}

/// The inputs of a prefill.
#[derive(Clone, Debug, PartialEq)]
pub struct Inputs {
    /// The parameters that these inputs were drawn with.
    pub spec: InputSpec,
    /// `[T, HK, K]`.
    pub q: Tensor,
    /// `[T, HK, K]`.
    pub k: Tensor,
    /// `[T, HV, V]`.
    pub v: Tensor,
    /// Log gates, `[T, HV]`, f32.
    pub g: Vec<f32>,
    /// Write strengths `sigmoid(N(0, 1))`, rounded to the dtype, `[T, HV]`, f32.
    pub beta: Vec<f32>,
}

/// Raw gate inputs, from which a fused operation computes `g` and `beta`.
#[derive(Clone, Debug, PartialEq)]
pub struct GateInputs {
    /// `N(0, 1)` in the dtype, `[T, HV]`.
    pub a: Tensor,
    /// `N(0, 1)` in the dtype, `[T, HV]`.
    pub b: Tensor,
    /// `ln A` with `A` uniform in (0, 16), `[HV]`, f32.
    pub a_log: Vec<f32>,
    /// The inverse softplus of a step in 0.001..0.1, uniform in the step's logarithm, `[HV]`, f32.
    pub dt_bias: Vec<f32>,
}

impl Inputs {
    /// Draws the inputs of a prefill.
    pub fn new(spec: InputSpec) -> Self {
        let s = spec;
        let rows = |name| {
            let mut x = normals(s.seed, name, s.tokens * s.key_heads * s.key_dim);
            if s.keys == Keys::Silu {
                x.par_iter_mut()
                    .with_min_len(1 << 12)
                    .for_each(|x| *x *= sigmoid(*x));
            }
            if s.unit_rows {
                x.par_chunks_exact_mut(s.key_dim.max(1)).for_each(|row| {
                    let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt().max(1e-12);
                    row.iter_mut().for_each(|x| *x /= norm);
                });
            }
            Tensor::new(s.dtype, narrowed(&x))
        };
        let gates = s.tokens * s.value_heads;
        let (rates, biases) = (rates(&s), biases(&s));
        let g = match s.gates {
            Gates::Zero => vec![0.0; gates],
            _ => (normals(s.seed, "g", gates).into_iter().enumerate())
                .map(|(i, x)| match s.gates {
                    Gates::Strong => -16.0 * softplus(0.5 * x + 1.0),
                    Gates::Model => {
                        let head = i % s.value_heads;
                        -rates[head] * softplus(x + biases[head])
                    }
                    Gates::Mixed if (i % s.value_heads).is_multiple_of(4) => 0.0,
                    Gates::Mixed => -softplus(-x) / 16.0,
                    _ => -softplus(-x),
                } as f32)
                .collect(),
        };
        let beta = normals(s.seed, "beta", gates)
            .into_iter()
            .map(|x| s.dtype.round(sigmoid(x) as f32))
            .collect();
        Inputs {
            spec,
            q: rows("q"),
            k: rows("k"),
            v: Tensor::new(
                s.dtype,
                narrowed(&normals(
                    s.seed,
                    "v",
                    s.tokens * s.value_heads * s.value_dim,
                )),
            ),
            g,
            beta,
        }
    }

    /// The prefill problem of these inputs: no initial state, the default scale, grouped heads. The operation
    /// normalises q and k if the inputs are not normalised.
    pub fn problem<'a>(&'a self, cu_seqlens: &'a [i32]) -> Problem<'a> {
        let s = &self.spec;
        Problem {
            tokens: s.tokens,
            key_heads: s.key_heads,
            value_heads: s.value_heads,
            key_dim: s.key_dim,
            value_dim: s.value_dim,
            q: &self.q.values,
            k: &self.k.values,
            v: &self.v.values,
            gate: Gate::Log(&self.g),
            beta: Beta::Given(&self.beta),
            cu_seqlens,
            initial_state: None,
            has_initial_state: None,
            scale: None,
            head_map: HeadMap::Grouped,
            l2_norm: !s.unit_rows,
        }
    }
}

impl GateInputs {
    /// Draws the raw gate inputs for `spec`.
    pub fn new(spec: InputSpec) -> Self {
        let s = spec;
        let tensor = |name| {
            Tensor::new(
                s.dtype,
                narrowed(&normals(s.seed, name, s.tokens * s.value_heads)),
            )
        };
        GateInputs {
            a: tensor("a"),
            b: tensor("b"),
            a_log: rates(&s).into_iter().map(|a| libm::log(a) as f32).collect(),
            dt_bias: narrowed(&biases(&s)),
        }
    }
}

/// `A` of each value head, uniform in (0, 16).
fn rates(s: &InputSpec) -> Vec<f64> {
    let each = |i| 16.0 * uniform(stream(s.seed, "A_log"), i as u64);
    (0..s.value_heads).map(each).collect()
}

/// `dt_bias` of each value head: the inverse softplus of a step in 0.001..0.1, uniform in the step's logarithm.
fn biases(s: &InputSpec) -> Vec<f64> {
    let each = |i| {
        let x = uniform(stream(s.seed, "dt_bias"), i as u64);
        let step = 0.001 * libm::exp(x * libm::log(100.0));
        step + libm::log(-libm::expm1(-step))
    };
    (0..s.value_heads).map(each).collect()
}

/// Dense random states `N(0, 1) / 4`, rounded to `dtype`. The magnitude is the one that a run of tokens builds up.
pub fn random_state(dtype: Dtype, elements: usize, seed: u64) -> Tensor {
    Tensor::new(
        dtype,
        normals(seed, "state", elements)
            .into_iter()
            .map(|x| (x / 4.0) as f32)
            .collect(),
    )
}

/// Independent `N(0, 1)` numbers, rounded to `dtype`. Tensors of different `name` are independent.
pub fn random_normal(dtype: Dtype, name: &str, elements: usize, seed: u64) -> Tensor {
    Tensor::new(dtype, narrowed(&normals(seed, name, elements)))
}

fn narrowed(x: &[f64]) -> Vec<f32> {
    x.iter().map(|&x| x as f32).collect()
}

/// The generator's state for one tensor: FNV-1a over its name, mixed with the seed.
fn stream(seed: u64, name: &str) -> u64 {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |h: u64, b| {
        (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
    });
    mix(mix(seed) ^ hash)
}

/// Element `i` of a stream, uniform over 64 bits. The generator is SplitMix64, which can start at any `i`.
fn bits(stream: u64, i: u64) -> u64 {
    mix(stream.wrapping_add((i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Element `i` of a stream, uniform in the open interval (0, 1).
fn uniform(stream: u64, i: u64) -> f64 {
    ((bits(stream, i) >> 12) as f64 + 0.5) * (1.0 / (1u64 << 52) as f64)
}

/// Standard normal numbers by the Box-Muller transform: each pair of uniform numbers gives a pair of elements.
fn normals(seed: u64, name: &str, n: usize) -> Vec<f64> {
    let stream = stream(seed, name);
    let mut out = vec![0.0; n];
    out.par_chunks_mut(2)
        .with_min_len(1 << 12)
        .enumerate()
        .for_each(|(i, pair)| {
            let i = 2 * i as u64;
            let radius = (-2.0 * libm::log(uniform(stream, i))).sqrt();
            let (sin, cos) = libm::sincos(std::f64::consts::TAU * uniform(stream, i + 1));
            pair[0] = radius * cos;
            if let Some(second) = pair.get_mut(1) {
                *second = radius * sin;
            }
        });
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(x: &[f64]) -> (f64, f64, f64) {
        let n = x.len() as f64;
        let mean = x.iter().sum::<f64>() / n;
        let power = |p| x.iter().map(|x| (x - mean).powi(p)).sum::<f64>() / n;
        (mean, power(2), power(4))
    }

    #[test]
    fn normals_are_normal_and_independent() {
        let n = 1 << 18;
        let (x, y) = (normals(1, "x", n), normals(1, "y", n));
        for z in [&x, &y, &normals(2, "x", n)] {
            let (mean, variance, fourth) = moments(z);
            assert!(
                mean.abs() < 0.01 && (variance - 1.0).abs() < 0.015 && (fourth - 3.0).abs() < 0.12
            );
        }
        let correlation = |a: &[f64], b: &[f64]| {
            a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>() / a.len() as f64
        };
        assert!(correlation(&x, &y).abs() < 0.01);
        assert!(correlation(&x, &x[1..]).abs() < 0.01);
    }

    #[test]
    fn inputs_are_pinned() {
        // The values may never change, on any platform: figures in the documentation depend on them.
        let x = normals(0, "q", 4);
        assert_eq!(x, normals(0, "q", 1000)[..4]);
        assert_eq!(
            x,
            [
                -1.0686050677473204,
                -1.4355934311628324,
                -0.939514420167587,
                -1.2372683547382592
            ]
        );
        let spec = InputSpec {
            tokens: 70,
            key_heads: 2,
            value_heads: 4,
            key_dim: 16,
            value_dim: 32,
            ..Default::default()
        };
        assert_eq!(Inputs::new(spec), Inputs::new(spec));
        assert_ne!(
            Inputs::new(spec).v,
            Inputs::new(InputSpec { seed: 1, ..spec }).v
        );
    }

    #[test]
    fn distributions_are_as_described() {
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let spec = InputSpec {
                dtype,
                ..Default::default()
            };
            let draw = |gates| {
                Inputs::new(InputSpec {
                    gates,
                    tokens: 512,
                    ..spec
                })
            };
            let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
            let normal = draw(Gates::Normal);
            for row in normal.k.values.chunks(128) {
                let norm: f32 = row.iter().map(|x| x * x).sum();
                assert!((norm - 1.0).abs() < 0.01);
            }
            assert!(normal.g.iter().all(|&g| g < 0.0));
            assert!((moments(&wide(&normal.g)).0 + 0.806).abs() < 0.03);
            assert!((moments(&wide(&normal.beta)).0 - 0.5).abs() < 0.02);
            assert!(
                normal
                    .beta
                    .iter()
                    .all(|&b| b > 0.0 && b < 1.0 && dtype.round(b) == b)
            );
            let mixed = draw(Gates::Mixed);
            for (i, &g) in mixed.g.iter().enumerate() {
                assert_eq!(g == 0.0, i % 8 % 4 == 0);
                assert!(g == 0.0 || g == normal.g[i] / 16.0);
            }
            assert!(draw(Gates::Zero).g.iter().all(|&g| g == 0.0));
            let model = draw(Gates::Model);
            let raw = GateInputs::new(model.spec);
            for (i, (&g, &normal)) in model.g.iter().zip(&normal.g).enumerate() {
                // Drawn from the same numbers as `normal`, which is -softplus(-x).
                let x = -libm::log(libm::expm1(-f64::from(normal)));
                let bias = f64::from(raw.dt_bias[i % 8]);
                let rate = libm::exp(f64::from(raw.a_log[i % 8]));
                let expected = -rate * softplus(x + bias);
                assert!((f64::from(g) - expected).abs() <= 1e-3 * expected.abs());
            }
            let strong = draw(Gates::Strong);
            assert!(strong.g.iter().all(|&g| g < -0.5) && moments(&wide(&strong.g)).0 < -20.0);
            let silu = Inputs::new(InputSpec {
                keys: Keys::Silu,
                ..spec
            });
            let cosine = |x: &[f32]| {
                let rows: Vec<_> = x.chunks(128).collect();
                let dot = |i: usize| {
                    rows[i]
                        .iter()
                        .zip(rows[i + 1])
                        .map(|(a, b)| a * b)
                        .sum::<f32>()
                };
                (0..rows.len() - 1).map(dot).sum::<f32>() / rows.len() as f32
            };
            assert!(cosine(&normal.k.values).abs() < 0.01 && cosine(&silu.k.values) > 0.08);
        }
    }

    #[test]
    fn bytes_and_values_agree() {
        for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
            let t = random_state(dtype, 1001, 3);
            assert_eq!(t.bytes.len(), 1001 * dtype.size());
            assert!(t.values.iter().all(|&x| dtype.round(x) == x));
            assert_eq!(Tensor::from_bytes(dtype, t.bytes.clone()), t);
        }
    }

    #[test]
    fn gate_inputs_cover_the_range() {
        let spec = InputSpec {
            value_heads: 64,
            key_heads: 16,
            tokens: 8,
            ..Default::default()
        };
        let x = GateInputs::new(spec);
        assert_eq!(
            (
                x.a.values.len(),
                x.b.values.len(),
                x.a_log.len(),
                x.dt_bias.len()
            ),
            (512, 512, 64, 64)
        );
        assert!(x.a_log.iter().all(|&a| a < 16f32.ln()) && x.a_log.iter().any(|&a| a > 12f32.ln()));
        for &b in &x.dt_bias {
            assert!((0.00099..=0.101).contains(&softplus(f64::from(b))));
        }
    }
}
