//! The language of `--arg`: parses scalars, buffers and structs into kernel arguments.

use std::fmt;
use std::path::PathBuf;

use safetensors::Dtype;
use thiserror::Error;

/// One kernel argument, or a field of one.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A number, little-endian; its alignment is its size.
    Scalar {
        /// Type as the user wrote it.
        kind: &'static str,
        /// The number's bytes.
        bytes: Vec<u8>,
    },
    /// A null pointer.
    Null,
    /// The address of a buffer: its index in [`Parser::buffers`].
    Buffer(usize),
    /// Bytes without alignment.
    Bytes(Vec<u8>),
    /// Fields laid out as C lays them out.
    Struct(Vec<Value>),
}

/// A buffer in device memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    /// Content before the launch.
    pub content: Content,
    /// Destination after the launch.
    pub output: Option<Place>,
}

/// Content of a buffer before the launch.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Bytes of a file.
    File(Place),
    /// Zeros.
    Zeros(Shape),
    /// All bits set, which is NaN in every float type.
    Poison(Shape),
}

/// A file, a tensor of a safetensors file, or the terminal.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// A file of plain bytes.
    Raw(PathBuf),
    /// A tensor of a safetensors file.
    Tensor(PathBuf, String),
    /// The report on standard output.
    Print,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Raw(path) => write!(f, "{}", path.display()),
            Place::Tensor(path, name) => write!(f, "{}#{name}", path.display()),
            Place::Print => f.write_str("-"),
        }
    }
}

/// Size of a buffer, with element type and dimensions if known.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions.
    pub dims: Vec<usize>,
    /// Size in bytes.
    pub bytes: usize,
}

/// Error: a text that is no valid kernel argument.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("`{text}`: {reason}")]
pub struct ValueError {
    /// The part that is wrong.
    pub text: String,
    /// Reason.
    pub reason: String,
}

fn error<T>(text: &str, reason: impl Into<String>) -> Result<T, ValueError> {
    Err(ValueError {
        text: text.into(),
        reason: reason.into(),
    })
}

const KINDS: &str =
    "i8 u8 i16 u16 i32 u32 i64 u64 f16 bf16 f32 f64, hex, null, struct, in, zeros, inout, out";
/// Maximum depth of nested structs.
const DEPTH: u32 = 16;

/// Parses arguments and collects their buffers.
#[derive(Default)]
pub struct Parser {
    /// The buffers of all arguments so far.
    pub buffers: Vec<Buffer>,
}

impl Parser {
    /// Parses one argument.
    pub fn value(&mut self, text: &str) -> Result<Value, ValueError> {
        self.nested(text.trim(), 0)
    }

    fn nested(&mut self, text: &str, depth: u32) -> Result<Value, ValueError> {
        if text == "null" {
            return Ok(Value::Null);
        }
        if let Some(body) = text.strip_prefix("struct(") {
            let Some(body) = body.strip_suffix(')') else {
                return error(text, "the struct is not closed by `)`");
            };
            if depth == DEPTH {
                return error(text, "structs are nested too deep");
            }
            let fields = split_fields(body);
            return fields
                .into_iter()
                .map(|field| self.nested(field.trim(), depth + 1))
                .collect::<Result<_, _>>()
                .map(Value::Struct);
        }
        let Some((kind, rest)) = text.split_once(':') else {
            return error(
                text,
                format!("expected KIND:VALUE, where KIND is one of {KINDS}"),
            );
        };
        let buffer = match kind {
            "in" => Buffer {
                content: Content::File(place(rest)?),
                output: None,
            },
            "inout" => {
                let Some((from, to)) = rest.split_once("->") else {
                    return error(text, "expected inout:FILE->OUT");
                };
                Buffer {
                    content: Content::File(place(from)?),
                    output: Some(target(to)?),
                }
            }
            "out" => {
                let Some((size, to)) = rest.split_once("->") else {
                    return error(text, "expected out:SIZE->FILE");
                };
                Buffer {
                    content: Content::Poison(shape(size)?),
                    output: Some(target(to)?),
                }
            }
            "zeros" => {
                let (size, to) = match rest.split_once("->") {
                    Some((size, to)) => (size, Some(target(to)?)),
                    None => (rest, None),
                };
                Buffer {
                    content: Content::Zeros(shape(size)?),
                    output: to,
                }
            }
            "hex" => return hex(rest).map(Value::Bytes),
            _ => return scalar(text, kind, rest),
        };
        self.buffers.push(buffer);
        Ok(Value::Buffer(self.buffers.len() - 1))
    }
}

/// Splits `body` at commas outside of brackets; an empty body has no fields.
fn split_fields(body: &str) -> Vec<&str> {
    let mut fields = Vec::new();
    let (mut depth, mut start) = (0i32, 0);
    for (at, c) in body.char_indices() {
        match c {
            '(' | '[' => depth += 1,
            ')' | ']' => depth -= 1,
            ',' if depth == 0 => {
                fields.push(&body[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if !body.trim().is_empty() {
        fields.push(&body[start..]);
    }
    fields
}

fn hex(text: &str) -> Result<Vec<u8>, ValueError> {
    let digits: Option<Vec<u32>> = text.chars().map(|c| c.to_digit(16)).collect();
    match digits {
        Some(digits) if digits.len() % 2 == 0 && !digits.is_empty() => Ok(digits
            .chunks_exact(2)
            .map(|pair| (pair[0] << 4 | pair[1]) as u8)
            .collect()),
        _ => error(text, "expected an even number of hexadecimal digits"),
    }
}

/// A number as decimal, or hexadecimal after 0x.
fn integer(text: &str) -> Option<i128> {
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, text),
    };
    if digits.starts_with(['+', '-']) {
        return None;
    }
    let value = match digits.strip_prefix("0x").or(digits.strip_prefix("0X")) {
        Some(digits) if digits.starts_with(['+', '-']) => return None,
        Some(digits) => i128::from(u64::from_str_radix(digits, 16).ok()?),
        None => i128::from(digits.parse::<u64>().ok()?),
    };
    Some(sign * value)
}

fn scalar(text: &str, kind: &str, rest: &str) -> Result<Value, ValueError> {
    macro_rules! int {
        ($name:literal, $t:ty) => {{
            let Some(value) = integer(rest) else {
                return error(text, "expected an integer, decimal or hexadecimal after 0x");
            };
            match <$t>::try_from(value) {
                Ok(value) => ($name, value.to_le_bytes().to_vec()),
                Err(_) => {
                    let range = format!("out of range: {} to {}", <$t>::MIN, <$t>::MAX);
                    return error(text, range);
                }
            }
        }};
    }
    macro_rules! float {
        ($name:literal, $from:expr) => {{
            match rest.parse::<f64>() {
                Ok(value) => ($name, $from(value).to_le_bytes().to_vec()),
                Err(_) => return error(text, "expected a number such as 1.5, -2e-3, inf or nan"),
            }
        }};
    }
    let (kind, bytes) = match kind {
        "i8" => int!("i8", i8),
        "u8" => int!("u8", u8),
        "i16" => int!("i16", i16),
        "u16" => int!("u16", u16),
        "i32" => int!("i32", i32),
        "u32" => int!("u32", u32),
        "i64" => int!("i64", i64),
        "u64" => int!("u64", u64),
        "f16" => float!("f16", half::f16::from_f64),
        "bf16" => float!("bf16", half::bf16::from_f64),
        "f32" => float!("f32", |v| v as f32),
        "f64" => float!("f64", f64::from),
        _ => return error(text, format!("`{kind}` is none of {KINDS}")),
    };
    Ok(Value::Scalar { kind, bytes })
}

/// Parses the name of a file or tensor.
fn place(text: &str) -> Result<Place, ValueError> {
    const SUFFIX: &str = ".safetensors";
    if let Some(at) = text.find(".safetensors#") {
        let (path, name) = (&text[..at + SUFFIX.len()], &text[at + SUFFIX.len() + 1..]);
        if name.is_empty() {
            return error(text, "a tensor name must follow `#`");
        }
        return Ok(Place::Tensor(path.into(), name.into()));
    }
    if text.ends_with(SUFFIX) {
        return error(text, "a tensor name is missing: FILE.safetensors#NAME");
    }
    if text.is_empty() {
        return error(text, "a file name is missing");
    }
    Ok(Place::Raw(text.into()))
}

/// Parses the destination of an output.
fn target(text: &str) -> Result<Place, ValueError> {
    if text == "-" {
        return Ok(Place::Print);
    }
    place(text)
}

/// The element types that buffers can be declared with.
const DTYPES: [(&str, Dtype); 13] = [
    ("i8", Dtype::I8),
    ("u8", Dtype::U8),
    ("i16", Dtype::I16),
    ("u16", Dtype::U16),
    ("i32", Dtype::I32),
    ("u32", Dtype::U32),
    ("i64", Dtype::I64),
    ("u64", Dtype::U64),
    ("f16", Dtype::F16),
    ("bf16", Dtype::BF16),
    ("f32", Dtype::F32),
    ("f64", Dtype::F64),
    ("bool", Dtype::BOOL),
];

/// Bytes, or an element type with dimensions: `4096`, `0x1000`, `f32[16,64]`.
fn shape(text: &str) -> Result<Shape, ValueError> {
    const SYNTAX: &str = "expected a size: BYTES, or TYPE[DIM,..] such as f32[16,64]";
    let natural = |text: &str| {
        let value = integer(text.trim())?;
        usize::try_from(value)
            .ok()
            .filter(|n| *n <= isize::MAX as usize)
    };
    let Some((name, dims)) = text.split_once('[') else {
        let Some(bytes) = natural(text) else {
            return error(text, SYNTAX);
        };
        return Ok(Shape {
            dtype: Dtype::U8,
            dims: vec![bytes],
            bytes,
        });
    };
    let dtype = DTYPES.iter().find(|(n, _)| *n == name);
    let dims: Option<Vec<usize>> = dims
        .strip_suffix(']')
        .and_then(|dims| dims.split(',').map(natural).collect());
    let (Some(&(_, dtype)), Some(dims)) = (dtype, dims) else {
        return error(text, SYNTAX);
    };
    let bytes = dims
        .iter()
        .try_fold(dtype.bitsize() / 8, |n, d| n.checked_mul(*d))
        .filter(|n| *n <= isize::MAX as usize);
    match bytes {
        Some(bytes) => Ok(Shape { dtype, dims, bytes }),
        None => error(text, "the size overflows"),
    }
}

impl Value {
    /// Alignment in bytes.
    pub fn align(&self) -> usize {
        match self {
            Value::Scalar { bytes, .. } => bytes.len(),
            Value::Null | Value::Buffer(_) => 8,
            Value::Bytes(_) => 1,
            Value::Struct(fields) => fields.iter().map(Value::align).max().unwrap_or(1),
        }
    }

    /// Appends the bytes of the value, aligned. `addresses[i]` is the address of buffer `i`.
    pub fn lower(&self, addresses: &[u64], to: &mut Vec<u8>) {
        to.resize(to.len().next_multiple_of(self.align()), 0);
        match self {
            Value::Scalar { bytes, .. } | Value::Bytes(bytes) => to.extend(bytes),
            Value::Null => to.extend([0; 8]),
            Value::Buffer(i) => to.extend(addresses[*i].to_le_bytes()),
            Value::Struct(fields) => {
                // Alignment counts from the start of the struct, which is aligned itself.
                let mut body = Vec::new();
                for field in fields {
                    field.lower(addresses, &mut body);
                }
                body.resize(body.len().next_multiple_of(self.align()), 0);
                to.extend(body);
            }
        }
    }

    /// Kind of the value, for an error.
    pub fn describe(&self) -> &'static str {
        match self {
            Value::Scalar { kind, .. } => kind,
            Value::Null => "null",
            Value::Buffer(_) => "a buffer",
            Value::Bytes(_) => "hex",
            Value::Struct(_) => "the struct",
        }
    }
}
