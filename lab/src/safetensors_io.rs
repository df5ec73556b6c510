//! Prefill inputs and results in safetensors files.
//!
//! | tensor          | dtype             | shape           |                                             |
//! |-----------------|-------------------|-----------------|---------------------------------------------|
//! | `q`, `k`        | bf16, fp16        | `[T, HK, K]`    |                                             |
//! | `v`             | that of q         | `[T, HV, V]`    |                                             |
//! | `g`             | f32               | `[T, HV]`       | log gates; without `g` and `a`: no decay    |
//! | `a`             | f32, or that of q | `[T, HV]`       | raw gate input, instead of `g`              |
//! | `A_log`         | f32, or that of q | `[HV]`          | needed with `a`                             |
//! | `dt_bias`       | f32, or that of q | `[HV]`          | may go with `a`                             |
//! | `beta`          | f32               | `[T, HV]`       | write strengths; without `beta` and `b`: 1  |
//! | `b`             | f32, or that of q | `[T, HV]`       | logits of beta, instead of `beta`           |
//! | `cu_seqlens`    | i32, i64          | `[N + 1]`       | without it: one sequence of all tokens      |
//! | `initial_state` | f32, bf16, fp16   | `[N, HV, K, V]` | without it: zeros                           |
//!
//! Results are `o`, `[T, HV, V]`, and `final_state`, `[N, HV, K, V]`. An input file with any other name is refused: a
//! misspelt optional tensor must not pass for an absent one.

use std::fmt;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype as FileDtype, TensorView};
use safetensors::{SafeTensorError, SafeTensors};

use crate::inputs::Tensor;
use crate::oracle::{Beta, Gate, Problem, ProblemError, validate_cu_seqlens};
use deltawave::types::{Dtype, HeadMap};

/// Tensor names that an input file may hold.
pub const INPUT_NAMES: [&str; 11] = [
    "q",
    "k",
    "v",
    "g",
    "a",
    "A_log",
    "dt_bias",
    "beta",
    "b",
    "cu_seqlens",
    "initial_state",
];

/// Reason why a file is not a valid prefill, or could not be written.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The bytes are not a safetensors file: cut off, or malformed.
    #[error("not a safetensors file: {0}")]
    Format(#[source] SafeTensorError),
    /// The results cannot be put in a safetensors file.
    #[error("the results cannot be written: {0}")]
    Write(#[source] SafeTensorError),
    /// A required tensor is missing.
    #[error("tensor `{name}` is missing: {needed}")]
    Missing {
        /// The tensor.
        name: &'static str,
        /// The condition that requires it.
        needed: &'static str,
    },
    /// A tensor's name is not in [`INPUT_NAMES`].
    #[error("tensor `{name}` is none of {}", INPUT_NAMES.join(", "))]
    Unknown {
        /// The tensor.
        name: String,
    },
    /// Two tensors exclude each other, or one requires the other.
    #[error("tensor `{name}` {problem} `{other}`")]
    Conflict {
        /// A tensor.
        name: &'static str,
        /// Relation between `name` and `other`: `excludes`, or `means nothing without`.
        problem: &'static str,
        /// The other tensor.
        other: &'static str,
    },
    /// A tensor has the wrong element type.
    #[error("tensor `{name}` is {actual}, it must be {allowed}")]
    Dtype {
        /// The tensor.
        name: &'static str,
        /// Its element type, as safetensors calls it.
        actual: String,
        /// Element types that it may have.
        allowed: String,
    },
    /// A tensor has the wrong shape.
    #[error(
        "tensor `{name}` has the shape {actual:?}, it must be {symbols}{}",
        Dims(expected)
    )]
    Shape {
        /// The tensor.
        name: &'static str,
        /// Its shape.
        actual: Vec<usize>,
        /// Shape that it must have, in symbols such as `[T, HK, K]`.
        symbols: &'static str,
        /// The same shape in numbers, where other tensors determine it; else empty.
        expected: Vec<usize>,
    },
    /// An entry of `cu_seqlens` does not fit 32 bits.
    #[error("tensor `cu_seqlens`: entry {index} is {value}, it must be at most 2147483647")]
    Offset {
        /// The entry.
        index: usize,
        /// Its value.
        value: i64,
    },
    /// The tensors fit together, but the problem is invalid.
    #[error(transparent)]
    Problem(#[from] ProblemError),
}

struct Dims<'a>(&'a [usize]);

impl fmt::Display for Dims<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            Ok(())
        } else {
            write!(f, " = {:?}", self.0)
        }
    }
}

/// Log gates in a file.
#[derive(Clone, Debug, PartialEq)]
pub enum FileGate {
    /// No gate tensor: no decay.
    None,
    /// `g`.
    Log(Tensor),
    /// `a`, `A_log` and `dt_bias`.
    Raw {
        /// `[T, HV]`.
        a: Tensor,
        /// `[HV]`.
        a_log: Tensor,
        /// `[HV]`.
        dt_bias: Option<Tensor>,
    },
}

/// Write strengths in a file.
#[derive(Clone, Debug, PartialEq)]
pub enum FileBeta {
    /// No tensor: `beta = 1`.
    One,
    /// `beta`, `[T, HV]`.
    Given(Tensor),
    /// `b`, logits of beta, `[T, HV]`.
    Logits(Tensor),
}

/// Inputs of a prefill, read from a file and validated.
#[derive(Clone, Debug, PartialEq)]
pub struct PrefillFile {
    /// Tokens, `T`.
    pub tokens: usize,
    /// Key heads, `HK`.
    pub key_heads: usize,
    /// Value heads, `HV`, a multiple of `HK`.
    pub value_heads: usize,
    /// Width of a row of q and k, `K`.
    pub key_dim: usize,
    /// Width of a row of v, `V`.
    pub value_dim: usize,
    /// `[T, HK, K]`.
    pub q: Tensor,
    /// `[T, HK, K]`.
    pub k: Tensor,
    /// `[T, HV, V]`.
    pub v: Tensor,
    /// Log gates.
    pub gate: FileGate,
    /// Write strengths.
    pub beta: FileBeta,
    /// Start of each sequence and end of the last, `[N + 1]`.
    pub cu_seqlens: Vec<i32>,
    /// `[N, HV, K, V]`.
    pub initial_state: Option<Tensor>,
}

impl PrefillFile {
    /// Reads and validates a file.
    pub fn read(path: &Path) -> Result<Self, FileError> {
        let bytes = std::fs::read(path).map_err(|source| FileError::Io {
            path: path.to_owned(),
            source,
        })?;
        Self::from_bytes(&bytes)
    }

    /// Validates the bytes of a file.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, FileError> {
        let file = SafeTensors::deserialize(bytes).map_err(FileError::Format)?;
        let unknown = (file.names().into_iter()).filter(|name| !INPUT_NAMES.contains(name));
        // Reports the smallest name: the parsed file keeps no order.
        if let Some(name) = unknown.min() {
            return Err(FileError::Unknown {
                name: name.to_owned(),
            });
        }
        let get = |name| file.tensor(name).ok();
        let need = |name, needed| {
            file.tensor(name)
                .map_err(|_| FileError::Missing { name, needed })
        };

        const ALWAYS: &str = "every prefill has one";
        let (q, k, v) = (need("q", ALWAYS)?, need("k", ALWAYS)?, need("v", ALWAYS)?);
        let [tokens, key_heads, key_dim] = dims("q", &q, "[T, HK, K]")?;
        let q = tensor("q", &q, &[Dtype::Bf16, Dtype::F16])?;
        let same = [q.dtype];
        shape("k", &k, "[T, HK, K]", &[tokens, key_heads, key_dim])?;
        let k = tensor("k", &k, &same)?;
        let [rows, value_heads, value_dim] = dims("v", &v, "[T, HV, V]")?;
        if rows != tokens {
            shape("v", &v, "[T, HV, V]", &[tokens, value_heads, value_dim])?;
        }
        let v = tensor("v", &v, &same)?;

        let per_token = [tokens, value_heads];
        let wide = [Dtype::F32, q.dtype];
        let optional = |name, symbols, expected: &[usize], allowed: &[Dtype]| {
            get(name)
                .map(|x| {
                    shape(name, &x, symbols, expected)?;
                    tensor(name, &x, allowed)
                })
                .transpose()
        };
        let g = optional("g", "[T, HV]", &per_token, &[Dtype::F32])?;
        let a = optional("a", "[T, HV]", &per_token, &wide)?;
        let a_log = optional("A_log", "[HV]", &[value_heads], &wide)?;
        let dt_bias = optional("dt_bias", "[HV]", &[value_heads], &wide)?;
        let conflict = |name, problem, other| {
            Err(FileError::Conflict {
                name,
                problem,
                other,
            })
        };
        const EITHER: &str = "excludes";
        const WITHOUT: &str = "means nothing without";
        let gate = match (g, a, a_log) {
            (Some(_), Some(_), _) => return conflict("g", EITHER, "a"),
            (None, Some(a), Some(a_log)) => FileGate::Raw { a, a_log, dt_bias },
            (None, Some(_), None) => {
                return Err(FileError::Missing {
                    name: "A_log",
                    needed: "`a` is given",
                });
            }
            (_, None, Some(_)) => return conflict("A_log", WITHOUT, "a"),
            (_, None, None) if dt_bias.is_some() => return conflict("dt_bias", WITHOUT, "a"),
            (Some(g), None, None) => FileGate::Log(g),
            (None, None, None) => FileGate::None,
        };
        let beta = optional("beta", "[T, HV]", &per_token, &[Dtype::F32])?;
        let b = optional("b", "[T, HV]", &per_token, &wide)?;
        let beta = match (beta, b) {
            (Some(_), Some(_)) => return conflict("beta", EITHER, "b"),
            (Some(beta), None) => FileBeta::Given(beta),
            (None, Some(b)) => FileBeta::Logits(b),
            (None, None) => FileBeta::One,
        };

        let cu_seqlens = match get("cu_seqlens") {
            Some(x) => offsets(&x)?,
            None => vec![
                0,
                i32::try_from(tokens).map_err(|_| FileError::Offset {
                    index: 1,
                    value: tokens as i64,
                })?,
            ],
        };
        validate_cu_seqlens(&cu_seqlens, tokens)?;
        let states = [cu_seqlens.len() - 1, value_heads, key_dim, value_dim];
        let initial_state = optional(
            "initial_state",
            "[N, HV, K, V]",
            &states,
            &[Dtype::F32, Dtype::Bf16, Dtype::F16],
        )?;
        let file = PrefillFile {
            tokens,
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            q,
            k,
            v,
            gate,
            beta,
            cu_seqlens,
            initial_state,
        };
        file.problem().validate()?;
        Ok(file)
    }

    /// The prefill problem of this file. A file does not specify scale, head map, norm and doubled beta: they are the
    /// default scale, grouped heads, no norm and `beta = sigmoid(b)`.
    pub fn problem(&self) -> Problem<'_> {
        Problem {
            tokens: self.tokens,
            key_heads: self.key_heads,
            value_heads: self.value_heads,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            q: &self.q.values,
            k: &self.k.values,
            v: &self.v.values,
            gate: match &self.gate {
                FileGate::None => Gate::None,
                FileGate::Log(g) => Gate::Log(&g.values),
                FileGate::Raw { a, a_log, dt_bias } => Gate::Raw {
                    a: &a.values,
                    a_log: &a_log.values,
                    dt_bias: dt_bias.as_ref().map(|b| &b.values[..]),
                },
            },
            beta: match &self.beta {
                FileBeta::One => Beta::One,
                FileBeta::Given(beta) => Beta::Given(&beta.values),
                FileBeta::Logits(b) => Beta::Logits {
                    b: &b.values,
                    allow_neg_eigval: false,
                },
            },
            cu_seqlens: &self.cu_seqlens,
            initial_state: self.initial_state.as_ref().map(|s| &s.values[..]),
            has_initial_state: None,
            scale: None,
            head_map: HeadMap::Grouped,
            l2_norm: false,
        }
    }
}

impl PrefillFile {
    /// Writes a file that [`PrefillFile::read`] reads back. An existing file is replaced.
    pub fn write(&self, path: &Path) -> Result<(), FileError> {
        std::fs::write(path, self.to_bytes()?).map_err(|source| FileError::Io {
            path: path.to_owned(),
            source,
        })
    }

    /// The bytes that [`PrefillFile::write`] writes.
    pub fn to_bytes(&self) -> Result<Vec<u8>, FileError> {
        let per_token = [self.tokens, self.value_heads];
        let keys = [self.tokens, self.key_heads, self.key_dim];
        let values = [self.tokens, self.value_heads, self.value_dim];
        let sequences = self.cu_seqlens.len().saturating_sub(1);
        let states = [sequences, self.value_heads, self.key_dim, self.value_dim];
        let per_head = [self.value_heads];
        let mut tensors: Vec<(&str, &[usize], &Tensor)> = vec![
            ("q", &keys, &self.q),
            ("k", &keys, &self.k),
            ("v", &values, &self.v),
        ];
        match &self.gate {
            FileGate::None => {}
            FileGate::Log(g) => tensors.push(("g", &per_token, g)),
            FileGate::Raw { a, a_log, dt_bias } => {
                tensors.push(("a", &per_token, a));
                tensors.push(("A_log", &per_head, a_log));
                tensors.extend(dt_bias.as_ref().map(|b| ("dt_bias", &per_head[..], b)));
            }
        }
        match &self.beta {
            FileBeta::One => {}
            FileBeta::Given(beta) => tensors.push(("beta", &per_token, beta)),
            FileBeta::Logits(b) => tensors.push(("b", &per_token, b)),
        }
        tensors.extend((self.initial_state.as_ref()).map(|s| ("initial_state", &states[..], s)));
        let offsets: Vec<u8> = (self.cu_seqlens.iter())
            .flat_map(|n| n.to_le_bytes())
            .collect();
        let offsets = (
            "cu_seqlens",
            TensorView::new(FileDtype::I32, vec![self.cu_seqlens.len()], &offsets)
                .map_err(FileError::Write)?,
        );
        let views = (tensors.into_iter())
            .map(|(name, shape, t)| {
                let view = TensorView::new(file_dtype(t.dtype), shape.to_vec(), &t.bytes)?;
                Ok((name, view))
            })
            .chain([Ok(offsets)])
            .collect::<Result<Vec<_>, SafeTensorError>>()
            .map_err(FileError::Write)?;
        safetensors::serialize(views, None).map_err(FileError::Write)
    }
}

/// A tensor to write.
#[derive(Clone, Debug)]
pub struct Named<'a> {
    /// Name of the tensor, such as `o` or `final_state`.
    pub name: &'a str,
    /// Its shape.
    pub shape: &'a [usize],
    /// The element type.
    pub dtype: Dtype,
    /// Little-endian elements, row-major.
    pub bytes: &'a [u8],
}

/// Writes tensors to a file. An existing file is replaced.
pub fn write(path: &Path, tensors: &[Named<'_>]) -> Result<(), FileError> {
    std::fs::write(path, to_bytes(tensors)?).map_err(|source| FileError::Io {
        path: path.to_owned(),
        source,
    })
}

/// The bytes of a safetensors file with `tensors`.
pub fn to_bytes(tensors: &[Named<'_>]) -> Result<Vec<u8>, FileError> {
    let views = (tensors.iter())
        .map(|t| {
            Ok((
                t.name,
                TensorView::new(file_dtype(t.dtype), t.shape.to_vec(), t.bytes)?,
            ))
        })
        .collect::<Result<Vec<_>, SafeTensorError>>()
        .map_err(FileError::Write)?;
    safetensors::serialize(views, None).map_err(FileError::Write)
}

fn file_dtype(dtype: Dtype) -> FileDtype {
    match dtype {
        Dtype::Bf16 => FileDtype::BF16,
        Dtype::F16 => FileDtype::F16,
        Dtype::F32 => FileDtype::F32,
    }
}

/// Reads a three-dimensional shape that no other tensor determines.
fn dims(
    name: &'static str,
    x: &TensorView<'_>,
    symbols: &'static str,
) -> Result<[usize; 3], FileError> {
    x.shape().try_into().map_err(|_| FileError::Shape {
        name,
        actual: x.shape().to_vec(),
        symbols,
        expected: Vec::new(),
    })
}

fn shape(
    name: &'static str,
    x: &TensorView<'_>,
    symbols: &'static str,
    expected: &[usize],
) -> Result<(), FileError> {
    if x.shape() == expected {
        return Ok(());
    }
    Err(FileError::Shape {
        name,
        actual: x.shape().to_vec(),
        symbols,
        expected: expected.to_vec(),
    })
}

fn tensor(name: &'static str, x: &TensorView<'_>, allowed: &[Dtype]) -> Result<Tensor, FileError> {
    match allowed.iter().find(|&&d| file_dtype(d) == x.dtype()) {
        Some(&dtype) => Ok(Tensor::from_bytes(dtype, x.data().to_vec())),
        None => Err(FileError::Dtype {
            name,
            actual: x.dtype().to_string(),
            allowed: alternatives(allowed),
        }),
    }
}

/// `f32, bf16 or fp16`.
fn alternatives(types: &[Dtype]) -> String {
    let names: Vec<_> = types.iter().map(|d| d.name()).collect();
    match names.split_last() {
        Some((last, [])) => (*last).to_owned(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => String::new(),
    }
}

fn offsets(x: &TensorView<'_>) -> Result<Vec<i32>, FileError> {
    const NAME: &str = "cu_seqlens";
    if x.shape().len() != 1 {
        let actual = x.shape().to_vec();
        return Err(FileError::Shape {
            name: NAME,
            actual,
            symbols: "[N + 1]",
            expected: Vec::new(),
        });
    }
    match x.dtype() {
        FileDtype::I32 => Ok(x
            .data()
            .as_chunks()
            .0
            .iter()
            .map(|b| i32::from_le_bytes(*b))
            .collect()),
        FileDtype::I64 => (x.data().as_chunks().0.iter().enumerate())
            .map(|(index, b)| {
                let value = i64::from_le_bytes(*b);
                i32::try_from(value).map_err(|_| FileError::Offset { index, value })
            })
            .collect(),
        other => Err(FileError::Dtype {
            name: NAME,
            actual: other.to_string(),
            allowed: "i32 or i64".to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs::{GateInputs, InputSpec, Inputs, random_state};
    use crate::oracle::prefill;

    type Entry = (&'static str, FileDtype, Vec<usize>, Vec<u8>);

    const SPEC: InputSpec = InputSpec {
        dtype: Dtype::F16,
        tokens: 20,
        key_heads: 2,
        value_heads: 4,
        key_dim: 16,
        value_dim: 32,
        gates: crate::inputs::Gates::Normal,
        keys: crate::inputs::Keys::Normal,
        unit_rows: true,
        seed: 1,
    };

    fn f32s(x: &[f32]) -> Vec<u8> {
        x.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    /// A valid file with every tensor except the raw gates.
    fn entries() -> Vec<Entry> {
        let x = Inputs::new(SPEC);
        let state = random_state(Dtype::Bf16, 3 * 4 * 16 * 32, 2);
        let cu = [0i64, 7, 7, 19]
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect();
        vec![
            ("q", FileDtype::F16, vec![20, 2, 16], x.q.bytes),
            ("k", FileDtype::F16, vec![20, 2, 16], x.k.bytes),
            ("v", FileDtype::F16, vec![20, 4, 32], x.v.bytes),
            ("g", FileDtype::F32, vec![20, 4], f32s(&x.g)),
            ("beta", FileDtype::F32, vec![20, 4], f32s(&x.beta)),
            ("cu_seqlens", FileDtype::I64, vec![4], cu),
            (
                "initial_state",
                FileDtype::BF16,
                vec![3, 4, 16, 32],
                state.bytes,
            ),
        ]
    }

    fn raw_entries() -> Vec<Entry> {
        let gates = GateInputs::new(SPEC);
        let mut e: Vec<Entry> = entries()
            .into_iter()
            .filter(|e| e.0 != "g" && e.0 != "beta")
            .collect();
        e.push(("a", FileDtype::F16, vec![20, 4], gates.a.bytes));
        e.push(("b", FileDtype::F16, vec![20, 4], gates.b.bytes));
        e.push(("A_log", FileDtype::F32, vec![4], f32s(&gates.a_log)));
        e.push(("dt_bias", FileDtype::F32, vec![4], f32s(&gates.dt_bias)));
        e
    }

    fn file(entries: &[Entry]) -> Vec<u8> {
        let views = entries
            .iter()
            .map(|(n, d, s, b)| (*n, TensorView::new(*d, s.clone(), b).unwrap()));
        safetensors::serialize(views, None).unwrap()
    }

    fn set(e: &mut [Entry], name: &str, dtype: FileDtype, shape: Vec<usize>) {
        let i = e.iter().position(|e| e.0 == name).unwrap();
        let bytes = vec![0; shape.iter().product::<usize>() * dtype.bitsize() / 8];
        e[i] = (e[i].0, dtype, shape, bytes);
    }

    #[test]
    fn a_file_is_the_problem_it_was_written_from() {
        let x = Inputs::new(SPEC);
        let state = random_state(Dtype::Bf16, 3 * 4 * 16 * 32, 2);
        let mut p = x.problem(&[0, 7, 7, 19]);
        p.initial_state = Some(&state.values);
        let read = PrefillFile::from_bytes(&file(&entries())).unwrap();
        assert_eq!(
            (read.q.dtype, read.initial_state.as_ref().unwrap().dtype),
            (Dtype::F16, Dtype::Bf16)
        );
        assert_eq!(prefill(&read.problem()).unwrap(), prefill(&p).unwrap());

        let gates = GateInputs::new(SPEC);
        p.gate = Gate::Raw {
            a: &gates.a.values,
            a_log: &gates.a_log,
            dt_bias: Some(&gates.dt_bias),
        };
        p.beta = Beta::Logits {
            b: &gates.b.values,
            allow_neg_eigval: false,
        };
        let read = PrefillFile::from_bytes(&file(&raw_entries())).unwrap();
        assert_eq!(prefill(&read.problem()).unwrap(), prefill(&p).unwrap());
    }

    #[test]
    fn optional_tensors_may_be_absent() {
        let read = PrefillFile::from_bytes(&file(&entries()[..3])).unwrap();
        assert_eq!((&read.gate, &read.beta), (&FileGate::None, &FileBeta::One));
        assert_eq!(
            (&read.cu_seqlens[..], &read.initial_state),
            (&[0, 20][..], &None)
        );
    }

    #[test]
    fn results_round_trip() {
        let o = random_state(Dtype::Bf16, 24, 1);
        let s = random_state(Dtype::F32, 16, 2);
        let named = [
            Named {
                name: "o",
                shape: &[2, 3, 4],
                dtype: o.dtype,
                bytes: &o.bytes,
            },
            Named {
                name: "final_state",
                shape: &[1, 1, 4, 4],
                dtype: s.dtype,
                bytes: &s.bytes,
            },
        ];
        let path =
            std::env::temp_dir().join(format!("deltawave-io-{}.safetensors", std::process::id()));
        write(&path, &named).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        for n in &named {
            let t = file.tensor(n.name).unwrap();
            assert_eq!(
                (t.dtype(), t.shape(), t.data()),
                (file_dtype(n.dtype), n.shape, n.bytes)
            );
        }
        // The length of the bytes must match the shape.
        let wrong = Named {
            shape: &[2, 3, 5],
            ..named[0].clone()
        };
        assert!(matches!(to_bytes(&[wrong]), Err(FileError::Write(_))));
        let error = PrefillFile::read(Path::new("/nowhere/x.safetensors")).unwrap_err();
        assert!(
            error.to_string().starts_with("/nowhere/x.safetensors: "),
            "{error}"
        );
        let error = write(Path::new("/nowhere/x.safetensors"), &named).unwrap_err();
        assert!(matches!(error, FileError::Io { .. }));
    }

    #[test]
    fn bad_tensors_are_named() {
        use FileDtype::{BF16, F16, F32, F64, I32, I64};
        type Change = fn(&mut Vec<Entry>);
        let cases: [(&str, Change); 22] = [
            ("tensor `q` is missing", |e| e.retain(|e| e.0 != "q")),
            ("tensor `v` is missing", |e| e.retain(|e| e.0 != "v")),
            ("tensor `initial_states` is none of q, k, v", |e| {
                e[6].0 = "initial_states"
            }),
            ("tensor `q` is F32, it must be bf16 or fp16", |e| {
                set(e, "q", F32, vec![20, 2, 16])
            }),
            ("tensor `k` is BF16, it must be fp16", |e| {
                set(e, "k", BF16, vec![20, 2, 16])
            }),
            ("tensor `v` is I32, it must be fp16", |e| {
                set(e, "v", I32, vec![20, 4, 32])
            }),
            ("tensor `g` is F16, it must be f32", |e| {
                set(e, "g", F16, vec![20, 4])
            }),
            (
                "tensor `initial_state` is F64, it must be f32, bf16 or fp16",
                |e| {
                    set(e, "initial_state", F64, vec![3, 4, 16, 32]);
                },
            ),
            ("tensor `cu_seqlens` is F64, it must be i32 or i64", |e| {
                set(e, "cu_seqlens", F64, vec![4])
            }),
            (
                "tensor `q` has the shape [1, 20, 2, 16], it must be [T, HK, K]",
                |e| {
                    set(e, "q", F16, vec![1, 20, 2, 16]);
                },
            ),
            (
                "tensor `k` has the shape [20, 4, 16], it must be [T, HK, K] = [20, 2, 16]",
                |e| {
                    set(e, "k", F16, vec![20, 4, 16]);
                },
            ),
            (
                "tensor `v` has the shape [21, 4, 32], it must be [T, HV, V] = [20, 4, 32]",
                |e| {
                    set(e, "v", F16, vec![21, 4, 32]);
                },
            ),
            (
                "tensor `beta` has the shape [20, 2], it must be [T, HV] = [20, 4]",
                |e| {
                    set(e, "beta", F32, vec![20, 2]);
                },
            ),
            (
                "tensor `initial_state` has the shape [2, 4, 16, 32], it must be [N, HV, K, V] = [3, 4, 16, 32]",
                |e| {
                    set(e, "initial_state", F32, vec![2, 4, 16, 32]);
                },
            ),
            (
                "tensor `cu_seqlens` has the shape [2, 2], it must be [N + 1]",
                |e| set(e, "cu_seqlens", I64, vec![2, 2]),
            ),
            ("cu_seqlens is empty, its first entry must be 0", |e| {
                set(e, "cu_seqlens", I32, vec![0])
            }),
            ("tensor `cu_seqlens`: entry 1 is 4294967303", |e| {
                e[5].3[12] = 1
            }),
            (
                "cu_seqlens[2] is 5, it must be at least its predecessor, 7",
                |e| e[5].3[16] = 5,
            ),
            (
                "cu_seqlens[3] is 21, it must be at most the 20 tokens",
                |e| e[5].3[24] = 21,
            ),
            ("tensor `g` excludes `a`", |e| {
                e.push(("a", F32, vec![20, 4], vec![0; 320]))
            }),
            ("tensor `beta` excludes `b`", |e| {
                e.push(("b", F32, vec![20, 4], vec![0; 320]))
            }),
            ("tensor `dt_bias` means nothing without `a`", |e| {
                e.push(("dt_bias", F32, vec![4], vec![0; 16]))
            }),
        ];
        for (message, change) in cases {
            let mut e = entries();
            change(&mut e);
            let error = PrefillFile::from_bytes(&file(&e)).unwrap_err().to_string();
            assert!(
                error.starts_with(message),
                "`{error}` does not start with `{message}`"
            );
        }
        let raw = |name| {
            let e: Vec<Entry> = raw_entries().into_iter().filter(|e| e.0 != name).collect();
            PrefillFile::from_bytes(&file(&e)).unwrap_err().to_string()
        };
        assert_eq!(raw("A_log"), "tensor `A_log` is missing: `a` is given");
        assert_eq!(raw("a"), "tensor `A_log` means nothing without `a`");
        let mut e = entries();
        for name in ["q", "k"] {
            set(&mut e, name, F16, vec![20, 3, 16]);
        }
        let error = PrefillFile::from_bytes(&file(&e)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "4 value heads are not a multiple of 3 key heads"
        );
        let mut e = entries();
        e.truncate(3);
        for name in ["q", "k"] {
            set(&mut e, name, F16, vec![20, 0, 16]);
        }
        assert_eq!(
            PrefillFile::from_bytes(&file(&e)).unwrap_err().to_string(),
            "HK is 0, it must be at least 1"
        );
    }

    #[test]
    fn files_are_written_as_they_were_read() {
        for entries in [entries(), raw_entries(), entries()[..3].to_vec()] {
            let read = PrefillFile::from_bytes(&file(&entries)).unwrap();
            let again = PrefillFile::from_bytes(&read.to_bytes().unwrap()).unwrap();
            assert_eq!(read, again);
        }
    }

    #[test]
    fn damaged_files_are_errors() {
        let good = file(&entries());
        for end in (0..good.len().min(2000)).chain([good.len() - 1]) {
            assert!(
                PrefillFile::from_bytes(&good[..end]).is_err(),
                "cut at {end}"
            );
        }
        assert!(matches!(
            PrefillFile::from_bytes(&[]),
            Err(FileError::Format(_))
        ));
        // After any change of a header byte, reading gives an error or a consistent file. It never panics.
        let header = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
        for at in 0..header {
            for value in [0, b'"', b'0', b'9', b'-', b'[', b'}', 0xff] {
                let mut bytes = good.clone();
                bytes[at] = value;
                if let Ok(read) = PrefillFile::from_bytes(&bytes) {
                    read.problem().validate().unwrap();
                }
            }
        }
    }
}
