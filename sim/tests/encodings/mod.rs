//! Random encodings of every format. Most are valid, so that tests reach the details of each opcode.
#![allow(dead_code)]

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    /// Any dword.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) >> 32) as u32
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u32) -> u32 {
        self.next() % n
    }

    /// One of some.
    pub fn pick(&mut self, from: &[u32]) -> u32 {
        from[self.below(from.len() as u32) as usize]
    }

    /// The value half of the time, else 0.
    pub fn maybe(&mut self, value: u32) -> u32 {
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
pub fn encode(r: &mut Random, format: &str, op: u32) -> [u32; 2] {
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
            let saddr = match r.below(4) {
                0 | 1 => 0x7f,
                2 => 0,
                _ => r.scalar() & 127,
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

/// Formats and the number of their opcodes.
pub const FORMATS: [(&str, u32); 15] = [
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
