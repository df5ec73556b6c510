//! Device buffers: filled from files before a launch, written to files after it.

use std::alloc::Layout;
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use deltawave_sim::memory::Extent;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use thiserror::Error;

use crate::value::{Buffer, Content, Place, Shape};

/// Reason why a buffer cannot be filled or written.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum BufferError {
    #[error("{}", path.display())]
    Io {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{}: not a safetensors file", path.display())]
    Format {
        path: PathBuf,
        source: SafeTensorError,
    },
    #[error("{}: there is no tensor `{name}`, only {}", path.display(), list(present))]
    NoTensor {
        path: PathBuf,
        name: String,
        present: Vec<String>,
    },
    #[error("no memory for a buffer of {bytes} bytes")]
    OutOfMemory { bytes: usize },
    #[error("two arguments are written to {place}")]
    TwiceWritten { place: Place },
}

fn list(names: &[String]) -> String {
    match names {
        [] => "none".into(),
        names => names.join(", "),
    }
}

/// `bytes` zeros. The system commits only the pages that are touched.
fn zeros(bytes: usize) -> Option<Vec<u8>> {
    let layout = Layout::array::<u8>(bytes).ok().filter(|l| l.size() > 0)?;
    // SAFETY: the layout has a size that is not zero.
    let start = unsafe { std::alloc::alloc_zeroed(layout) };
    // SAFETY: a vector of bytes has this layout, and all of them are initialised.
    (!start.is_null()).then(|| unsafe { Vec::from_raw_parts(start, bytes, bytes) })
}

/// Alignment of device memory in bytes, the same as hipMalloc's.
const ALIGN: usize = 256;

/// A buffer in host memory at a fixed, aligned address.
pub struct Filled {
    /// Element type and dimensions; bytes if the type is not known.
    pub shape: Shape,
    memory: Vec<u8>,
    start: usize,
}

impl Filled {
    /// Allocates and fills a buffer.
    pub fn new(content: &Content) -> Result<Filled, BufferError> {
        match content {
            Content::Zeros(shape) => Filled::with(shape.clone(), 0),
            Content::Poison(shape) => Filled::with(shape.clone(), 0xff),
            Content::File(Place::Tensor(path, name)) => {
                let bytes = read(path)?;
                let view = tensor(path, &bytes, name)?;
                let shape = Shape {
                    dtype: view.dtype(),
                    dims: view.shape().to_vec(),
                    bytes: view.data().len(),
                };
                Filled::from(shape, view.data())
            }
            Content::File(Place::Raw(path)) => {
                let bytes = read(path)?;
                let shape = Shape {
                    dtype: Dtype::U8,
                    dims: vec![bytes.len()],
                    bytes: bytes.len(),
                };
                Filled::from(shape, &bytes)
            }
            Content::File(Place::Print) => unreachable!("only outputs are printed"),
        }
    }

    fn with(shape: Shape, value: u8) -> Result<Filled, BufferError> {
        let bytes = shape.bytes;
        let room = bytes.saturating_add(ALIGN);
        let mut memory = zeros(room).ok_or(BufferError::OutOfMemory { bytes })?;
        if value != 0 {
            memory.fill(value);
        }
        let start = memory.as_ptr().addr().next_multiple_of(ALIGN) - memory.as_ptr().addr();
        Ok(Filled {
            shape,
            memory,
            start,
        })
    }

    fn from(shape: Shape, data: &[u8]) -> Result<Filled, BufferError> {
        let mut filled = Filled::with(shape, 0)?;
        let start = filled.start;
        filled.memory[start..start + data.len()].copy_from_slice(data);
        Ok(filled)
    }

    /// Address range. Kernels may write there as long as no reference is taken from [`Filled::data`].
    pub fn extent(&mut self) -> Extent {
        let start = self.memory.as_mut_ptr().expose_provenance() as u64 + self.start as u64;
        Extent {
            start,
            end: start + self.shape.bytes as u64,
        }
    }

    /// Bytes of the buffer.
    pub fn data(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.shape.bytes]
    }
}

fn read(path: &Path) -> Result<Vec<u8>, BufferError> {
    std::fs::read(path).map_err(|source| BufferError::Io {
        path: path.into(),
        source,
    })
}

/// Tensor `name` of the safetensors file `bytes`; `path` is for errors.
pub fn tensor<'a>(path: &Path, bytes: &'a [u8], name: &str) -> Result<TensorView<'a>, BufferError> {
    let file = SafeTensors::deserialize(bytes).map_err(|source| BufferError::Format {
        path: path.into(),
        source,
    })?;
    file.tensor(name).map_err(|source| match source {
        SafeTensorError::TensorNotFound(_) => {
            let mut present: Vec<String> = file.names().into_iter().map(String::from).collect();
            present.sort();
            BufferError::NoTensor {
                path: path.into(),
                name: name.into(),
                present,
            }
        }
        source => BufferError::Format {
            path: path.into(),
            source,
        },
    })
}

/// Refuses outputs that would overwrite each other.
pub fn check_outputs(buffers: &[Buffer]) -> Result<(), BufferError> {
    let mut seen = HashSet::new();
    for place in buffers.iter().filter_map(|b| b.output.as_ref()) {
        if *place != Place::Print && !seen.insert(place) {
            let place = place.clone();
            return Err(BufferError::TwiceWritten { place });
        }
    }
    Ok(())
}

/// Writes the outputs to their files.
pub fn write(buffers: &[Buffer], filled: &[Filled]) -> Result<(), BufferError> {
    let mut files: BTreeMap<&Path, Vec<(&str, TensorView)>> = BTreeMap::new();
    for (buffer, filled) in buffers.iter().zip(filled) {
        match &buffer.output {
            Some(Place::Raw(path)) => {
                std::fs::write(path, filled.data()).map_err(|source| BufferError::Io {
                    path: path.clone(),
                    source,
                })?;
            }
            Some(Place::Tensor(path, name)) => {
                let (dtype, dims) = (filled.shape.dtype, filled.shape.dims.clone());
                let view = TensorView::new(dtype, dims, filled.data()).map_err(|source| {
                    BufferError::Format {
                        path: path.clone(),
                        source,
                    }
                })?;
                files.entry(path).or_default().push((name, view));
            }
            Some(Place::Print) | None => {}
        }
    }
    for (path, tensors) in files {
        let bytes =
            safetensors::serialize(tensors, None).map_err(|source| BufferError::Format {
                path: path.into(),
                source,
            })?;
        std::fs::write(path, bytes).map_err(|source| BufferError::Io {
            path: path.into(),
            source,
        })?;
    }
    Ok(())
}
