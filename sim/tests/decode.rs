//! The decoder and the disassembler against LLVM.

use deltawave_sim::{decode, disasm, op::Op};

/// Text of the instruction that starts with these dwords, and its size.
fn text(dwords: &[u32]) -> (String, u8) {
    let inst = decode::decode(dwords);
    (disasm::text(&inst, 0), inst.size)
}

#[test]
fn operand_forms_print_as_llvm_prints_them() {
    let mut wrong = Vec::new();
    for line in include_str!("data/gfx942-forms.txt").lines() {
        if line.starts_with('#') {
            continue;
        }
        let (hex, expected) = line.split_once(' ').expect("two columns");
        let bytes: Vec<u8> = (0..hex.len() / 2)
            .map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).expect("hex"))
            .collect();
        let dwords: Vec<u32> = bytes
            .chunks(4)
            .map(|b| u32::from_le_bytes(b.try_into().expect("whole dwords")))
            .collect();
        let (text, size) = text(&dwords);
        if text != expected.trim() || usize::from(size) != bytes.len() {
            wrong.push(format!("{hex}: {text:?}, not {:?}", expected.trim()));
        }
    }
    assert!(
        wrong.is_empty(),
        "{}\n{} wrong",
        wrong.join("\n"),
        wrong.len()
    );
}

#[test]
fn mnemonics_are_the_names() {
    assert_eq!(Op::INVALID.mnemonic(), "invalid");
    assert_eq!(Op::V_XOR_B32.mnemonic(), "v_xor_b32");
    assert_eq!(Op::V_XOR_B32 as usize + 1, Op::COUNT);
}

mod llvm;
use llvm::Verdict;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) >> 32) as u32
    }

    fn below(&mut self, n: u32) -> u32 {
        self.next() % n
    }

    fn pick(&mut self, from: &[u32]) -> u32 {
        from[self.below(from.len() as u32) as usize]
    }

    /// The value half of the time, else 0.
    fn maybe(&mut self, value: u32) -> u32 {
        if self.next() & 1 == 0 { value } else { 0 }
    }

    /// A scalar operand: mostly aligned registers, sometimes anything.
    fn scalar(&mut self) -> u32 {
        match self.below(8) {
            0..=2 => self.below(102) & !3,
            3 => self.below(256),
            4 => self.pick(&[102, 104, 106, 108, 112, 120, 124, 126, 127, 107, 125]),
            5 => 128 + self.below(81),
            6 => 235 + self.below(14),
            _ => self.pick(&[251, 252, 253, 255, 0, 0]),
        }
    }

    /// A vector register, mostly even.
    fn vector(&mut self) -> u32 {
        match self.below(4) {
            0 => self.below(256),
            _ => self.below(128) << 1,
        }
    }

    /// A 9-bit source.
    fn source(&mut self) -> u32 {
        match self.below(5) {
            0 | 1 => 256 + self.vector(),
            2 => 0,
            _ => self.scalar(),
        }
    }

    /// Three 9-bit sources and 5 modifier bits.
    fn sources(&mut self) -> u32 {
        let count = self.below(4);
        let mut word = 0;
        for i in 0..3 {
            if i < count {
                word |= self.source() << (9 * i);
            }
        }
        let modifiers = self.next() & 0xf800_0000;
        word | self.maybe(modifiers)
    }
}

/// One encoding of a format, with the opcode given.
fn encode(r: &mut Random, format: &str, op: u32) -> [u32; 2] {
    let anything = r.next();
    match format {
        "sop2" => [
            0x8000_0000 | op << 23 | (r.scalar() & 127) << 16 | r.scalar() << 8 | r.scalar(),
            anything,
        ],
        "sopk" => {
            let constant = r.next() & 0xffff;
            [
                0xb000_0000 | op << 23 | (r.scalar() & 127) << 16 | constant,
                anything,
            ]
        }
        "sop1" => [
            0xbe80_0000 | (r.scalar() & 127) << 16 | op << 8 | r.scalar(),
            anything,
        ],
        "sopc" => [
            0xbf00_0000 | op << 16 | r.scalar() << 8 | r.scalar(),
            anything,
        ],
        "sopp" => {
            let constant = r.next() & r.pick(&[0xffff, 0xff, 0xf, 0]);
            [0xbf80_0000 | op << 16 | constant, anything]
        }
        "smem" => {
            let flags = r.next() & 0x0003_c000;
            let base = r.pick(&[0, 2, 4, 8, 32, 34, 48, 53, 60]);
            let second = r.scalar() << 25 | anything & r.pick(&[0x1f_ffff, 0xff, 0x7e, 0]);
            [
                0xc000_0000 | op << 18 | flags | (r.scalar() & 127) << 6 | base,
                second,
            ]
        }
        "vop1" => [
            0x7e00_0000 | r.vector() << 17 | op << 9 | vop_source(r),
            second(r),
        ],
        "vop2" => [
            op << 25 | r.vector() << 17 | r.vector() << 9 | vop_source(r),
            second(r),
        ],
        "vopc" => [
            0x7c00_0000 | op << 17 | r.vector() << 9 | vop_source(r),
            second(r),
        ],
        "vop3" | "vop3p" => {
            let low = r.next() & 0xff00;
            let low = r.maybe(low) | if r.below(3) == 0 { 0x8000 } else { 0 };
            let low = if r.below(4) == 0 { low | 0x4000 } else { low };
            let base = if format == "vop3" {
                0xd000_0000
            } else {
                0xd380_0000
            };
            let dst = if r.next() & 1 == 0 {
                r.scalar() & 255
            } else {
                r.vector()
            };
            [base | op << 16 | low | dst, r.sources()]
        }
        "ds" => {
            let flags = r.next() & 0x0201_ffff;
            [0xd800_0000 | op << 17 | r.maybe(flags), bytes(r)]
        }
        "flat" => {
            let flags = r.next() & 0x0203_ffff;
            let saddr = if r.next() & 1 == 0 {
                0x7f
            } else {
                r.scalar() & 127
            };
            let second = bytes(r) & !0x7f_0000 | saddr << 16;
            [
                0xdc00_0000 | op << 18 | flags & if r.below(3) == 0 { u32::MAX } else { !0x2000 },
                second,
            ]
        }
        "mubuf" => {
            let flags = r.next() & if r.below(4) == 0 { 0x3_ffff } else { 0x2_ffff };
            let second = bytes(r) & 0x00ff_ffff | r.scalar() << 24;
            [0xe000_0000 | op << 18 | flags, second & !0x0003_0000]
        }
        _ => {
            let flags = r.next() & 0x03f8_7fff;
            let second = bytes(r) & 0x00ff_ffff | r.scalar() << 24;
            [0xe800_0000 | op << 15 | flags, second & !0x0003_0000]
        }
    }
}

/// Four register numbers, some of them 0.
fn bytes(r: &mut Random) -> u32 {
    let mut word = 0;
    for i in 0..4 {
        let register = r.vector();
        word |= r.maybe(register) << (8 * i);
    }
    word
}

fn vop_source(r: &mut Random) -> u32 {
    match r.below(4) {
        0 => 249,
        1 => 250,
        _ => r.source(),
    }
}

/// A literal, or the second dword of SDWA or DPP.
fn second(r: &mut Random) -> u32 {
    let anything = r.next();
    match r.below(4) {
        0 => anything,
        1 => r.pick(&[
            0,
            1,
            64,
            65,
            0x3f00_0000,
            0x3800,
            0xffff_fff0,
            0xffff_ffff,
            0x3e22_f983,
        ]),
        2 => {
            // SDWA: selections below 7, which LLVM does not survive.
            let sel = |r: &mut Random| r.below(7);
            let (a, b, c) = (sel(r), sel(r), sel(r));
            let rest = anything & r.pick(&[0x0000_00ff, 0x0080_f8ff, 0xf8f8_f8ff, 0x8880_98fe]);
            rest | a << 8 | b << 16 | c << 24
        }
        _ => {
            let control = r.pick(&[
                0xe4, 0x1b, 0x101, 0x111, 0x12f, 0x130, 0x134, 0x138, 0x13c, 0x140, 0x141, 0x142,
                0x143, 0x150, 0x155, 0x15f, 0x160,
            ]);
            let rest = anything & r.pick(&[0xff08_00ff, 0xfff8_00ff, 0xff38_00fe]);
            rest | control << 8
        }
    }
}

const FORMATS: [(&str, u32); 15] = [
    ("sop2", 96),
    ("sopk", 29),
    ("sop1", 256),
    ("sopc", 128),
    ("sopp", 128),
    ("smem", 256),
    ("vop1", 256),
    ("vop2", 62),
    ("vopc", 256),
    ("vop3", 896),
    ("vop3p", 128),
    ("ds", 256),
    ("flat", 128),
    ("mubuf", 128),
    ("mtbuf", 16),
];

/// Differences between us and LLVM, as lines.
fn compare(mc: &str, pairs: &[[u32; 2]]) -> Vec<String> {
    let mut wrong = Vec::new();
    for chunk in pairs.chunks(4000) {
        for (pair, verdict) in chunk.iter().zip(llvm::disassemble(mc, chunk)) {
            let inst = decode::decode(pair);
            let ours = if inst.op == Op::INVALID {
                Verdict::Invalid
            } else {
                Verdict::Text(disasm::text(&inst, 0), inst.size)
            };
            // LLVM also takes operands that gfx942 does not have, or not in that place.
            let lenient = matches!(&verdict, Verdict::Text(text, _) if ours == Verdict::Invalid
                && (text.contains("src_") || text.contains("null")));
            if verdict != Verdict::Unclear && ours != verdict && !lenient {
                wrong.push(format!(
                    "{:08x} {:08x}: {ours:?}, LLVM {verdict:?}",
                    pair[0], pair[1]
                ));
            }
        }
    }
    wrong
}

fn variants() -> u32 {
    std::env::var("DELTAWAVE_DECODE_VARIANTS")
        .ok()
        .and_then(|v| v.parse().ok())
        .unwrap_or(12)
}

#[test]
fn every_opcode_agrees_with_llvm() {
    let Some(mc) = llvm::tool(&["llvm-mc-19"]) else {
        return;
    };
    let mut r = Random(1);
    let mut pairs = Vec::new();
    for (format, opcodes) in FORMATS {
        for op in 0..opcodes {
            for _ in 0..variants() {
                pairs.push(encode(&mut r, format, op));
            }
        }
    }
    let wrong = compare(&mc, &pairs);
    assert!(
        wrong.is_empty(),
        "{}\n{} of {} wrong",
        wrong.join("\n"),
        wrong.len(),
        pairs.len()
    );
}

#[test]
fn random_dwords_agree_with_llvm() {
    let Some(mc) = llvm::tool(&["llvm-mc-19"]) else {
        return;
    };
    let mut r = Random(2);
    let pairs: Vec<[u32; 2]> = (0..20_000).map(|_| [r.next(), r.next()]).collect();
    let wrong = compare(&mc, &pairs);
    assert!(
        wrong.is_empty(),
        "{}\n{} of {} wrong",
        wrong.join("\n"),
        wrong.len(),
        pairs.len()
    );
}

#[test]
fn random_dwords_never_panic() {
    let mut r = Random(3);
    for _ in 0..2_000_000 {
        let pair = [r.next(), r.next()];
        let inst = decode::decode(&pair);
        assert!(inst.size == 4 || inst.size == 8);
        assert!(!disasm::text(&inst, 0).is_empty());
        let short = decode::decode(&pair[..1]);
        assert!(short.size == 4, "{pair:x?}");
    }
    assert_eq!(decode::decode(&[]).op, Op::INVALID);
}

#[test]
fn compiled_kernels_print_as_llvm_prints_them() {
    let Some(clang) = llvm::tool(&["clang++-19", "clang++-20", "clang++-21", "clang++"]) else {
        return;
    };
    let Some(objdump) = llvm::tool(&["llvm-objdump-19"]) else {
        return;
    };
    for optimisation in ["-O0", "-O1", "-O3"] {
        let folder = std::env::temp_dir().join(format!("deltawave-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("temporary folder");
        let object = folder.join("disasm.co").display().to_string();
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/kernels/disasm.hip");
        let fixed = "-x hip -nogpuinc -nogpulib --offload-arch=gfx942 --offload-device-only --no-gpu-bundle-output";
        let mut arguments: Vec<&str> = fixed.split(' ').collect();
        arguments.extend([optimisation, "-o", &object, source]);
        let (_, err) = llvm::pipe(&clang, &arguments, "").expect("installed");
        assert!(std::path::Path::new(&object).exists(), "{err}");
        let (listing, _) =
            llvm::pipe(&objdump, &["-d", "--mcpu=gfx942", &object], "").expect("installed");
        std::fs::remove_dir_all(&folder).expect("own folder");
        let mut wrong = Vec::new();
        let mut count = 0;
        for line in listing.lines() {
            // `TEXT // ADDRESS: DWORD DWORD <TARGET>`
            let Some((expected, code)) = line.split_once("//") else {
                continue;
            };
            let code = code.split('<').next().expect("some");
            let dwords: Vec<u32> = code
                .split_whitespace()
                .skip(1)
                .map(|word| u32::from_str_radix(word, 16).expect("hex"))
                .collect();
            let expected = expected.split_whitespace().collect::<Vec<_>>().join(" ");
            if expected == "..." || dwords.is_empty() {
                continue;
            }
            let (text, size) = text(&dwords);
            if text != expected || usize::from(size) != 4 * dwords.len() {
                wrong.push(format!("{dwords:08x?}: {text:?}, not {expected:?}"));
            }
            count += 1;
        }
        assert!(wrong.is_empty(), "{optimisation}:\n{}", wrong.join("\n"));
        assert!(count > 500, "{optimisation}: {count} instructions");
        println!("{optimisation}: {count} instructions");
    }
}

#[test]
fn programs_resolve_branches() {
    // s_cbranch_scc1 +2 (over a literal), s_mov_b32 s0 literal, s_branch -4, s_branch outside.
    let words: [u32; 5] = [
        0xbf85_0002,
        0xbe80_00ff,
        0x1234_5678,
        0xbf82_fffc,
        0xbf82_7000,
    ];
    let text: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    let program = decode::program(&text, 0x1000);
    assert_eq!(program.base, 0x1000);
    assert_eq!(program.offsets, [0, 4, 12, 16]);
    assert_eq!(program.index_of_dword, [0, 1, u32::MAX, 2, 3]);
    let targets: Vec<u32> = program.insts.iter().map(|i| i.target).collect();
    assert_eq!(targets, [2, u32::MAX, 0, u32::MAX]);
    assert_eq!(program.insts[1].literal, 0x1234_5678);
}
