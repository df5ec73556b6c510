//! Tensors on the device.

use deltawave::runtime::{Context, Stream};
use deltawave::tensor::{Buffer, Tensor, TensorMut, dense_strides};
use deltawave::types::{Dtype, StateLayout};
use deltawave_lab::inputs::Tensor as HostTensor;

/// A result of the library.
pub type Fallible<T> = deltawave::Result<T>;

/// A dense tensor's memory on the device, and its element type.
pub struct DeviceTensor {
    /// Its bytes.
    pub buffer: Buffer<u8>,
    dtype: Dtype,
}

impl DeviceTensor {
    /// A copy of a tensor of the host.
    pub fn copy(context: &Context, t: &HostTensor) -> Fallible<Self> {
        Ok(DeviceTensor {
            buffer: context.upload(&t.bytes)?,
            dtype: t.dtype,
        })
    }

    /// A copy of a tensor that may be absent.
    pub fn copy_some(context: &Context, t: Option<&HostTensor>) -> Fallible<Option<Self>> {
        t.map(|t| Self::copy(context, t)).transpose()
    }

    /// Memory for so many elements.
    pub fn empty(context: &Context, dtype: Dtype, elements: usize) -> Fallible<Self> {
        Ok(DeviceTensor {
            buffer: context.alloc(elements * dtype.size())?,
            dtype,
        })
    }

    /// A view of all of it.
    pub fn view<const N: usize>(&self, shape: [usize; N]) -> Fallible<Tensor<'_, N>> {
        (self.buffer).tensor_of(self.dtype, shape, dense_strides(shape), 0)
    }

    /// A view of all of it, to be written to.
    pub fn view_mut<const N: usize>(&mut self, shape: [usize; N]) -> Fallible<TensorMut<'_, N>> {
        (self.buffer).tensor_of_mut(self.dtype, shape, dense_strides(shape), 0)
    }

    /// Makes every element NaN, so that one that a kernel does not write shows.
    pub fn poison(&mut self, stream: &Stream) -> Fallible<()> {
        self.buffer.fill_bytes(0xff, stream)
    }

    /// A copy on the host.
    pub fn read(&self, stream: &Stream) -> Fallible<HostTensor> {
        let bytes = self.buffer.download(stream)?;
        Ok(HostTensor::from_bytes(self.dtype, bytes))
    }
}

/// Recurrent states: how many, of which heads and dimensions, and how they lie in memory.
#[derive(Clone, Copy)]
pub struct States {
    pub count: usize,
    pub heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    pub layout: StateLayout,
}

impl States {
    /// Their shape in memory.
    pub fn shape(&self) -> [usize; 4] {
        let [rows, columns] = match self.layout {
            StateLayout::KeyMajor => [self.key_dim, self.value_dim],
            StateLayout::ValueMajor => [self.value_dim, self.key_dim],
        };
        [self.count, self.heads, rows, columns]
    }

    /// Elements of one of them.
    pub fn each(&self) -> usize {
        self.heads * self.key_dim * self.value_dim
    }

    /// From `[.., K, V]` to their layout, as elements of a type.
    pub fn laid_out(&self, t: &HostTensor, dtype: Dtype) -> HostTensor {
        let (k, v) = (self.key_dim, self.value_dim);
        HostTensor::new(dtype, self.layout.from_key_major(&t.values, k, v))
    }

    /// From their layout to `[.., K, V]`.
    pub fn key_major(&self, t: &HostTensor) -> HostTensor {
        let (k, v) = (self.key_dim, self.value_dim);
        HostTensor::new(t.dtype, self.layout.to_key_major(&t.values, k, v))
    }
}
