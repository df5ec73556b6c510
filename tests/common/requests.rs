//! Requests that are to be refused: tensors at addresses, and with owners, that a valid one does not have.

use deltawave::batch::PerSequence;
use deltawave::error::ArgumentKind;
use deltawave::runtime::{Backend, Context};
use deltawave::tensor::{Buffer, Element, Tensor, TensorMut, dense_strides};
use deltawave::types::Dtype;
use deltawave::{ArgumentError, Error};

/// A tensor of a request.
#[derive(Clone, Copy)]
pub struct View<const R: usize> {
    pub dtype: Dtype,
    pub shape: [usize; R],
    pub strides: [usize; R],
    /// Bytes from the buffer's start; none: a null pointer.
    pub at: Option<usize>,
    /// Whether it is of another context.
    pub foreign: bool,
}

/// A dense one in bf16.
pub fn view<const R: usize>(shape: [usize; R]) -> View<R> {
    View {
        dtype: Dtype::Bf16,
        shape,
        strides: dense_strides(shape),
        at: Some(0),
        foreign: false,
    }
}

/// Where the tensors of requests lie, all at one place: what is refused is never read or written.
pub struct Memory {
    pub own: Buffer<u8>,
    pub foreign: Buffer<u8>,
}

impl Memory {
    pub fn new(context: &Context) -> Self {
        let other = Context::new(Backend::Auto, 0).unwrap();
        Memory {
            own: context.upload(&vec![0; 1 << 20]).unwrap(),
            foreign: other.alloc(1 << 20).unwrap(),
        }
    }

    pub fn tensor<const R: usize>(&self, v: View<R>) -> Tensor<'_, R> {
        if v.foreign {
            let foreign = self.foreign.tensor_of(v.dtype, v.shape, v.strides, 0);
            return foreign.expect("within the buffer");
        }
        let base = self.own.address().cast_const();
        let address =
            v.at.map_or(std::ptr::null(), |at| base.wrapping_byte_add(at));
        // SAFETY: what is refused is never read.
        unsafe { Tensor::from_raw(address, v.dtype, v.shape, v.strides) }
    }

    pub fn tensor_mut<const R: usize>(&self, v: View<R>) -> TensorMut<'_, R> {
        let base = self.own.address();
        let address =
            v.at.map_or(std::ptr::null_mut(), |at| base.wrapping_byte_add(at));
        // SAFETY: as above.
        unsafe { TensorMut::from_raw(address, v.dtype, v.shape, v.strides) }
    }

    /// So many of a sequence.
    pub fn per_sequence<T: Element>(&self, n: usize) -> PerSequence<'_, T> {
        // SAFETY: as above.
        unsafe { PerSequence::from_raw(self.own.address().cast_const().cast(), n) }
    }
}

/// That it was refused, by this argument's name.
#[track_caller]
pub fn expect<T>(outcome: Result<T, Error>, argument: &str, kind: ArgumentKind) {
    match outcome {
        Err(Error::Argument(ArgumentError {
            argument: a,
            kind: k,
            was,
            allowed,
        })) => {
            assert_eq!((a.as_str(), k), (argument, kind), "{was}; {allowed}");
            assert!(!was.is_empty() && !allowed.is_empty());
        }
        Err(other) => panic!("{argument}: {other}"),
        Ok(_) => panic!("{argument}: accepted"),
    }
}
