//! Descriptions of tensors for the copy engine of NVIDIA GPUs (TMA, Tensor Memory Accelerator), which copies boxes of them.

use core::ffi::{c_uint, c_void};

use super::state::entered;

/// A tensor in device memory, of which a kernel copies boxes to or from shared memory (`cp.async.bulk.tensor`, of compute
/// capability 9.0).
#[derive(Clone, Copy, Debug)]
pub struct BoxedTensor {
    /// Bytes of an element: 2 or 4.
    pub element_bytes: u32,
    /// Device address of the first element, a multiple of 16.
    pub address: *const c_void,
    /// Elements of each dimension, from 1 to 2^32. The first one is contiguous. A copy gives zeros for elements past the end.
    pub dimensions: [u64; 4],
    /// Bytes from an element to the next of the second, third and fourth dimension: multiples of 16 below 2^40.
    pub strides: [u64; 3],
    /// Elements of a box in the second, third and fourth dimension, from 1 to 256. In the first there are 128 bytes, which
    /// lie in shared memory in the order of the 128-byte swizzle.
    pub of_box: [u32; 3],
}

/// A description as kernels take it, which must be aligned to 64 bytes: `CUtensorMap`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct TensorMap(pub [u64; 16]);

impl BoxedTensor {
    /// Whether a tensor keeps the limits above. Asked before the driver, whose refusals tools such as compute-sanitizer
    /// report. The driver may still refuse, for instance strides of 0.
    fn is_describable(&self) -> bool {
        let sizes = self.dimensions.iter().all(|n| (1..=1 << 32).contains(n));
        let strides = self
            .strides
            .iter()
            .all(|n| n.is_multiple_of(16) && *n < 1 << 40);
        let of_box = self.of_box.iter().all(|n| (1..=256).contains(n));
        let element = matches!(self.element_bytes, 2 | 4);
        element && sizes && strides && of_box && self.address.addr().is_multiple_of(16)
    }
}

/// Describes a tensor. `None`: the tensor breaks a limit of [`BoxedTensor`], the driver refuses it, or the driver is too
/// old to have the function (CUDA 12.0). The device's last error stays as it was.
pub(crate) fn tensor_map(tensor: &BoxedTensor) -> Option<TensorMap> {
    if !tensor.is_describable() {
        return None;
    }
    // `CU_TENSOR_MAP_DATA_TYPE_UINT16` and `_UINT32`, `_SWIZZLE_128B` and `_L2_PROMOTION_L2_256B` of cuda.h; the others
    // are 0.
    let data_type: c_uint = tensor.element_bytes / 2;
    const SWIZZLE: c_uint = 3;
    const PROMOTION: c_uint = 3;
    let [second, third, fourth] = tensor.of_box;
    let of_box = [128 / tensor.element_bytes, second, third, fourth];
    let mut map = TensorMap::default();
    // SAFETY: the driver writes the description and reads arrays of the tensor's rank.
    let made = unsafe {
        entered().ok()?.cuTensorMapEncodeTiled(
            map.0.as_mut_ptr().cast(),
            data_type,
            tensor.dimensions.len() as c_uint,
            tensor.address.cast_mut(),
            tensor.dimensions.as_ptr(),
            tensor.strides.as_ptr(),
            of_box.as_ptr(),
            [1; 4].as_ptr(),
            0,
            SWIZZLE,
            PROMOTION,
            0,
        )
    };
    made.ok().map(|()| map)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_that_the_driver_would_refuse_are_known() {
        let tensor = BoxedTensor {
            element_bytes: 2,
            address: core::ptr::without_provenance(4096),
            dimensions: [128, 16, 1000, 1],
            strides: [256, 4096, 16],
            of_box: [1, 64, 1],
        };
        assert!(tensor.is_describable());
        let changed = |change: fn(&mut BoxedTensor)| {
            let mut other = tensor;
            change(&mut other);
            other.is_describable()
        };
        assert!(changed(|t| t.dimensions[1] = 1 << 32));
        assert!(!changed(|t| t.address = core::ptr::without_provenance(4098)));
        assert!(!changed(|t| t.dimensions[2] = 0));
        assert!(!changed(|t| t.dimensions[2] = (1 << 32) + 1));
        assert!(!changed(|t| t.strides[1] = 4104));
        assert!(!changed(|t| t.strides[0] = 1 << 40));
        assert!(!changed(|t| t.of_box[1] = 257));
        assert!(!changed(|t| t.of_box[0] = 0));
        assert!(!changed(|t| t.element_bytes = 8));
    }
}
