// Code objects built ahead: a folder that one machine makes, and that builds elsewhere embed without a compiler.
//
//     manifest.txt        format, version, digest of the sources, then a line per architecture and per file
//     gfx942/commit.co
//     sm_90a/commit.ptx
//
// The manifest says which sources the code objects are of: others are refused, because the kernels' arguments and launch
// sizes are compiled into the crate.

use std::fmt;
use std::path::{Path, PathBuf};
use std::{fs, io};

use super::kernels::{arguments, object_name, sources};
use super::sha256;

/// The file that describes a folder of code objects.
pub const MANIFEST: &str = "manifest.txt";
const FORMAT: &str = "deltawave code objects, format 1";

/// The code objects of one architecture, in the order of the sources.
#[derive(Debug, PartialEq, Eq)]
pub struct OfArch {
    pub arch: String,
    /// The compiler that made them, in words.
    pub compiler: String,
    /// Name and file of each.
    pub objects: Vec<(String, PathBuf)>,
}

/// Why a folder of code objects cannot be embedded.
#[derive(Debug)]
pub enum PrebuiltError {
    /// A file that cannot be read.
    Read(PathBuf, io::Error),
    /// A line of the manifest that means nothing, counted from 1.
    Line(PathBuf, usize, String),
    /// Made from other sources than those of this crate.
    Sources {
        folder: PathBuf,
        /// Version of deltawave and digest of the sources: of the folder, and of this crate.
        theirs: (String, String),
        ours: (String, String),
    },
    /// No code objects for an architecture that `DELTAWAVE_ARCHS` asks for.
    Arch {
        folder: PathBuf,
        arch: String,
        there: Vec<String>,
    },
    /// A code object that the manifest does not list.
    Unlisted(PathBuf),
    /// A file that is not the one that the manifest describes.
    Changed(PathBuf),
}

impl fmt::Display for PrebuiltError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read(path, e) => write!(
                f,
                "{} cannot be read: {e}; `make code-objects` makes such a folder",
                path.display()
            ),
            Self::Line(path, line, text) => write!(
                f,
                "{} line {line}: {text:?}; it must be a manifest whose first line is {FORMAT:?}",
                path.display()
            ),
            Self::Sources {
                folder,
                theirs,
                ours,
            } => write!(
                f,
                "{} is for deltawave {} with sources {}; it must be for this crate, {} with sources {}",
                folder.display(),
                theirs.0,
                theirs.1,
                ours.0,
                ours.1
            ),
            Self::Arch {
                folder,
                arch,
                there,
            } => write!(
                f,
                "{} has no code objects for {arch}; DELTAWAVE_ARCHS may ask for {}",
                folder.display(),
                there.join(", ")
            ),
            Self::Unlisted(path) => write!(
                f,
                "{} is not in the manifest; there must be one code object for each source in hip/kernels",
                path.display()
            ),
            Self::Changed(path) => write!(
                f,
                "{} is not the file that the manifest describes: its SHA-256 differs",
                path.display()
            ),
        }
    }
}

impl std::error::Error for PrebuiltError {}

fn read(path: &Path) -> Result<Vec<u8>, PrebuiltError> {
    fs::read(path).map_err(|e| PrebuiltError::Read(path.into(), e))
}

/// The digest of everything that code objects are made from: files in `hip/`, and the compilers' options.
pub fn sources_digest(root: &Path) -> Result<String, PrebuiltError> {
    let mut files = Vec::new();
    list(&root.join("hip"), "hip", &mut files)?;
    files.sort();
    let mut text = String::new();
    for (name, path) in files {
        text.push_str(&format!("{} {name}\n", sha256::hex(&read(&path)?)));
    }
    for arch in ["gfx942", "sm_90a"] {
        for option in arguments(Path::new("source"), arch, Path::new("output")) {
            text.push_str(&format!("{}\n", option.display()));
        }
    }
    Ok(sha256::hex(text.as_bytes()))
}

/// Files below a folder: their names with `/` between folders, and their paths.
fn list(
    folder: &Path,
    name: &str,
    files: &mut Vec<(String, PathBuf)>,
) -> Result<(), PrebuiltError> {
    let failed = |e| PrebuiltError::Read(folder.into(), e);
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = format!("{name}/{}", entry.file_name().display());
        if entry.path().is_dir() {
            list(&entry.path(), &name, files)?;
        } else {
            files.push((name, entry.path()));
        }
    }
    Ok(())
}

/// Writes the manifest of a folder in which the code objects are already.
pub fn write_manifest(
    folder: &Path,
    root: &Path,
    version: &str,
    of_archs: &[OfArch],
) -> Result<(), PrebuiltError> {
    let digest = sources_digest(root)?;
    let mut text = format!("{FORMAT}\nversion {version}\nsources {digest}\n");
    for of_arch in of_archs {
        text.push_str(&format!("arch {} {}\n", of_arch.arch, of_arch.compiler));
        for (name, path) in &of_arch.objects {
            let file = object_name(name, &of_arch.arch);
            let digest = sha256::hex(&read(path)?);
            text.push_str(&format!("object {digest} {}/{file}\n", of_arch.arch));
        }
    }
    let path = folder.join(MANIFEST);
    fs::write(&path, text).map_err(|e| PrebuiltError::Read(path, e))
}

/// The file of a code object in such a folder.
pub fn object_path(folder: &Path, arch: &str, name: &str) -> PathBuf {
    folder.join(arch).join(object_name(name, arch))
}

/// The code objects in a folder for `archs`, or for all architectures that it has. They must be for the sources below `root`.
pub fn open(
    folder: &Path,
    root: &Path,
    version: &str,
    archs: Option<&[&str]>,
) -> Result<Vec<OfArch>, PrebuiltError> {
    let path = folder.join(MANIFEST);
    let bytes = read(&path)?;
    let text = String::from_utf8_lossy(&bytes);
    let bad = |line: usize, text: &str| PrebuiltError::Line(path.clone(), line + 1, text.into());
    if text.lines().next() != Some(FORMAT) {
        return Err(bad(0, text.lines().next().unwrap_or_default()));
    }
    let (mut theirs, mut compilers, mut digests) = ((None, None), Vec::new(), Vec::new());
    for (number, line) in text.lines().enumerate().skip(1) {
        let mut words = line.splitn(3, ' ');
        match (words.next(), words.next(), words.next()) {
            (Some("version"), Some(version), None) => theirs.0 = Some(version),
            (Some("sources"), Some(digest), None) => theirs.1 = Some(digest),
            (Some("arch"), Some(arch), Some(compiler)) => compilers.push((arch, compiler)),
            (Some("object"), Some(digest), Some(file)) => digests.push((file, digest)),
            _ => return Err(bad(number, line)),
        }
    }
    let theirs = (
        theirs.0.unwrap_or("of no version").to_owned(),
        theirs.1.unwrap_or("unknown").to_owned(),
    );
    let ours = (version.to_owned(), sources_digest(root)?);
    if theirs != ours {
        let folder = folder.into();
        return Err(PrebuiltError::Sources {
            folder,
            theirs,
            ours,
        });
    }
    let there: Vec<&str> = compilers.iter().map(|(arch, _)| *arch).collect();
    let kernels = root.join("hip/kernels");
    let sources = sources(root).map_err(|e| PrebuiltError::Read(kernels, e))?;
    let mut found = Vec::new();
    for arch in archs.unwrap_or(&there) {
        let Some((_, compiler)) = compilers.iter().find(|(a, _)| a == arch) else {
            return Err(PrebuiltError::Arch {
                folder: folder.into(),
                arch: (*arch).to_owned(),
                there: there.iter().map(|a| (*a).to_owned()).collect(),
            });
        };
        let mut objects = Vec::new();
        for source in &sources {
            let stem = source.file_stem().unwrap_or_default();
            let name = stem.to_string_lossy().into_owned();
            let path = object_path(folder, arch, &name);
            let file = format!("{arch}/{}", object_name(&name, arch));
            let Some((_, digest)) = digests.iter().find(|(f, _)| *f == file) else {
                return Err(PrebuiltError::Unlisted(path));
            };
            if sha256::hex(&read(&path)?) != *digest {
                return Err(PrebuiltError::Changed(path));
            }
            objects.push((name, path));
        }
        found.push(OfArch {
            arch: (*arch).to_owned(),
            compiler: (*compiler).to_owned(),
            objects,
        });
    }
    Ok(found)
}
