//! Which paths name the same file.

use std::fs::{self, Metadata};
use std::path::{Path, PathBuf};

/// Whether writing to one path changes what the other one names: the same path, links to it, or hard links.
///
/// Devices such as `/dev/null` are no files in this sense.
pub fn same(a: &Path, b: &Path) -> bool {
    match (fs::metadata(a), fs::metadata(b)) {
        (Ok(of_a), Ok(of_b)) => of_a.is_file() && one_file((a, &of_a), (b, &of_b)),
        // A file that does not exist yet may be written under two names.
        (Err(_), Err(_)) => target(a) == target(b),
        _ => false,
    }
}

#[cfg(unix)]
fn one_file((_, a): (&Path, &Metadata), (_, b): (&Path, &Metadata)) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

#[cfg(not(unix))]
fn one_file((a, _): (&Path, &Metadata), (b, _): (&Path, &Metadata)) -> bool {
    target(a) == target(b)
}

/// The path that is created where `path` is written: dangling links followed, its folder in one spelling.
fn target(path: &Path) -> PathBuf {
    /// Links that are followed; Linux follows as many.
    const LINKS: usize = 40;
    let mut path = path.to_owned();
    for _ in 0..LINKS {
        let Ok(link) = fs::read_link(&path) else {
            break;
        };
        path = path.parent().unwrap_or(Path::new("")).join(link);
    }
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    match (folder.canonicalize(), path.file_name()) {
        (Ok(folder), Some(name)) => folder.join(name),
        _ => path,
    }
}
