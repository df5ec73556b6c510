//! Clang's offload bundles: files with several code objects.

use super::LoadError;

const MAGIC: &[u8] = b"__CLANG_OFFLOAD_BUNDLE__";
const COMPRESSED_MAGIC: &[u8] = b"CCOB";

/// Finds the code object for gfx942 in `bytes`. Returns `bytes` itself if it is no bundle.
pub(super) fn unwrap(bytes: &[u8]) -> Result<&[u8], LoadError> {
    if bytes.starts_with(COMPRESSED_MAGIC) {
        return Err(LoadError::CompressedBundle);
    }
    if !bytes.starts_with(MAGIC) {
        return Ok(bytes);
    }
    let mut targets = Vec::new();
    for entry in entries(bytes)? {
        let (target, range) = entry?;
        if runs_here(&target) {
            return range.and_then(|(start, end)| bytes.get(start..end)).ok_or(
                LoadError::Malformed("offload bundle: an entry lies outside the file"),
            );
        }
        targets.push(target);
    }
    Err(LoadError::NoTarget { targets })
}

/// Length in bytes of the bundle that starts with `head`; `None` if `head` is no bundle. `head` must hold the bundle's
/// header.
pub(super) fn length(head: &[u8]) -> Result<Option<usize>, LoadError> {
    if !head.starts_with(MAGIC) {
        return Ok(None);
    }
    let mut length = 0;
    for entry in entries(head)? {
        let (_, range) = entry?;
        let (_, end) = range.ok_or(LoadError::Malformed("offload bundle: entry size"))?;
        length = length.max(end);
    }
    Ok(Some(length))
}

type Entry = (String, Option<(usize, usize)>);

fn entries(bytes: &[u8]) -> Result<impl Iterator<Item = Result<Entry, LoadError>> + '_, LoadError> {
    let mut at = MAGIC.len();
    let count = u64_at(bytes, &mut at)?;
    Ok((0..count).map_while({
        let mut failed = false;
        move |_| {
            if failed {
                return None;
            }
            let entry = entry(bytes, &mut at);
            failed = entry.is_err();
            Some(entry)
        }
    }))
}

fn entry(bytes: &[u8], at: &mut usize) -> Result<Entry, LoadError> {
    let offset = u64_at(bytes, at)?;
    let size = u64_at(bytes, at)?;
    let name = usize::try_from(u64_at(bytes, at)?).ok();
    let end = name.and_then(|n| at.checked_add(n));
    let target = end.and_then(|end| bytes.get(*at..end)).ok_or(TRUNCATED)?;
    *at += target.len();
    let range = || {
        let start = usize::try_from(offset).ok()?;
        Some((start, start.checked_add(usize::try_from(size).ok()?)?))
    };
    Ok((String::from_utf8_lossy(target).into_owned(), range()))
}

pub(super) const TRUNCATED: LoadError =
    LoadError::Malformed("offload bundle: the header is cut off");

fn u64_at(bytes: &[u8], at: &mut usize) -> Result<u64, LoadError> {
    let value = bytes
        .get(*at..)
        .and_then(|b| b.first_chunk::<8>())
        .ok_or(TRUNCATED)?;
    *at += 8;
    Ok(u64::from_le_bytes(*value))
}

/// Whether a target id such as `hipv4-amdgcn-amd-amdhsa--gfx942:sramecc+:xnack-` is a gfx942 with this device's
/// features: SRAM ECC on, XNACK off.
fn runs_here(target: &str) -> bool {
    let Some((triple, id)) = target.split_once("--") else {
        return false;
    };
    let mut parts = id.split(':');
    triple.contains("amdgcn-amd-amdhsa")
        && parts.next() == Some("gfx942")
        && parts.all(|feature| feature == "sramecc+" || feature == "xnack-")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bundle(entries: &[(&str, &[u8])]) -> Vec<u8> {
        let header = MAGIC.len() + 8 + entries.iter().map(|(t, _)| 24 + t.len()).sum::<usize>();
        let mut out = MAGIC.to_vec();
        out.extend((entries.len() as u64).to_le_bytes());
        let mut offset = header;
        for (target, data) in entries {
            out.extend((offset as u64).to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            out.extend((target.len() as u64).to_le_bytes());
            out.extend(target.as_bytes());
            offset += data.len();
        }
        for (_, data) in entries {
            out.extend(*data);
        }
        out
    }

    const HOST: &str = "host-x86_64-unknown-linux--";

    #[test]
    fn picks_the_entry_of_this_device() {
        let b = bundle(&[
            (HOST, b""),
            ("hipv4-amdgcn-amd-amdhsa--gfx90a", b"no"),
            ("hipv4-amdgcn-amd-amdhsa--gfx942:xnack+", b"no"),
            ("hipv4-amdgcn-amd-amdhsa--gfx942:sramecc+:xnack-", b"yes"),
        ]);
        assert_eq!(unwrap(&b).unwrap(), b"yes");
        assert_eq!(length(&b).unwrap(), Some(b.len()));
        for cut in 0..b.len() {
            if let Ok(found) = unwrap(&b[..cut]) {
                assert!(cut < MAGIC.len(), "{cut}: {found:?}");
            }
        }
    }

    #[test]
    fn names_the_targets_it_found() {
        let b = bundle(&[(HOST, b""), ("hipv4-amdgcn-amd-amdhsa--gfx90a", b"x")]);
        let Err(LoadError::NoTarget { targets }) = unwrap(&b) else {
            panic!("no gfx942 in it")
        };
        assert_eq!(targets, [HOST, "hipv4-amdgcn-amd-amdhsa--gfx90a"]);
        assert_eq!(unwrap(b"CCOB\x02\0"), Err(LoadError::CompressedBundle));
    }
}
