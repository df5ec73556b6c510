//! Loads code objects that clang builds, and damaged ones.

mod common;

use deltawave_sim::code_object::{CodeObject, LoadError};

fn object() -> Option<Vec<u8>> {
    common::compile("launch.hip", &[])
}

#[test]
fn reads_descriptors_and_metadata() {
    let Some(bytes) = object() else { return };
    let code = CodeObject::load(&bytes).unwrap();
    let k = code.kernel("reduce").unwrap();
    let m = &k.metadata;
    assert_eq!(m.symbol, "reduce.kd");
    assert_eq!(m.group_segment_fixed_size, 4096);
    assert_eq!(m.max_flat_workgroup_size, 1024);
    assert_eq!((m.vgpr_spill_count, m.sgpr_spill_count), (0, 0));
    assert_eq!(m.args[0].value_kind, "global_buffer");
    assert_eq!((m.args[1].offset, m.args[1].size), (8, 8));
    assert_eq!(k.explicit_size(), 16);
    assert!(m.kernarg_segment_size > 16 && m.args.iter().any(|a| a.is_hidden()));
    assert!(!k.ordered);

    for k in code.kernels() {
        let (m, d) = (&k.metadata, &k.descriptor);
        assert_eq!(d.group_segment_fixed_size, m.group_segment_fixed_size);
        assert_eq!(d.private_segment_fixed_size, m.private_segment_fixed_size);
        assert_eq!(d.kernarg_size, m.kernarg_segment_size);
        assert!(
            d.vgprs() >= m.vgpr_count && d.vgprs() < m.vgpr_count + 16,
            "{}",
            m.name
        );
        assert!(d.accum_offset() <= d.vgprs());
        // Round to nearest even, f32 and f16/f64 denormals, DX10 clamp, IEEE: HIP's defaults.
        assert_eq!(d.mode(), 0x3f0, "{}", m.name);
        assert_eq!(k.object & 63, 0);
    }
    assert!(
        code.kernel("calls")
            .unwrap()
            .descriptor
            .private_segment_fixed_size
            > 0
    );
    assert!(code.kernel("tickets").unwrap().ordered);
    assert!(!code.kernel("count").unwrap().ordered);
}

#[test]
fn relocates_variables() {
    let Some(bytes) = object() else { return };
    let code = CodeObject::load(&bytes).unwrap();
    let table = code.global("table").unwrap();
    let pointer = code.global("pointer").unwrap();
    assert_eq!((table.size, pointer.size), (16, 8));
    let extent = code.extent();
    assert!(extent.start <= table.address && table.address + 16 <= extent.end);
    // SAFETY: variables of a loaded code object are host memory.
    unsafe {
        assert_eq!(*(table.address as *const [i32; 4]), [10, 20, 30, 40]);
        assert_eq!(*(pointer.address as *const u64), table.address + 8);
    }
    assert!(code.global("saxpy.kd").is_none() && code.global("saxpy").is_none());
}

#[test]
fn knows_its_length() {
    let Some(bytes) = object() else { return };
    let bundle = common::bundle(&bytes);
    for file in [&bytes, &bundle] {
        // SAFETY: a whole file.
        let length = unsafe { CodeObject::length_at(file.as_ptr()) };
        assert_eq!(length, Ok(file.len()));
    }
    let code = CodeObject::load(&bundle).unwrap();
    assert!(code.kernel("saxpy").is_some());
}

#[test]
fn preloads_where_the_compiler_says_so() {
    let flags = ["-mllvm", "-amdgpu-kernarg-preload-count=8"];
    let (Some(plain), Some(preloaded)) = (object(), common::compile("launch.hip", &flags)) else {
        return;
    };
    let plain = CodeObject::load(&plain).unwrap();
    assert_eq!(
        plain.kernel("preload").unwrap().descriptor.preload(),
        (0, 0)
    );
    let preloaded = CodeObject::load(&preloaded).unwrap();
    assert_eq!(
        preloaded.kernel("preload").unwrap().descriptor.preload(),
        (0, 6)
    );
}

#[test]
fn other_machines_are_named() {
    let Some(mut bytes) = object() else { return };
    bytes[48] = 0x3f;
    let arch = "gfx90a".to_string();
    assert_eq!(
        CodeObject::load(&bytes).err(),
        Some(LoadError::WrongArch { arch })
    );
    bytes[18] = 62;
    bytes[19] = 0;
    assert_eq!(
        CodeObject::load(&bytes).err(),
        Some(LoadError::NotAmdgpu { machine: 62 })
    );
    assert!(matches!(
        CodeObject::load(b"MZ"),
        Err(LoadError::NotElf { .. })
    ));
    assert!(matches!(
        CodeObject::load(b""),
        Err(LoadError::NotElf { .. })
    ));
}

#[test]
fn damage_never_panics() {
    let Some(bytes) = object() else { return };
    // Section headers lie at the end, so every truncation is noticed.
    for cut in (0..bytes.len()).step_by(61).chain(0..400) {
        assert!(CodeObject::load(&bytes[..cut]).is_err(), "{cut} bytes load");
    }
    let mut state = 1u64;
    let mut random = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) as usize
    };
    let mut refused = 0;
    for round in 0..1200 {
        let mut b = bytes.clone();
        for _ in 0..1 + round % 4 {
            // Headers and note at the front, tables at the end: text in between is only decoded.
            let at = match round % 3 {
                0 => random() % 0x240,
                1 => random() % b.len(),
                _ => b.len() - 1 - random() % (b.len() / 4),
            };
            b[at] = if round % 2 == 0 {
                b[at] ^ 1 << (random() % 8)
            } else {
                random() as u8
            };
        }
        refused += usize::from(CodeObject::load(&b).is_err());
    }
    assert!(refused > 120, "{refused}");
}
