//! Where the elements of tensors lie in device memory: strides, gaps, poison between them.

use deltawave::runtime::Context;
use deltawave::tensor::{Buffer, TokenScalars, Tokens, TokensMut};
use deltawave::types::Dtype;
use deltawave_lab::inputs::Tensor as HostTensor;

use super::{Case, Entry, Layout, StateKind};

/// Where the elements of `[T, H, D]` lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placement {
    pub(super) strides: [usize; 3],
    pub(super) offset: usize,
    pub(super) elements: usize,
    /// Rows of a sequence of a dense batch, and elements from such a sequence to the next.
    pub(super) batch: (usize, usize),
}

impl Placement {
    pub(super) fn at(&self, token: usize, head: usize) -> usize {
        let (rows, sequence) = self.batch;
        self.offset
            + token % rows * self.strides[0]
            + token / rows * sequence
            + head * self.strides[1]
    }
}

pub(super) fn place(case: &Case, [t, h, d]: [usize; 3]) -> Placement {
    let dense = dense_of(case);
    let (rows, gap) = dense.map_or((usize::MAX, 0), |[_, n]| (n.max(1), case.batch_gap));
    let (strides, offset) = match case.layout {
        Layout::Dense => ([h * d, d, 1], 0),
        Layout::Padded(head, token, front) => ([h * (d + head) + token, d + head, 1], front),
        Layout::HeadMajor => ([d, t * d + t / rows * gap, 1], 0),
        Layout::TokenMajor => ([dense.map_or(1, |[b, _]| b) * h * d, d, 1], 0),
    };
    let batch = match (dense, case.layout) {
        (None, _) => (rows, 0),
        (Some(_), Layout::TokenMajor) => (rows, h * d),
        (Some([_, n]), _) => (rows, n * strides[0] + gap),
    };
    let mut out = Placement {
        strides,
        offset,
        elements: offset + 7,
        batch,
    };
    if t * h * d > 0 {
        out.elements = out.at(t - 1, h - 1) + d + 7;
    }
    out
}

/// Spreads dense elements over a buffer that is NaN everywhere else.
pub(super) fn spread(dense: &[u8], size: usize, [t, h, d]: [usize; 3], p: Placement) -> Vec<u8> {
    let mut out = vec![0xff; p.elements * size];
    for i in 0..t {
        for j in 0..h {
            let from = (i * h + j) * d * size;
            let to = p.at(i, j) * size;
            out[to..to + d * size].copy_from_slice(&dense[from..from + d * size]);
        }
    }
    out
}

/// The reverse of [`spread`]; what lies between must still be 0xff.
pub(super) fn gather(
    name: &str,
    mut bytes: Vec<u8>,
    size: usize,
    [t, h, d]: [usize; 3],
    p: Placement,
) -> Vec<u8> {
    let mut out = vec![0; t * h * d * size];
    for i in 0..t {
        for j in 0..h {
            let to = (i * h + j) * d * size;
            let from = p.at(i, j) * size;
            out[to..to + d * size].copy_from_slice(&bytes[from..from + d * size]);
            bytes[from..from + d * size].fill(0xff);
        }
    }
    assert!(
        bytes.iter().all(|b| *b == 0xff),
        "{name}: bytes outside of the tensor were written"
    );
    out
}

pub(super) struct OnDevice {
    pub(super) buffer: Buffer<u8>,
    pub(super) dtype: Dtype,
    pub(super) shape: [usize; 3],
    pub(super) place: Placement,
    pub(super) dense: Option<[usize; 2]>,
}

impl OnDevice {
    pub(super) fn new(
        context: &Context,
        case: &Case,
        tensor: &HostTensor,
        shape: [usize; 3],
    ) -> Self {
        let place = place(case, shape);
        let buffer = context
            .upload(&spread(&tensor.bytes, tensor.dtype.size(), shape, place))
            .expect("memory");
        OnDevice {
            buffer,
            dtype: tensor.dtype,
            shape,
            place,
            dense: dense_of(case),
        }
    }

    pub(super) fn poisoned(
        context: &Context,
        case: &Case,
        dtype: Dtype,
        shape: [usize; 3],
    ) -> Self {
        let place = place(case, shape);
        let buffer = context
            .upload(&vec![0xff; place.elements * dtype.size()])
            .expect("memory");
        OnDevice {
            buffer,
            dtype,
            shape,
            place,
            dense: dense_of(case),
        }
    }

    pub(super) fn rank4(&self) -> ([usize; 4], [usize; 4]) {
        let ([_, h, d], [st, sh, sd]) = (self.shape, self.place.strides);
        let [b, n] = self.dense.expect("a dense batch");
        ([b, n, h, d], [self.place.batch.1, st, sh, sd])
    }

    pub(super) fn tokens(&self) -> Tokens<'_> {
        let p = self.place;
        if self.dense.is_some() {
            let (shape, strides) = self.rank4();
            return self
                .buffer
                .tensor_of(self.dtype, shape, strides, p.offset)
                .expect("in range")
                .into();
        }
        self.buffer
            .tensor_of(self.dtype, self.shape, p.strides, p.offset)
            .expect("in range")
            .into()
    }

    pub(super) fn tokens_mut(&mut self) -> TokensMut<'_> {
        let p = self.place;
        if self.dense.is_some() {
            let (shape, strides) = self.rank4();
            return self
                .buffer
                .tensor_of_mut(self.dtype, shape, strides, p.offset)
                .expect("in range")
                .into();
        }
        self.buffer
            .tensor_of_mut(self.dtype, self.shape, p.strides, p.offset)
            .expect("in range")
            .into()
    }

    pub(super) fn scalars(&self) -> TokenScalars<'_> {
        let ([t, h, _], [st, sh, _]) = (self.shape, self.place.strides);
        if let Some([b, n]) = self.dense {
            let strides = [self.place.batch.1, st, sh];
            return self
                .buffer
                .tensor_of(self.dtype, [b, n, h], strides, self.place.offset)
                .expect("in range")
                .into();
        }
        self.buffer
            .tensor_of(self.dtype, [t, h], [st, sh], self.place.offset)
            .expect("in range")
            .into()
    }
}

pub(super) fn dense_of(case: &Case) -> Option<[usize; 2]> {
    (case.entry == Entry::Dense).then(|| {
        [
            case.lengths.len(),
            case.lengths.first().copied().unwrap_or(0),
        ]
    })
}

/// Where the elements of a state tensor lie, as rows of its last dimension.
pub(super) fn state_place(kind: StateKind, [n, h, r, c]: [usize; 4]) -> ([usize; 3], Placement) {
    let row = c + kind.pad;
    let strides = [row, c, 1];
    (
        [n * h * r, 1, c],
        Placement {
            strides,
            offset: 0,
            elements: n * h * r * row + 5,
            batch: (usize::MAX, 0),
        },
    )
}
