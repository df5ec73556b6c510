//! Tensors in poisoned memory of their own.

use deltawave::runtime::{Context, Stream};
use deltawave::tensor::{Buffer, Tensor, TensorMut, dense_strides};
use deltawave::types::Dtype;
use deltawave_lab::inputs::Tensor as HostTensor;
use deltawave_lab::metrics::{compare, rounding_ratio};

/// A tensor on the device. Memory between its elements is poisoned and must stay so.
pub struct Placed<const R: usize> {
    pub dtype: Dtype,
    pub shape: [usize; R],
    pub strides: [usize; R],
    pub offset: usize,
    before: Vec<u8>,
    pub buffer: Buffer<u8>,
}

/// Strides of a tensor with `pad` more elements after each row of each dimension but the last.
pub fn padded<const R: usize>(shape: [usize; R], pad: usize) -> [usize; R] {
    let mut strides = dense_strides(shape);
    for i in (0..R - 1).rev() {
        strides[i] = strides[i + 1] * shape[i + 1].max(1) + pad;
    }
    strides
}

impl<const R: usize> Placed<R> {
    /// Indices in memory of all elements, in order.
    fn places(&self) -> Vec<usize> {
        let mut places = vec![self.offset];
        for (n, stride) in self.shape.into_iter().zip(self.strides) {
            places = (places.iter())
                .flat_map(|at| (0..n).map(move |i| at + i * stride))
                .collect();
        }
        places
    }

    /// A tensor of these values, with strides that may be 0: then of as many values as there are places.
    pub fn new(
        context: &Context,
        t: &HostTensor,
        shape: [usize; R],
        strides: [usize; R],
        offset: usize,
    ) -> Self {
        let mut placed = Self::poisoned(context, t.dtype, shape, strides, offset);
        let size = t.dtype.size();
        for (i, at) in placed.places().into_iter().enumerate() {
            let element = &t.bytes[i * size..(i + 1) * size];
            placed.before[at * size..(at + 1) * size].copy_from_slice(element);
        }
        placed.buffer.write(&placed.before).unwrap();
        placed
    }

    pub fn poisoned(
        context: &Context,
        dtype: Dtype,
        shape: [usize; R],
        strides: [usize; R],
        offset: usize,
    ) -> Self {
        let last: usize = (shape.into_iter().zip(strides))
            .map(|(n, stride)| n.saturating_sub(1) * stride)
            .sum();
        let before = vec![0xff; (offset + last + 5) * dtype.size()];
        Placed {
            dtype,
            shape,
            strides,
            offset,
            buffer: context.upload(&before).unwrap(),
            before,
        }
    }

    pub fn tensor(&self) -> Tensor<'_, R> {
        let (shape, strides) = (self.shape, self.strides);
        let view = self
            .buffer
            .tensor_of(self.dtype, shape, strides, self.offset);
        view.unwrap()
    }

    pub fn tensor_mut(&mut self) -> TensorMut<'_, R> {
        let (shape, strides) = (self.shape, self.strides);
        let view = (self.buffer).tensor_of_mut(self.dtype, shape, strides, self.offset);
        view.unwrap()
    }

    /// Poisons it again.
    pub fn poison(&mut self, stream: &Stream) {
        self.before.fill(0xff);
        self.buffer.fill_bytes(0xff, stream).unwrap();
    }

    /// Its values. Nothing else was written.
    pub fn read(&self, stream: &Stream) -> HostTensor {
        let (size, mut bytes) = (self.dtype.size(), self.buffer.download(stream).unwrap());
        let mut dense = Vec::new();
        for at in self.places() {
            let element = &mut bytes[at * size..(at + 1) * size];
            dense.extend_from_slice(element);
            element.fill(0xff);
        }
        assert!(bytes.iter().all(|b| *b == 0xff), "written outside");
        HostTensor::from_bytes(self.dtype, dense)
    }

    /// Nothing was written to it.
    pub fn assert_same(&self, name: &str, stream: &Stream) {
        let same = self.buffer.download(stream).unwrap() == self.before;
        assert!(same, "{name} was written to");
    }
}

/// Fails if a gradient's rms error is more than rounding to its type gives, or than `floor`.
#[track_caller]
pub fn assert_close(
    name: &str,
    found: &HostTensor,
    exact: &[f64],
    floor: f64,
    what: &dyn Fn() -> String,
) {
    assert_eq!(found.values.len(), exact.len(), "{name}");
    if exact.iter().all(|x| *x == 0.0) {
        let zeros = found.values.iter().all(|x| *x == 0.0);
        assert!(zeros, "{name}: not zeros: {}", what());
        return;
    }
    let error = compare(&found.values, exact).rms_ratio;
    let limit = match found.dtype {
        Dtype::F32 => floor,
        dtype => (1.02 * rounding_ratio(exact, dtype)).max(floor),
    };
    assert!(
        error <= limit,
        "{name}: {error:.2e} above {limit:.2e}: {}",
        what()
    );
}
