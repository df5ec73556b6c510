//! Tensors on the device: an operation lists its [`Slots`], and everything else follows from the list.

use std::borrow::Cow;
use std::collections::BTreeMap;

use deltawave::model::Heads;
use deltawave::runtime::{Context, Stream};
use deltawave::tensor::dense_strides;
use deltawave::tensor::{Buffer, Tensor, TensorMut, TokenScalars, Tokens, TokensMut};
use deltawave::types::{Dtype, StateLayout};
use deltawave_lab::inputs::Tensor as HostTensor;

/// A result of the library.
pub type Fallible<T> = deltawave::Result<T>;

/// Outputs of a run, by name.
pub type Results = BTreeMap<&'static str, HostTensor>;

/// The tensors of an operation.
#[derive(Default)]
pub struct Slots<'a> {
    tensors: Vec<(&'static str, Dtype, Before<'a>)>,
    /// One byte per sequence: whether it starts from its state.
    starts: Vec<u8>,
    workspace_bytes: usize,
}

/// Contents of a tensor before a run.
enum Before<'a> {
    /// These bytes, which a run does not change.
    Input(Cow<'a, [u8]>),
    /// These bytes, which a run may change.
    InPlace(Vec<u8>),
    /// Nothing: so many elements.
    Output(usize),
}

impl<'a> Slots<'a> {
    /// No tensors yet.
    pub fn new(workspace_bytes: usize) -> Self {
        Slots {
            workspace_bytes,
            ..Default::default()
        }
    }

    /// Says for all sequences whether they start from their states.
    pub fn starts(mut self, sequences: usize, from_states: bool) -> Self {
        self.starts = vec![u8::from(from_states); sequences];
        self
    }

    pub fn input(self, name: &'static str, t: &'a HostTensor) -> Self {
        self.input_some(name, Some(t))
    }

    pub fn input_some(mut self, name: &'static str, t: Option<&'a HostTensor>) -> Self {
        let tensor = t.map(|t| (name, t.dtype, Before::Input(t.bytes[..].into())));
        self.tensors.extend(tensor);
        self
    }

    /// An input that is made for the device.
    pub fn made(self, name: &'static str, t: HostTensor) -> Self {
        self.made_some(name, Some(t))
    }

    pub fn made_some(mut self, name: &'static str, t: Option<HostTensor>) -> Self {
        let tensor = t.map(|t| (name, t.dtype, Before::Input(t.bytes.into())));
        self.tensors.extend(tensor);
        self
    }

    pub fn in_place(mut self, name: &'static str, dtype: Dtype, before: Vec<u8>) -> Self {
        self.tensors.push((name, dtype, Before::InPlace(before)));
        self
    }

    pub fn output(mut self, name: &'static str, dtype: Dtype, elements: usize) -> Self {
        self.tensors.push((name, dtype, Before::Output(elements)));
        self
    }
}

/// The tensors of an operation on the device.
pub struct Device {
    tensors: BTreeMap<&'static str, DeviceTensor>,
    starts: Buffer<u8>,
    workspace: Buffer<u8>,
}

/// A dense tensor's memory on the device, and its element type.
struct DeviceTensor {
    buffer: Buffer<u8>,
    dtype: Dtype,
    written: bool,
    /// Contents before a run, for tensors that a run may change.
    before: Option<Vec<u8>>,
}

impl Device {
    /// Copies the inputs to the device, and makes room for the rest.
    pub fn new(context: &Context, slots: Slots) -> Fallible<Self> {
        let tensor = |(name, dtype, before): (_, Dtype, Before)| {
            let written = !matches!(before, Before::Input(_));
            let (buffer, before) = match before {
                Before::Input(bytes) => (context.upload(&bytes)?, None),
                Before::InPlace(bytes) => (context.alloc(bytes.len())?, Some(bytes)),
                Before::Output(n) => (context.alloc(n * dtype.size())?, None),
            };
            let tensor = DeviceTensor {
                buffer,
                dtype,
                written,
                before,
            };
            Ok((name, tensor))
        };
        Ok(Device {
            tensors: (slots.tensors.into_iter().map(tensor)).collect::<Fallible<_>>()?,
            starts: context.upload(&slots.starts)?,
            workspace: context.alloc(slots.workspace_bytes)?,
        })
    }

    /// Brings states to where a run starts, and makes everything else that kernels write NaN, so that an element that
    /// none writes shows.
    pub fn reset(&mut self, stream: &Stream) -> Fallible<()> {
        self.workspace.fill_bytes(0xff, stream)?;
        for tensor in self.tensors.values_mut().filter(|t| t.written) {
            tensor.buffer.fill_bytes(0xff, stream)?;
        }
        stream.synchronize()?;
        for tensor in self.tensors.values_mut() {
            if let Some(before) = &tensor.before {
                tensor.buffer.write(before)?;
            }
        }
        Ok(())
    }

    /// Copies what kernels write to the host.
    pub fn read(&self, stream: &Stream) -> Fallible<Results> {
        let written = self.tensors.iter().filter(|(_, t)| t.written);
        let read = |(name, t): (&&'static str, &DeviceTensor)| {
            let bytes = t.buffer.download(stream)?;
            Ok((*name, HostTensor::from_bytes(t.dtype, bytes)))
        };
        written.map(read).collect()
    }

    /// Everything that a launch takes.
    pub fn views(&mut self) -> Views<'_> {
        Views {
            tensors: (self.tensors.iter_mut().map(|(name, t)| (*name, t))).collect(),
            starts: &self.starts,
            workspace: &mut self.workspace,
        }
    }
}

/// Rows of tokens: of a packed batch, or `B` and `T` of a dense one.
#[derive(Clone, Copy)]
pub enum Rows {
    Packed(usize),
    Dense([usize; 2]),
}

/// The tensors of a launch; each is taken once.
pub struct Views<'a> {
    tensors: BTreeMap<&'static str, &'a mut DeviceTensor>,
    pub starts: &'a Buffer<u8>,
    pub workspace: &'a mut Buffer<u8>,
}

impl<'a> Views<'a> {
    /// Whether the operation has such a tensor.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    fn take(&mut self, name: &str) -> &'a mut DeviceTensor {
        let tensor = self.tensors.remove(name);
        tensor.expect("an operation takes each tensor of its list once")
    }

    /// The memory of a tensor, if there is such a tensor, for views of parts of it.
    pub fn buffer(&mut self, name: &str) -> Option<(&'a mut Buffer<u8>, Dtype)> {
        let tensor = self.tensors.remove(name)?;
        Some((&mut tensor.buffer, tensor.dtype))
    }

    /// A view of all of a tensor.
    pub fn get<const N: usize>(
        &mut self,
        name: &str,
        shape: [usize; N],
    ) -> Fallible<Tensor<'a, N>> {
        let t = self.take(name);
        (t.buffer).tensor_of(t.dtype, shape, dense_strides(shape), 0)
    }

    /// A view of a tensor that may be absent.
    pub fn get_some<const N: usize>(
        &mut self,
        name: &str,
        shape: [usize; N],
    ) -> Fallible<Option<Tensor<'a, N>>> {
        let has = self.has(name);
        has.then(|| self.get(name, shape)).transpose()
    }

    /// A view of all of a tensor, to be written to.
    pub fn get_mut<const N: usize>(
        &mut self,
        name: &str,
        shape: [usize; N],
    ) -> Fallible<TensorMut<'a, N>> {
        let t = self.take(name);
        (t.buffer).tensor_of_mut(t.dtype, shape, dense_strides(shape), 0)
    }

    /// The same, of a tensor that may be absent.
    pub fn get_some_mut<const N: usize>(
        &mut self,
        name: &str,
        shape: [usize; N],
    ) -> Fallible<Option<TensorMut<'a, N>>> {
        let has = self.has(name);
        has.then(|| self.get_mut(name, shape)).transpose()
    }

    /// Rows of heads of so many elements.
    pub fn tokens(&mut self, name: &str, rows: Rows, [h, d]: [usize; 2]) -> Fallible<Tokens<'a>> {
        Ok(match rows {
            Rows::Packed(n) => self.get(name, [n, h, d])?.into(),
            Rows::Dense([b, n]) => self.get(name, [b, n, h, d])?.into(),
        })
    }

    /// The same, to be written to.
    pub fn tokens_mut(
        &mut self,
        name: &str,
        rows: Rows,
        [h, d]: [usize; 2],
    ) -> Fallible<TokensMut<'a>> {
        Ok(match rows {
            Rows::Packed(n) => self.get_mut(name, [n, h, d])?.into(),
            Rows::Dense([b, n]) => self.get_mut(name, [b, n, h, d])?.into(),
        })
    }

    /// Rows of one number for each head.
    pub fn scalars(&mut self, name: &str, rows: Rows, heads: usize) -> Fallible<TokenScalars<'a>> {
        Ok(match rows {
            Rows::Packed(n) => self.get(name, [n, heads])?.into(),
            Rows::Dense([b, n]) => self.get(name, [b, n, heads])?.into(),
        })
    }
}

/// Recurrent states: how many, of which heads, and how they lie in memory.
#[derive(Clone, Copy)]
pub struct States {
    pub count: usize,
    pub heads: Heads,
    pub layout: StateLayout,
}

impl States {
    /// Their shape in memory.
    pub fn shape(&self) -> [usize; 4] {
        let (k, v) = (self.heads.key_dim, self.heads.value_dim);
        let [rows, columns] = match self.layout {
            StateLayout::KeyMajor => [k, v],
            StateLayout::ValueMajor => [v, k],
        };
        [self.count, self.heads.value, rows, columns]
    }

    /// Elements of all of them.
    pub fn elements(&self) -> usize {
        self.shape().iter().product()
    }

    /// From `[.., K, V]` to their layout, as elements of a type.
    pub fn laid_out(&self, t: &HostTensor, dtype: Dtype) -> HostTensor {
        let (k, v) = (self.heads.key_dim, self.heads.value_dim);
        HostTensor::new(dtype, self.layout.from_key_major(&t.values, k, v))
    }

    /// From their layout to `[.., K, V]`.
    pub fn key_major(&self, t: &HostTensor) -> HostTensor {
        let (k, v) = (self.heads.key_dim, self.heads.value_dim);
        HostTensor::new(t.dtype, self.layout.to_key_major(&t.values, k, v))
    }
}
